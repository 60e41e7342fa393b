// The module of a published model: import { loadSession } from "./zoo.js".
import type { Loaded, LoadOptions, Manifest, Result, RunOptions, Runtime } from "./types.js";

export type * from "./types.js";

/** An error that says what the visitor can do. Its name is one of those in the how-to guide, such as InputError. */
export class ModelError extends Error {
  constructor(message: string, name: string);
}

/** Read the description of a published model; `folder` has its model.json, by default that of this module. */
export function describe(folder?: string | URL): Promise<Manifest>;

/** Say what this browser lacks, or return null. */
export function missing(): string | null;

/** Return the runtime to use: the first verified one that the browser has, or else the first that it has. */
export function chooseRuntime(manifest: Manifest, name?: string): Promise<Runtime>;

/** Download a model, and open it in a worker. `source` is the folder of model.json, or what `describe` read in that of this module. */
export function loadSession(source?: string | URL | Manifest, options?: LoadOptions): Promise<Session>;

/** A model in a worker. Calls run one after the other. */
export interface Session extends Loaded {
  manifest: Manifest;
  /** Run an input: a text, a pair of texts, or an image. */
  run(input: string | [string, string] | Blob | ImageData, options?: RunOptions): Promise<Result>;
  /** Generate a text, piece by piece. Leaving the loop cancels. */
  stream(input: string, options?: RunOptions): AsyncGenerator<string, Result>;
  /** End the worker, and free its memory. */
  close(): void;
}
