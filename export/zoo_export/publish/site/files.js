// Downloads files in pieces, checks their digests, and keeps them in the browser's cache.
// @ts-check
/** @import { Part, Pieces, Progress } from "./types.js" */
import { REPLACED, blame, get, refuse, sha256 } from "./errors.js";

/** Downloads, with progress over all of them. */
export class Downloads {
  #loaded = 0;
  /** @type {Set<string>} */
  #wanted = new Set();

  /**
   * @param {URL} folder to which paths are relative
   * @param {number} total number of bytes
   * @param {(progress: Progress) => void} report
   * @param {AbortSignal} signal
   * @param {Cache | null} cache
   */
  constructor(folder, total, report, signal, cache) {
    this.folder = folder;
    this.total = total;
    this.report = report;
    this.signal = signal;
    this.cache = cache;
  }

  /**
   * Return a file's content, zero where it has no pieces.
   * @param {Pieces} pieces
   */
  async file({ size, parts }) {
    const content = allocate(size);
    for (const part of parts) await this.#fill(part, content.subarray(part.offset, part.offset + part.size));
    return content;
  }

  /** Forget cached pieces that were not asked for. */
  async tidy() {
    for (const { url } of (await this.cache?.keys()) ?? []) if (!this.#wanted.has(url)) await this.cache?.delete(url);
  }

  /**
   * Fill an array with a piece, from the cache if it is there.
   * @param {Part} part @param {Uint8Array<ArrayBuffer>} target
   */
  async #fill(part, target) {
    const key = new URL(part.path, this.folder);
    key.searchParams.set("sha256", part.sha256);
    this.#wanted.add(key.href);
    const before = this.#loaded, kept = await this.cache?.match(key).catch(() => undefined);
    if (kept) {
      if (await this.#read(kept, part, target, true).catch(() => "unreadable") === null) return;
      await this.cache?.delete(key);
      this.#loaded = before;
    }
    let problem = "";
    for (const cache of /** @type {RequestCache[]} */ (["default", "reload"])) { // the browser may hold an older file
      const response = await get(part.path, this.folder, { cache, signal: this.signal });
      problem = (await this.#read(response, part, target, false)) ?? "";
      if (!problem) {
        const headers = { "Content-Length": String(part.size) };
        await this.cache?.put(key, new Response(target.slice(), { headers })).catch(() => {}); // full: works without
        return;
      }
      this.#loaded = before;
    }
    blame(part.path, problem);
  }

  /**
   * Read a response into an array; return what is wrong with it, or null.
   * @param {Response} response @param {Part} part @param {Uint8Array<ArrayBuffer>} target @param {boolean} cached
   */
  async #read(response, part, target, cached) {
    let place = 0;
    try {
      const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        this.signal.throwIfAborted();
        if (place + value.length > part.size) {
          await reader.cancel();
          return `has more than ${part.size} bytes: it is not the file that was published`;
        }
        target.set(value, place);
        place += value.length;
        this.#loaded += value.length;
        this.report({ loaded: this.#loaded, total: this.total, path: part.path, cached });
      }
    } catch {
      this.signal.throwIfAborted();
      return `ends after ${place} of ${part.size} bytes (network error): load it again`;
    }
    if (place < part.size) return `ends after ${place} of ${part.size} bytes: the file is incomplete`;
    return await sha256(target) === part.sha256 ? null : REPLACED;
  }
}

/**
 * Return zeros, or throw an error that names the size.
 * @param {number} size
 */
export function allocate(size) {
  try {
    return new Uint8Array(size);
  } catch {
    refuse(`The browser cannot reserve ${Math.ceil(size / 1e6)} MB of memory for the model.`, "MemoryError");
  }
}
