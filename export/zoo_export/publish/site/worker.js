// The worker: loads a model and runs it, one call after the other.
// @ts-check
/** @import { Generation, Loaded, Manifest, Result, Runtime } from "./types.js" */
/** @import { Hooks, Model } from "./inputs.js" */
/** @import { Texts } from "./text.js" */
import { ModelError, checkModules, load as module, refuse } from "./errors.js";
import { Downloads } from "./files.js";
import { readText } from "./inputs.js";

/** The largest number of bytes that 32-bit WebAssembly can address. */
const LARGEST = 2 ** 32;
/** @type {Map<number, AbortController>} */
const calls = new Map();
/** @type {Promise<unknown>} */
let last = Promise.resolve();
/** @type {Model} */
let model;

/**
 * @param {{ manifest: Manifest, runtime: Runtime, folder: string, threads?: number, unverified?: boolean, cache?: boolean }} given
 * @param {(message: object) => void} send @param {AbortSignal} signal
 * @returns {Promise<Loaded>}
 */
async function load({ manifest, runtime, folder, threads, unverified, cache }, send, signal) {
  const { doubt } = runtime.evidence;
  if (doubt !== null && !unverified) refuse(`There is no evidence that ${runtime.name} computes what the model does (${doubt}).`, "UnverifiedError");
  const pieces = Object.values(manifest.files).flatMap(({ parts }) => parts);
  const total = pieces.reduce((sum, { size }) => sum + size, runtime.wasm.size);
  if (total > LARGEST) refuse(`The model has ${(total / 1e9).toFixed(1)} GB, but a page can use 4.3 GB at most.`, "MemoryError");
  const base = new URL(folder), own = new URL("./", import.meta.url);
  const opened = cache === false ? null : await self.caches?.open(`zoo ${folder}`).catch(() => null);
  const downloads = new Downloads(base, total, (progress) => send({ progress }), signal, opened ?? null);
  const binary = await downloads.file({ ...runtime.wasm, parts: [runtime.wasm] });
  /** @type {Record<string, Uint8Array<ArrayBuffer>>} */
  const files = {};
  for (const [name, file] of Object.entries(manifest.files)) files[name] = await downloads.file(file);
  await downloads.tidy();

  const modules = [runtime.module, runtime.loader, ...(manifest.tokenizer ? [manifest.tokenizer.module] : [])];
  await checkModules(modules, base, manifest.modules);
  /** @type {typeof import("onnxruntime-web")} */
  const ort = await module(runtime.module, base);
  const count = self.crossOriginIsolated ? threads ?? Math.min(navigator.hardwareConcurrency, 8) : 1;
  ort.env.wasm.numThreads = count;
  ort.env.wasm.wasmBinary = binary.buffer;
  ort.env.wasm.wasmPaths = { mjs: new URL(runtime.loader, base).href };
  ort.env.logLevel = "error";
  /** @type {Model["sessions"]} */
  const sessions = {};
  for (const graph of manifest.graphs) {
    signal.throwIfAborted();
    sessions[graph.name] = await ort.InferenceSession.create(files[graph.file], {
      executionProviders: [runtime.name.replace("web-", "")],
      logSeverityLevel: 3,
      externalData: graph.weights.map((path) => ({ path, data: files[path] })),
    });
  }
  /** @type {Texts | null} */
  const texts = manifest.tokenizer && await (await module("text.js", own)).Texts.open(manifest.tokenizer, base, files);
  await module(manifest.generation ? "generate.js" : "answers.js", own);
  if (manifest.image) await module("image.js", own);
  const wrong = texts?.check(manifest.tokenizer?.samples ?? []);
  if (wrong && !unverified) refuse(`This page divides texts into other tokens than zoo does, such as ${JSON.stringify(wrong)}.`, "UnverifiedError");
  model = { ort, manifest, sessions, texts };
  return { runtime: runtime.name, threads: count };
}

/**
 * Run an input of the model's task.
 * @param {Model} model @param {any} input @param {Generation} options @param {Hooks} hooks
 * @returns {Promise<Result>}
 */
async function run(model, input, options, hooks) {
  if (model.manifest.generation) return (await import("./generate.js")).write(model, readText(model, input), options, hooks);
  return (await import("./answers.js")).answer(model, input);
}

/** Name errors by what a visitor can do. @param {unknown} error */
function described(error) {
  const { name = "Error", message = String(error) } = /** @type {Error} */ (error ?? {});
  if (/bad_alloc|out of memory|allocation failed|Array buffer allocation|memory access out of bounds/i.test(message))
    return { name: "MemoryError", message: "The browser has too little memory for the model: close other tabs, or choose a smaller model." };
  if (error instanceof ModelError || name === "AbortError") return { name, message, cause: /** @type {Error} */ (error).cause };
  return {
    name: "WorkerError", cause: message,
    message: model ? "The model failed on this input." : "The browser cannot open the model: publish it again, or try another browser.",
  };
}

self.onmessage = ({ data: { id, method, given } }) => {
  if (method === "cancel") return calls.get(id)?.abort(new DOMException("The call was cancelled.", "AbortError"));
  const control = new AbortController(), { signal } = control;
  calls.set(id, control);
  const send = (/** @type {object} */ message) => self.postMessage({ id, ...message });
  last = last.then(async () => {
    try {
      signal.throwIfAborted();
      send({ value: method === "load" ? await load(given, send, signal)
        : await run(model, given.input, given.options, { signal, onText: (text) => send({ text }) }) });
    } catch (error) {
      send({ error: described(error) });
    } finally {
      calls.delete(id);
    }
  });
};
