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

/** Throw a DownloadError if the server does not send modules as such, or if one is empty. @param {string[]} paths @param {URL} folder */
export function checkModules(paths, folder) {
  return Promise.all(paths.map(async (path) => {
    const response = await get(path, folder), type = typeOf(response);
    if (!type.includes("javascript")) blame(path, `is sent as ${type || "no type"}: the server must send it as text/javascript`);
    if (!(await response.text()).trim()) blame(path, "is empty: publish the model again");
  }));
}

/** Import a module, or throw a DownloadError. @param {string} path @param {URL} folder */
export async function load(path, folder) {
  const found = await import(new URL(path, folder).href).catch((error) => error);
  if (!(found instanceof Error) && Object.keys(found).length) return found;
  await checkModules([path], folder);
  return blame(path, "is damaged: publish the model again", found.message);
}
