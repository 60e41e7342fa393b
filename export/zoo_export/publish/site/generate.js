// Greedy decoding and sampling, token by token, as zoo_runtime.generation does it.
// @ts-check
/** @import { Generation, Graph, Result } from "./types.js" */
/** @import { Feeds, Hooks, Model } from "./inputs.js" */
/** @import { Texts } from "./text.js" */
import { refuse } from "./errors.js";
import { allocate } from "./files.js";
import { best, product, ranked, tensor } from "./numbers.js";
import { textFeeds } from "./inputs.js";
import { TextStream, continuation } from "./text.js";

/**
 * Generate a text: the continuation of a prompt, or the target of a source.
 * @param {Model} model @param {{ ids: number[], types: number[] }} read @param {Generation} options @param {Hooks} hooks
 * @returns {Promise<Result>}
 */
export async function write(model, read, options, { signal, onText }) {
  const { manifest, sessions } = model;
  const graph = /** @type {Graph} */ (manifest.graphs.at(-1));
  /** @type {Feeds} */
  const known = {};
  for (const encoder of manifest.graphs.slice(0, -1)) {
    const feeds = textFeeds(model, encoder, read);
    Object.assign(known, feeds, await sessions[encoder.name].run(feeds));
  }
  const constants = Object.fromEntries(graph.inputs.filter(({ role }) => role === "constant").map(({ name }) => [name, known[name]]));
  const prompt = manifest.start === null ? read.ids : [manifest.start];
  const longest = Math.min(manifest.positions ?? Infinity, options.max_length ?? Infinity);
  const room = Number.isFinite(longest) ? longest - prompt.length : options.max_new_tokens;
  const tokenizer = /** @type {Texts} */ (model.texts).target, stream = new TextStream(tokenizer, prompt, options.stop);
  const { ids, finish } = await generate(new Decoder(model, graph, constants), prompt, options, manifest.ends, room, (id) => {
    stream.add(id);
    const piece = stream.fresh();
    if (piece) onText(piece);
    return stream.stopped;
  }, signal);
  const rest = stream.fresh(true);
  if (rest) onText(rest);
  const shown = finish === "length" ? ids : ids.slice(0, -1);
  const generated = stream.stopped ? stream.text : continuation(tokenizer, prompt, shown);
  return { tokens: read.ids.length, generated_ids: ids, generated, finish_reason: finish };
}

/** A decoder with the past of one text. */
class Decoder {
  length = 0;
  #capacity = 0;

  /** @param {Model} model @param {Graph} graph @param {Feeds} constants */
  constructor(model, graph, constants) {
    this.model = model;
    this.graph = graph;
    this.constants = constants;
    /** @type {Feeds} */
    this.past = {};
    for (const { input, dtype, shape } of graph.past) this.past[input] = tensor(model.ort, dtype, shape);
  }

