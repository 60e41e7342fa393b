// @ts-check

/** An error that says what the visitor can do, with a name, such as InputError: the how-to page lists them. */
export class ModelError extends Error {
  /** @param {string} message @param {string} name */
  constructor(message, name) {
    super(message);
    this.name = name;
  }
}

/** @param {string} message @param {string} name @returns {never} */
export function refuse(message, name = "InputError") {
  throw new ModelError(message, name);
}

/**
 * Fetch a file, or throw a DownloadError.
 * @param {string} path @param {URL} folder @param {RequestInit} options
 */
export async function get(path, folder, options = {}) {
  const fail = (/** @type {string} */ why) => { refuse(`${path} cannot be loaded (${why}).`, "DownloadError"); };
  const response = await fetch(new URL(path, folder), options).catch((error) => {
    options.signal?.throwIfAborted();
    return fail(error.message);
  });
  return response.ok ? response : fail(`${response.status} ${response.statusText}`);
}

/** Throw a DownloadError if the server does not send modules as such. @param {string[]} paths @param {URL} folder */
export async function checkModules(paths, folder) {
  for (const path of paths) {
    const type = (await get(path, folder)).headers.get("Content-Type");
    if (!type?.includes("javascript")) refuse(`${path} is sent as ${type}: the server must send it as text/javascript.`, "DownloadError");
  }
}

/** Import a module, or throw a DownloadError. @param {string} path @param {URL} folder */
export function load(path, folder) {
  return import(new URL(path, folder).href).catch(async (error) => {
    await checkModules([path], folder);
    refuse(`${path} is damaged: publish the model again (${error.message}).`, "DownloadError");
  });
}
