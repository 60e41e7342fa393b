// Texts to tokens and back, with @huggingface/tokenizers.
// @ts-check
/** @import { Manifest } from "./types.js" */
/** @import { Tokenizer } from "@huggingface/tokenizers" */
import { load } from "./errors.js";

const INCOMPLETE = "\ufffd", BYTE = /^<0x[0-9A-F]{2}>$/;

/** The tokenizers of a model. */
export class Texts {
  /** @param {Tokenizer} source @param {Tokenizer} target */
  constructor(source, target) {
    this.source = source;
    this.target = target;
    this.fallsBack = false;
  }

  /**
   * @param {NonNullable<Manifest["tokenizer"]>} given @param {URL} folder
   * @param {Record<string, Uint8Array<ArrayBuffer>>} files
   */
  static async open({ module, file, target }, folder, files) {
    const { Tokenizer } = await load(module, folder);
    const open = (/** @type {string} */ name) => {
      const content = JSON.parse(new TextDecoder().decode(files[name]));
      const tokenizer = new Tokenizer({ ...content, truncation: null, padding: null }, { clean_up_tokenization_spaces: false });
      for (const part of tokenizer.decoder?.decoders ?? [tokenizer.decoder]) if (part?.config.type === "ByteFallback") part.decode_chain = joinBytes;
      return tokenizer;
    };
    const texts = new Texts(open(file), open(target ?? file)), { model } = JSON.parse(new TextDecoder().decode(files[file]));
    if (model.type === "Unigram" && model.byte_fallback) { // which the library lacks
      texts.fallsBack = true;
      /** @type {any} */ (texts.source.model).fuse_unk = false;
    }
    return texts;
  }

  /** Return the first text with other tokens than in Python, or null. @param {NonNullable<Manifest["tokenizer"]>["samples"]} samples */
  check(samples) {
    const bad = samples.find(({ text, ids, decoded }) =>
      this.encode(text).ids.join() !== ids.join() || decode(this.source, ids, true) !== decoded);
    return bad?.text ?? null;
  }

  /** @param {string} text @param {string | null} second @returns {{ ids: number[], types: number[] }} */
  encode(text, second = null) {
    const read = this.source.encode(text, { text_pair: second, return_token_type_ids: true });
    const { ids, tokens, token_type_ids: types = ids.map(() => 0) } = read;
    if (!this.fallsBack) return { ids, types };
    const pieces = tokens.map((token, place) => bytesOf(this.source, token) ?? [ids[place]]);
    return { ids: pieces.flat(), types: pieces.flatMap((piece, place) => piece.map(() => types[place])) };
  }

  /** Whether a text has no tokens but those around every text. @param {string} text */
  isEmpty(text) {
    return !this.source.encode(text, { add_special_tokens: false }).ids.length;
  }

  /** A token as text, special ones too. @param {number} id */
  token(id) {
    return decode(this.source, [id], false);
  }
}

/**
 * The tokens of a text's bytes, if it is no token itself.
 * @param {Tokenizer} tokenizer @param {string} text
 */
function bytesOf(tokenizer, text) {
  if (tokenizer.token_to_id(text) !== undefined) return null;
  const ids = Array.from(new TextEncoder().encode(text), (byte) => tokenizer.token_to_id(`<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`));
  return ids.every((id) => id !== undefined) ? ids : null;
}

/** Join tokens of bytes to characters; each byte of a run that is no UTF-8 becomes a replacement character. @param {string[]} tokens */
function joinBytes(tokens) {
  /** @type {string[]} */
  const pieces = [];
  /** @type {number[]} */
  let run = [];
  for (const token of [...tokens, ""]) {
    if (BYTE.test(token)) { run.push(parseInt(token.slice(3, 5), 16)); continue; }
    if (run.length) try {
      pieces.push(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(run)));
    } catch {
      pieces.push(INCOMPLETE.repeat(run.length));
    }
    run = [];
    pieces.push(token);
  }
  return pieces;
}

/** @param {Tokenizer} tokenizer @param {number[]} ids @param {boolean} plain whether to leave out special tokens */
function decode(tokenizer, ids, plain) {
  const known = ids.filter((id) => tokenizer.id_to_token(id) !== undefined);
  return known.length ? tokenizer.decode(known, { skip_special_tokens: plain, clean_up_tokenization_spaces: false }) : "";
}

/** Decode ids that follow a prompt, whose spaces stay. @param {Tokenizer} tokenizer @param {number[]} prompt @param {number[]} ids */
export function continuation(tokenizer, prompt, ids) {
  const before = decode(tokenizer, prompt, true), whole = decode(tokenizer, [...prompt, ...ids], true);
  for (const start of [before, before.replace(/\ufffd+$/, "")]) if (whole.startsWith(start)) return whole.slice(start.length);
  return decode(tokenizer, ids, true);
}

/** The text of tokens that arrive one by one. Text that was returned stays: incomplete characters are held back. */
export class TextStream {
  /** @type {number[]} */
  #held = [];
  #text = "";
  #shown = 0;

  /** @param {Tokenizer} tokenizer @param {number[]} prompt @param {string[]} stops */
  constructor(tokenizer, prompt, stops) {
    this.tokenizer = tokenizer;
    this.before = prompt;
    this.stops = stops;
    this.stopped = false;
  }

  /** Add a token, and return whether a stop string has appeared. @param {number} id */
  add(id) {
    this.#held.push(id);
    const isByte = BYTE.test(this.tokenizer.id_to_token(id) ?? "");
    if (isByte || !decode(this.tokenizer, [id], true)) return false; // later ones may change its text
    const piece = continuation(this.tokenizer, this.before, this.#held);
    if (!piece.endsWith(INCOMPLETE)) this.#take(piece);
    return this.stopped;
  }

  /** Return the text that became final since the last call. @param {boolean} isLast */
  fresh(isLast = false) {
    if (isLast && !this.stopped && this.#held.length) this.#take(continuation(this.tokenizer, this.before, this.#held));
    const open = isLast || this.stopped ? 0 : this.stops.flatMap((stop) =>
      Array.from({ length: stop.length }, (_, size) => (size && this.#text.endsWith(stop.slice(0, size)) ? size : 0))).reduce((one, other) => Math.max(one, other), 0);
    const end = Math.max(this.#shown, this.#text.length - open), piece = this.#text.slice(this.#shown, end);
    this.#shown = end;
    return piece;
  }

  get text() {
    return this.#text;
  }

  /** @param {string} piece */
  #take(piece) {
    this.#text += piece;
    [this.before, this.#held] = [this.#held, []];
    const places = this.stops.map((stop) => this.#text.indexOf(stop)).filter((place) => place >= 0);
    if (!places.length) return;
    this.stopped = true;
    this.#text = this.#text.slice(0, places.reduce((one, other) => Math.min(one, other)));
  }
}