  /** Read tokens, and return the logits of the last one. @param {number[]} ids @returns {Promise<Float32Array>} */
  async step(ids) {
    const { graph, model: { ort, sessions } } = this, total = this.length + ids.length;
    const longs = (/** @type {number[]} */ values, /** @type {number[]} */ shape) => tensor(ort, "int64", shape, values);
    const feeds = { ...this.constants, ...this.past };
    const covered = graph.maskCoversPast ? total : ids.length;
    for (const { name, dtype, role } of graph.inputs) {
      if (role === "ids") feeds[name] = tensor(ort, dtype, [1, ids.length], ids);
      if (role === "mask") feeds[name] = tensor(ort, dtype, [1, covered], Array(covered).fill(1));
    }
    if (graph.inPlace) {
      if (total > this.#capacity) this.#grow(feeds, total);
      feeds.past_length = longs([this.length], []);
    }
    if (graph.cutsLogits) feeds.logits_to_keep = longs([1], []);
    const outputs = await sessions[graph.name].run(feeds, { logSeverityLevel: 3 }); // no warning that caches are copied
    for (const { input, output } of graph.past) this.past[input] = outputs[output];
    this.length = total;
    const { data, dims } = outputs.logits;
    return /** @type {Float32Array} */ (data).slice(-dims[2]);
  }

  /** Move keys and values to larger buffers. @param {Feeds} feeds @param {number} total */
  #grow(feeds, total) {
    this.#capacity = Math.min(Math.max(64, 2 ** Math.ceil(Math.log2(total + 1))), (this.model.manifest.positions ?? Infinity) + 1);
    for (const { input, shape, axis } of this.graph.past) {
      if (axis === null) continue;
      const { data, dims } = this.past[input], longer = shape.with(axis, this.#capacity);
      const inner = product(shape.slice(axis + 1)), outer = product(shape.slice(0, axis));
      const grown = new Float32Array(allocate(4 * product(longer)).buffer);
      for (let row = 0; row < outer; row++) {
        const start = row * dims[axis] * inner;
        grown.set(/** @type {Float32Array} */ (data).subarray(start, start + this.length * inner), row * this.#capacity * inner);
      }
      feeds[input] = new this.model.ort.Tensor("float32", grown, longer);
    }
  }
}

/**
 * Generate tokens until one ends the text; `onToken` may end it too.
 * @param {Decoder} decoder @param {number[]} prompt @param {Generation} options
 * @param {number[]} ends @param {number} room maximum number of tokens after the prompt
 * @param {(id: number) => boolean} onToken @param {AbortSignal} signal
 * @returns {Promise<{ ids: number[], finish: "end" | "stop" | "length" }>}
 */
async function generate(decoder, prompt, options, ends, room, onToken, signal) {
  const limit = Math.min(options.max_new_tokens, room), text = [...prompt], random = generator(options.seed);
  /** @type {number[]} */
  const ids = [];
  if (limit < 1) return { ids, finish: "length" };
  for (let next = prompt; ;) {
    const logits = await decoder.step(next);
    await turn(); // lets messages in, such as to cancel
    signal.throwIfAborted();
    const scores = penalise(logits, text, prompt.length, limit, options, ends);
    const id = options.temperature ? draw(probabilities(scores, options), random()) : best(scores);
    if (!Number.isFinite(logits[best(logits)]) || scores[id] === -Infinity)
      refuse(`No token can be chosen as new token ${ids.length + 1}: the logits are not finite, or the options forbid all.`);
    ids.push(id);
    text.push(id);
    if (ends.includes(id)) return { ids, finish: "end" };
    if (options.stop_token_ids.includes(id) || onToken(id)) return { ids, finish: "stop" };
    if (ids.length >= limit) return { ids, finish: "length" };
    next = [id];
  }
}

/**
 * Return the scores of the next token after penalties, in the order of zoo_runtime.Generation.
 * @param {Float32Array} logits @param {number[]} text @param {number} start number of tokens of the prompt
 * @param {number} limit @param {Generation} options @param {number[]} ends
 */
function penalise(logits, text, start, limit, options, ends) {
  const scores = logits.slice(), count = text.length - start, penalty = Math.fround(options.repetition_penalty);
  const forbid = (/** @type {Iterable<number>} */ ids) => { for (const id of ids) scores[id] = -Infinity; };
  if (penalty !== 1) for (const id of new Set(text)) scores[id] = logits[id] < 0 ? logits[id] * penalty : logits[id] / penalty;
  const size = options.no_repeat_ngram_size;
  if (size > 0 && size <= text.length) {
    const tail = text.slice(text.length - size + 1).join();
    for (let place = 0; place + size <= text.length; place++)
      if (text.slice(place, place + size - 1).join() === tail) forbid([text[place + size - 1]]);
  }
  if (count < options.min_new_tokens || text.length < options.min_length) forbid([...ends, ...options.stop_token_ids]);
  forbid(options.suppress_tokens);
  const forcesFirst = options.forced_bos_token_id !== null;
  if (count === Number(forcesFirst && start === 1)) forbid(options.begin_suppress_tokens);
  let forced = count === limit - 1 ? options.forced_eos_token_id : null;
  if (forced === null && forcesFirst && text.length === 1) forced = options.forced_bos_token_id;
  if (forced !== null) { scores.fill(-Infinity); scores[forced] = 0; }
  return scores;
}

/** The distribution that tokens are drawn from. @param {Float32Array} scores @param {Generation} options */
function probabilities(scores, { temperature, top_k: k, top_p: p, min_p: least }) {
  const top = scores[best(scores)], chances = Float64Array.from(scores, (score) => Math.exp((score - top) / temperature));
  const sum = () => chances.reduce((total, chance) => total + chance, 0);
  const order = (k !== null && k < scores.length) || (p !== null && p < 1) ? ranked(scores) : [];
  if (k !== null && k < scores.length) for (const place of order.slice(k)) if (scores[place] < scores[order[k - 1]]) chances[place] = 0;
  if (p !== null && p < 1) {
    let before = 0;
    const enough = p * sum();
    for (const place of order) {
      const chance = chances[place];
      if (before >= enough) chances[place] = 0;
      before += chance;
    }
  }
  const largest = chances[best(chances)];
  if (least) chances.forEach((chance, place) => { if (chance < least * largest) chances[place] = 0; });
  const whole = sum();
  return chances.map((chance) => chance / whole);
}

/** Draw by a number in [0, 1). @param {Float64Array} chances @param {number} uniform */
function draw(chances, uniform) {
  let left = uniform, last = 0;
  for (let place = 0; place < chances.length; place++) {
    if (!chances[place]) continue;
    last = place;
    left -= chances[place];
    if (left < 0) break;
  }
  return last;
}

/** Random numbers in [0, 1): mulberry32. @param {number} seed */
function generator(seed = crypto.getRandomValues(new Uint32Array(1))[0]) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

const channel = new MessageChannel();
/** Return after the messages that wait. */
const turn = () => new Promise((resolve) => {
  channel.port1.onmessage = resolve;
  channel.port2.postMessage(null);
});
