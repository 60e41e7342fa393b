// @ts-check

/** An error that says what the visitor can do, with a name, such as InputError: the how-to page lists them. */
export class ModelError extends Error {
  /** @param {string} message @param {string} name @param {unknown} cause what the browser or onnxruntime-web said */
  constructor(message, name, cause = null) {
    super(message, { cause });
    this.name = name;
  }
}

/** @param {string} message @param {string} name @param {unknown} [cause] @returns {never} */
export function refuse(message, name = "InputError", cause) {
  throw new ModelError(message, name, cause);
}

export const REPLACED = "has another SHA-256 than the file that was published: it is damaged or was replaced";

/** Throw a DownloadError. @param {string} path @param {string} problem @param {unknown} [cause] */
export const blame = (path, problem, cause) => refuse(`${path} ${problem}.`, "DownloadError", cause);

/**
 * Fetch a file, or throw a DownloadError.
 * @param {string} path @param {URL} folder @param {RequestInit} options
 */
export async function get(path, folder, options = {}) {
  const fail = (/** @type {string} */ why) => blame(path, `cannot be loaded (${why})`);
  const response = await fetch(new URL(path, folder), options).catch(() => {
    options.signal?.throwIfAborted();
    return fail("network error");
  });
  if (!response.ok) fail(`${response.status} ${response.statusText}`.trim());
  return typeOf(response).includes("html") ? fail("the server sent a web page instead") : response;
}

/** @param {Response} response */
const typeOf = ({ headers }) => headers.get("Content-Type") ?? "";

/** Return a digest in hexadecimal. @param {Uint8Array<ArrayBuffer>} content */
export async function sha256(content) {
  const digest = await crypto.subtle.digest("SHA-256", content);
  return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Throw a DownloadError if the server does not send modules as such, or if one is empty or has another digest.
 * @param {string[]} paths @param {URL} folder @param {Record<string, string>} digests
 */
export function checkModules(paths, folder, digests = {}) {
  return Promise.all(paths.map(async (path) => {
    const response = await get(path, folder, { cache: "no-cache" }), type = typeOf(response);
    if (!type.includes("javascript")) blame(path, `is sent as ${type || "no type"}: the server must send it as text/javascript`);
    const content = new Uint8Array(await response.arrayBuffer());
    if (!content.length) blame(path, "is empty: publish the model again");
    if (path in digests && await sha256(content) !== digests[path]) blame(path, REPLACED);
  }));
}

/** Import a module, or throw a DownloadError. @param {string} path @param {URL} folder */
export async function load(path, folder) {
  const found = await import(new URL(path, folder).href).catch((error) => error);
  if (!(found instanceof Error) && Object.keys(found).length) return found;
  await checkModules([path], folder);
  return blame(path, "is damaged: publish the model again", found.message);
}
