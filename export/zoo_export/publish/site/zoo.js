// Runs a published model in a worker: const session = await loadSession(); await session.run("text").
// @ts-check
/** @import { Loaded, LoadOptions, Manifest, Progress, Result, Runtime, RunOptions } from "./types.js" */

import { ModelError, blame, checkModules, get, refuse, sha256 } from "./errors.js";
import { checkInput, checkOptions, settle } from "./options.js";

export { ModelError };

/** The folder of this module. */
const HERE = new URL("./", import.meta.url);
const rule = (/** @type {string} */ type, /** @type {"positive" | null} */ bound = null) => ({ type: `${type} or none`, bound });
/** The options of loadSession, and of every call. */
const LOADING = { task: "loadSession", rules: {
  task: rule("str"), runtime: rule("str"), threads: rule("int", "positive"), unverified: rule("bool"), cache: rule("bool"),
  signal: rule("AbortSignal"), onProgress: rule("Function"), onText: rule("Function"),
} };

/** @param {string | URL} path */
function folderOf(path) {
  const folder = new URL(path, location.href);
  folder.pathname = folder.pathname.replace(/\/?$/, "/");
  return folder;
}

/**
 * Read the description of a published model.
 * @param {string | URL} folder of model.json
 * @returns {Promise<Manifest>}
 */
export async function describe(folder = HERE) {
  const lacks = missing();
  if (lacks) refuse(lacks, "UnsupportedError");
  const response = await get("model.json", folderOf(folder), { cache: "no-cache" }), text = await response.text().catch(() => "");
  const fail = (/** @type {string} */ why) => blame(response.url, `${why}: publish the model again`);
  /** @type {any} */
  let manifest = null;
  try { manifest = JSON.parse(text); } catch { /* told below */ }
  if (manifest?.schema > 1) fail(`has the unknown schema ${manifest.schema}`);
  const sealed = new TextEncoder().encode(text.slice(0, text.lastIndexOf(',"sha256":')));
  if (!manifest?.sha256 || manifest.sha256 !== await sha256(sealed)) fail("is damaged or was changed");
  return manifest;
}

/** Say what this browser lacks, or return null. */
export function missing() {
  if (!isSecureContext) return "The page must be served over HTTPS or from localhost: browsers check digests only there.";
  const old = "This browser is too old: ";
  if (typeof WebAssembly !== "object" || typeof Worker !== "function" || !globalThis.AbortSignal?.prototype.throwIfAborted || ![].with)
    return old + "it lacks WebAssembly, workers, AbortSignal.throwIfAborted or Array.with.";
  // A function with a vector instruction: v128.const, i8x16.popcnt, drop.
  const simd = [0, 97, 115, 109, 1, 0, 0, 0, 1, 4, 1, 96, 0, 0, 3, 2, 1, 0, 10, 25, 1, 23, 0, 253, 12, ...Array(16).fill(0), 253, 98, 26, 11];
  return WebAssembly.validate(new Uint8Array(simd)) ? null : old + "its WebAssembly lacks vector instructions.";
}

/**
 * Return the runtime to use: the first verified one that the browser has, or else the first that it has.
 * @param {Manifest} manifest @param {string} [name]
 * @returns {Promise<Runtime>}
 */
export async function chooseRuntime(manifest, name) {
  const has = await Promise.all(manifest.runtimes.map(async ({ name }) =>
    name === "web-wasm" || !!(await /** @type {any} */ (navigator).gpu?.requestAdapter().catch(() => null))));
  const found = manifest.runtimes.filter((runtime, place) => has[place] && (!name || runtime.name === name));
  const runtime = found.find(({ evidence }) => evidence.doubt === null) ?? found[0];
  if (!runtime) refuse(`The browser or the folder has no ${name ?? "runtime"}.`);
  return runtime;
}

/** Return the description of a model for a task, by default its own. @param {Manifest} manifest @param {string} [task] @returns {Manifest} */
function forTask(manifest, task) {
  const { task: own } = manifest, isFeatures = own === "feature-extraction";
  if (isFeatures && task === "sentence-embedding") return { ...manifest, task };
  if (task && task !== own) refuse(`The model's task is ${own}: a page cannot run ${task}.`);
  return isFeatures ? { ...manifest, prefix: "" } : manifest;
}

/**
 * Download a model, and open it in a worker.
 * @param {string | URL | Manifest} source the folder of model.json, or what describe() read in this folder
 * @param {LoadOptions} options
 */
