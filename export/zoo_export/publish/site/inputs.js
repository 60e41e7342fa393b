// Texts as inputs of a graph, and what running a model takes.
// @ts-check
/** @import { Graph, Manifest } from "./types.js" */
/** @import { InferenceSession, Tensor } from "onnxruntime-web" */
/** @import { Texts } from "./text.js" */
import { refuse } from "./errors.js";
import { tensor } from "./numbers.js";

/**
 * @typedef {Record<string, Tensor>} Feeds
 * @typedef {{ ort: typeof import("onnxruntime-web"), manifest: Manifest, sessions: Record<string, InferenceSession>, texts: Texts | null }} Model
 * @typedef {{ signal: AbortSignal, onText: (text: string) => void }} Hooks
 */

/**
 * @param {Model} model @param {string | [string, string]} input
 * @returns {{ ids: number[], types: number[] }}
 */
export function readText({ manifest, texts }, input) {
  if (!texts) refuse("The model has no tokenizer.");
  const [first, second] = typeof input === "string" ? [input, null] : input;
  for (const text of second === null ? [first] : [first, second]) {
    if (/\p{Cs}/u.test(text)) refuse("The text contains a lone surrogate.");
    if (texts.isEmpty(text)) refuse("The text is empty.");
  }
  const read = texts.encode(manifest.prefix + first, second), { positions, truncate } = manifest;
  const isMore = (/** @type {number | null} */ limit) => limit !== null && read.ids.length > limit;
  if (isMore(truncate) || isMore(positions)) refuse(`The text has ${read.ids.length} tokens, the model reads ${truncate ?? positions}: shorten it.`);
  if (manifest.mask && !read.ids.includes(manifest.mask.id)) refuse(`The text has no mask: write ${manifest.mask.text}.`);
  return read;
}

/**
 * @param {Model} model @param {Graph} graph @param {{ ids: number[], types: number[] }} read
 * @returns {Feeds}
 */
export function textFeeds({ ort, manifest }, graph, { ids, types }) {
  const length = Math.max(ids.length, manifest.length ?? 0);
  const values = {
    ids: (/** @type {number} */ place) => ids[place] ?? manifest.padId,
    mask: (/** @type {number} */ place) => Number(place < ids.length),
    positions: (/** @type {number} */ place) => Math.min(place, ids.length - 1),
    types: (/** @type {number} */ place) => (manifest.segments > 1 ? types[place] ?? 0 : 0),
  };
  /** @type {Feeds} */
  const feeds = {};
  for (const { name, dtype, role } of graph.inputs) {
    const value = values[/** @type {keyof typeof values} */ (role)], numbers = Array.from({ length }, (_, place) => value(place));
    feeds[name] = tensor(ort, dtype, [1, length], numbers);
  }
  return feeds;
}
