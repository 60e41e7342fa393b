// The tasks: what a text or an image becomes, with the results of zoo_runtime's tasks of the same names.
// @ts-check
/** @import { Generation, Graph, Manifest, Result, Scored } from "./types.js" */
/** @import { InferenceSession, Tensor } from "onnxruntime-web" */
/** @import { Texts } from "./text.js" */
import { ModelError } from "./errors.js";
import { best, ranked, tensor } from "./numbers.js";

/**
 * @typedef {Record<string, Tensor>} Feeds
 * @typedef {{ ort: typeof import("onnxruntime-web"), manifest: Manifest, sessions: Record<string, InferenceSession>, texts: Texts | null }} Model
 * @typedef {{ signal: AbortSignal, onText: (text: string) => void }} Hooks
 */

/**
 * Run an input of the model's task.
 * @param {Model} model @param {any} input @param {Partial<Generation>} options @param {Hooks} hooks
 * @returns {Promise<Result>}
 */
export async function run(model, input, options, hooks) {
  const { manifest } = model, { task } = manifest;
  if (task === "image-classification") {
    const [graph] = manifest.graphs, { image } = manifest;
    if (!image) throw new ModelError("The model reads no images.", "InputError");
    const { pixels } = await import("./image.js"), values = await pixels(input, image), shape = [1, image.channels, image.height, image.width];
    const { logits } = await model.sessions[graph.name].run({ [graph.inputs[0].name]: new model.ort.Tensor("float32", values, shape) });
    return classes(manifest, finite(logits));
  }
  const read = readText(model, input);
  if (manifest.generation) return (await import("./generate.js")).write(model, read, options, hooks);
  const tokens = read.ids.length, outputs = await model.sessions[manifest.graphs[0].name].run(textFeeds(model, manifest.graphs[0], read));
  if (task === "sentence-embedding") return { tokens, embedding: embed(manifest, outputs, tokens) };
  if (task === "fill-mask") return { tokens, masks: fill(model, read.ids, outputs.logits) };
  return { tokens, ...classes(manifest, finite(outputs.logits)) };
}

/**
 * @param {Model} model @param {string | [string, string]} input
 * @returns {{ ids: number[], types: number[] }}
 */
function readText({ manifest, texts }, input) {
  if (!texts) throw new ModelError("The model has no tokenizer.", "InputError");
  const [first, second] = typeof input === "string" ? [input, null] : input;
  for (const text of [first, second]) if (text !== null && texts.isEmpty(text)) throw new ModelError("The text is empty.", "InputError");
  const read = texts.encode(manifest.prefix + first, second), { positions, truncate } = manifest;
  const isMore = (/** @type {number | null} */ limit) => limit !== null && read.ids.length > limit;
  if (isMore(truncate) || isMore(positions)) throw new ModelError(`The text has ${read.ids.length} tokens, the model reads ${truncate ?? positions}: shorten it.`, "InputError");
  if (manifest.mask && !read.ids.includes(manifest.mask.id)) throw new ModelError(`The text has no mask: write ${manifest.mask.text}.`, "InputError");
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

/** @param {Manifest} manifest @param {Feeds} outputs @param {number} tokens */
function embed(manifest, outputs, tokens) {
  if (manifest.pooled) return finite(outputs[manifest.pooled]).slice();
  const { data, dims } = outputs.last_hidden_state, states = finite(/** @type {any} */ ({ data })), width = dims[2];
  const mean = Float64Array.from({ length: width }, (_, column) => {
    let sum = 0;
    for (let row = 0; row < tokens; row++) sum += states[row * width + column];
    return sum / tokens;
  });
  const norm = Math.max(Math.hypot(...mean), 1e-12);
  return Float32Array.from(mean, (value) => value / norm);
}

/** @param {Model} model @param {number[]} ids @param {Tensor} logits @returns {Scored[][]} */
function fill({ manifest, texts }, ids, logits) {
  const values = finite(logits), size = logits.dims[2];
  const masks = ids.flatMap((id, place) => (id === manifest.mask?.id ? [place] : []));
  return masks.map((place) => {
    const chances = softmax(values.slice(place * size, (place + 1) * size));
    return ranked(chances).slice(0, 5).map((token) => ({ token, label: /** @type {Texts} */ (texts).token(token), probability: chances[token] }));
  });
}

/** @param {Manifest} manifest @param {Float32Array} logits @returns {{ classes: Scored[] }} */
function classes({ labels, problem }, logits) {
  const isValue = problem === "regression";
  const scores = isValue ? logits : problem === "multi_label_classification" ? Float64Array.from(logits, (value) => softmax([0, value])[1]) : softmax(logits);
  return { classes: ranked(scores).map((place) => ({ label: labels[place], [isValue ? "value" : "probability"]: scores[place] })) };
}

/** @param {ArrayLike<number>} logits */
function softmax(logits) {
  const top = logits[best(logits)], weights = Float64Array.from(logits, (value) => Math.exp(value - top));
  const sum = weights.reduce((total, weight) => total + weight, 0);
  return weights.map((weight) => weight / sum);
}

/** @param {Tensor} tensor */
function finite({ data }) {
  const values = /** @type {Float32Array} */ (data);
  if (!values.every(Number.isFinite)) throw new ModelError("The model's output contains numbers that are not finite.", "InputError");
  return values;
}
