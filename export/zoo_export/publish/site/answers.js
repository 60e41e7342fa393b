// Embeddings, masks and classes, with the results of zoo_runtime's tasks of the same names.
// @ts-check
/** @import { Manifest, Result, Scored } from "./types.js" */
/** @import { Tensor } from "onnxruntime-web" */
/** @import { Feeds, Model } from "./inputs.js" */
/** @import { Texts } from "./text.js" */
import { refuse } from "./errors.js";
import { best, ranked } from "./numbers.js";
import { readText, textFeeds } from "./inputs.js";

/**
 * Run an input of a task that generates no text.
 * @param {Model} model @param {any} input
 * @returns {Promise<Result>}
 */
export async function answer(model, input) {
  const { manifest, sessions, ort } = model, { task, image, features, graphs: [graph] } = manifest;
  if (image) {
    const { pixels } = await import("./image.js"), values = await pixels(input, image), shape = [1, image.channels, image.height, image.width];
    const { logits } = await sessions[graph.name].run({ [graph.inputs[0].name]: new ort.Tensor("float32", values, shape) });
    return classes(manifest, finite(logits));
  }
  const read = readText(model, input), tokens = read.ids.length;
  const outputs = await sessions[graph.name].run(textFeeds(model, graph, read));
  if (task === "sentence-embedding") return { tokens, embedding: embed(manifest, outputs, tokens) };
  if (task === "feature-extraction" && features) return { tokens, [features]: rows(outputs[features], tokens) };
  if (task === "fill-mask") return { tokens, masks: fill(model, read.ids, outputs.logits) };
  return { tokens, ...classes(manifest, finite(outputs.logits)) };
}

/** @param {Manifest} manifest @param {Feeds} outputs @param {number} tokens */
function embed(manifest, outputs, tokens) {
  if (manifest.pooled) return finite(outputs[manifest.pooled]).slice();
  const states = rows(outputs.last_hidden_state, tokens);
  const mean = Float64Array.from(states[0], (_, column) => states.reduce((sum, row) => sum + row[column], 0) / tokens);
  const norm = Math.max(Math.hypot(...mean), 1e-12);
  return Float32Array.from(mean, (value) => value / norm);
}

/** The vectors of the first tokens. @param {Tensor} states @param {number} count */
function rows(states, count) {
  const values = finite(states), width = states.dims[2];
  return Array.from({ length: count }, (_, row) => values.slice(row * width, (row + 1) * width));
}

/** @param {Model} model @param {number[]} ids @param {Tensor} logits @returns {Scored[][]} */
function fill({ manifest, texts }, ids, logits) {
  const values = finite(logits), size = logits.dims[2];
  const masks = ids.flatMap((id, place) => (id === manifest.mask?.id ? [place] : []));
  return masks.map((place) => {
    const chances = softmax(values.slice(place * size, (place + 1) * size));
    return ranked(chances).slice(0, 5).map((token) => ({ token, text: /** @type {Texts} */ (texts).token(token), probability: chances[token] }));
  });
}

/** @param {Manifest} manifest @param {Float32Array} logits @returns {Result} */
function classes({ labels, problem }, logits) {
  const first = problem === "multi_label_classification" && logits.length === 1 ? 1 : 0;  // a single sigmoid is class 1's
  const name = (/** @type {number} */ place) => labels[place] ?? String(first + place);
  if (problem === "regression") return { values: logits.slice(), classes: ranked(logits).map((place) => ({ label: name(place), value: logits[place] })) };
  const probabilities = problem === "multi_label_classification" ? Float64Array.from(logits, (value) => softmax([0, value])[1]) : softmax(logits);
  const order = ranked(probabilities), chosen = problem === "multi_label_classification"
    ? { labels: labels.filter((_, place) => probabilities[place] > 0.5) } : { label: name(order[0]) };
  return { ...(labels.length ? chosen : {}), probabilities, classes: order.map((place) => ({ label: name(place), probability: probabilities[place] })) };
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
  if (!values.every(Number.isFinite)) refuse("The model's output contains numbers that are not finite.");
  return values;
}