export async function loadSession(source = HERE, options = {}) {
  const { onProgress, signal, task, ...rest } = checkOptions(LOADING, { ...options });
  const isRead = source instanceof Object && "schema" in source, folder = isRead ? HERE : folderOf(source);
  const manifest = forTask(isRead ? source : await describe(folder), task);
  const runtime = await chooseRuntime(manifest, rest.runtime);
  await checkModules(["worker.js", "errors.js", "files.js", "numbers.js", "inputs.js"], HERE); // an empty worker never answers
  const session = new Session(manifest, runtime);
  try {
    Object.assign(session, await session.call("load", { manifest, runtime, folder: folder.href, ...rest }, { signal, onProgress }));
    return session;
  } catch (error) {
    session.close();
    throw error;
  }
}

/** A model in a worker. Calls run one after the other. */
export class Session {
  #worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  /** @type {Map<number, any>} */
  #calls = new Map();
  #count = 0;
  /** @type {ModelError | null} */
  #failure = null;
  threads = 0;

  /** @param {Manifest} manifest @param {Runtime} runtime */
  constructor(manifest, runtime) {
    this.manifest = manifest;
    this.runtime = runtime.name;
    this.#worker.onmessage = ({ data: { id, ...message } }) => {
      const call = this.#calls.get(id);
      if (message.progress) call?.onProgress?.(message.progress);
      else if (message.text !== undefined) call?.onText?.(message.text);
      else if ("value" in message) call?.resolve(message.value);
      else {
        const { name, message: said, cause } = message.error;
        call?.reject(name === "AbortError" ? new DOMException(said, name) : new ModelError(said, name, cause));
      }
    };
    this.#worker.onerror = ({ message }) =>
      this.#fail(new ModelError("The worker failed: load the model again. If this does not help, publish it again.", "WorkerError", message));
  }

  /**
   * Run an input: a text, a pair of texts, or an image (a Blob or ImageData).
   * @param {string | [string, string] | Blob | ImageData} input @param {RunOptions} options
   * @returns {Promise<Result>}
   */
  async run(input, options = {}) {
    const { signal, onText, ...given } = { ...options };
    checkInput(this.manifest, input);
    return this.call("run", { input, options: settle(this.manifest, given) }, { signal, onText });
  }

  /**
   * Generate a text, piece by piece: for await (const piece of session.stream("text")). Leaving the loop cancels.
   * @param {string} input @param {RunOptions} options
   * @returns {AsyncGenerator<string, Result>}
   */
  async *stream(input, options = {}) {
    /** @type {string[]} */
    const pieces = [];
    let wake = () => {}, isDone = false;
    const control = new AbortController(), { signal } = control, cancel = () => control.abort(), outer = options?.signal;
    checkOptions(LOADING, { signal: outer });
    outer?.addEventListener("abort", cancel);
    if (outer?.aborted) cancel();
    const result = this.run(input, { ...options, signal, onText: (piece) => { pieces.push(piece); wake(); } });
    result.finally(() => { isDone = true; wake(); }).catch(() => {});
    try {
      for (;;) {
        while (pieces.length) yield /** @type {string} */ (pieces.shift());
        if (isDone) return await result;
        await new Promise((resolve) => { wake = () => resolve(null); });
      }
    } finally {
      outer?.removeEventListener("abort", cancel);
      cancel();
    }
  }

  /** End the worker, and free its memory. */
  close() {
    this.#worker.terminate();
    this.#fail(new ModelError("The session is closed.", "ClosedError"));
  }

  /**
   * @param {string} method @param {object} given
   * @param {{ signal?: AbortSignal, onText?: (piece: string) => void, onProgress?: (progress: Progress) => void }} hooks
   * @returns {Promise<any>}
   */
  async call(method, given, { signal, ...hooks } = {}) {
    checkOptions(LOADING, { signal, ...hooks });
    if (signal?.aborted) throw new DOMException("The call was cancelled.", "AbortError");
    if (this.#failure) throw this.#failure;
    const id = ++this.#count, cancel = () => this.#worker.postMessage({ id, method: "cancel" });
    signal?.addEventListener("abort", cancel);
    try {
      return await new Promise((resolve, reject) => {
        this.#calls.set(id, { resolve, reject, ...hooks });
        this.#worker.postMessage({ id, method, given });
      });
    } finally {
      signal?.removeEventListener("abort", cancel);
      this.#calls.delete(id);
    }
  }

  /** @param {ModelError} error */
  #fail(error) {
    this.#failure ??= error;
    for (const { reject } of this.#calls.values()) reject(this.#failure);
  }
}
