/** The types of model.json and of the module's functions. */

/** A piece of a file: `size` bytes from `offset` on. */
export interface Part {
  /** Relative to model.json. */
  path: string;
  offset: number;
  size: number;
  sha256: string;
}

/** A file in pieces, which together need not cover it: a graph does not read the rest. */
export interface Pieces {
  size: number;
  parts: Part[];
}

/** What a graph reads, in the order of its inputs. */
export interface Input {
  name: string;
  dtype: "int64" | "int32" | "bool" | "float32";
  /** How it follows from tokens or pixels; a constant is an input or output of an earlier graph. */
  role: "ids" | "mask" | "positions" | "types" | "pixels" | "constant";
}

/** A part of a decoder's past, and the output that replaces it. */
export interface Past {
  input: string;
  output: string;
  dtype: "float32" | "int64" | "int32" | "bool";
  /** Without tokens. */
  shape: number[];
  /** The axis along which it grows by the tokens of a call; null for a state of fixed size. */
  axis: number | null;
}

export interface Graph {
  name: string;
  file: string;
  /** The files of its weights. */
  weights: string[];
  inputs: Input[];
  outputs: string[];
  past: Past[];
  /** Whether its keys and values are buffers with spare positions. */
  inPlace: boolean;
  /** Whether it returns the logits of the last positions only, if asked to. */
  cutsLogits: boolean;
  /** Whether its mask also covers the past. */
  maskCoversPast: boolean;
}

/** The evidence of a runtime, from `zoo verify --runtime`. */
export interface Evidence {
  /** Why there is none; null for a verified export. */
  doubt: string | null;
  file: string | null;
  provider: string | null;
  browser: string | null;
  device: string | null;
  points: number;
  worst: { output: string; error: number; limit: number } | null;
}

export interface Runtime {
  name: "web-wasm" | "web-webgpu";
  version: string;
  /** Modules of onnxruntime-web, relative to model.json. */
  module: string;
  loader: string;
  wasm: Part;
  evidence: Evidence;
}

/** Options of generation, with the names and meanings of `zoo run`. */
export interface Generation {
  max_new_tokens: number;
  max_length: number | null;
  min_new_tokens: number;
  min_length: number;
  repetition_penalty: number;
  no_repeat_ngram_size: number;
  suppress_tokens: number[];
  begin_suppress_tokens: number[];
  forced_bos_token_id: number | null;
  forced_eos_token_id: number | null;
  temperature: number;
  top_k: number | null;
  top_p: number | null;
  min_p: number | null;
  /** Of the random numbers of sampling, which are not those of `zoo run`; by default another one each time. */
  seed?: number;
  stop: string[];
  stop_token_ids: number[];
}

export type Task =
  | "text-generation" | "text2text-generation" | "feature-extraction" | "sentence-embedding" | "fill-mask"
  | "text-classification" | "image-classification";

/** model.json. */
export interface Manifest {
  schema: 1;
  title: string;
  model: string;
  description: string;
  architecture: string;
  parameters: number;
  variant: string;
  dtype: string;
  task: Task;
  graphs: Graph[];
  files: Record<string, Pieces>;
  runtimes: Runtime[];
  /** SHA-256 of the modules of other packages. */
  modules: Record<string, string>;
  /** The module of @huggingface/tokenizers, the tokenizers, and texts with their ids from Python. */
  tokenizer: null | {
    module: string;
    file: string;
    /** The tokenizer of targets, if it is another. */
    target: string | null;
    samples: { text: string; ids: number[]; decoded: string }[];
  };
  /** Maximum number of tokens, null without a limit. */
  positions: number | null;
  /** The number of tokens to which texts are truncated; null if longer ones are refused. */
  truncate: number | null;
  /** The number of tokens to which every text is padded; null if it is free. */
  length: number | null;
  padId: number;
  /** Whether the task reads pairs of texts. */
  pairs: boolean;
  /** Number of tokens that can be generated; null if none are. */
  vocabulary: number | null;
  /** The rule of each option, and the options of zoo run that pages lack. */
  rules: Record<string, { type: string; bound: "positive" | "not negative" | null }>;
  unsupported: string[];
  /** Number of segments of the model's texts. */
  segments: number;
  /** What is put before a text to embed or to generate from. */
  prefix: string;
  generation: Generation | null;
  ends: number[];
  start: number | null;
  mask: { id: number; text: string } | null;
  /** Names of the classes; empty if they are numbered. */
  labels: string[];
  problem: "single_label_classification" | "multi_label_classification" | "regression" | null;
  /** Outputs: an embedding, and the vectors of feature extraction. */
  pooled: string | null;
  features: "last_hidden_state" | "features" | null;
  image: null | {
    width: number;
    height: number;
    channels: number;
    resample: string;
    crop: number;
    keepsRatio: boolean;
    roundsToEven: boolean;
    whitens: boolean;
    mean: number[];
    std: number[];
  };
  /** Of the text of model.json before this field. */
  sha256: string;
}

export interface Progress {
  /** Bytes so far, of the files that were cached too. */
  loaded: number;
  total: number;
  /** The file. */
  path: string;
  /** Whether it came from the browser's cache. */
  cached: boolean;
}

export interface LoadOptions {
  /** By default the model's own; "sentence-embedding" for one of "feature-extraction". */
  task?: Task;
  onProgress?: (progress: Progress) => void;
  signal?: AbortSignal;
  /** By default the first of the manifest that the browser supports. */
  runtime?: "web-wasm" | "web-webgpu";
  /** Number of threads; by default one without cross-origin isolation, otherwise that of the cores, at most 8. */
  threads?: number;
  /** Whether to run a model without evidence for the runtime. */
  unverified?: boolean;
  /** Whether to keep the files in the browser's cache. */
  cache?: boolean;
}

export interface RunOptions extends Partial<Generation> {
  signal?: AbortSignal;
  onText?: (piece: string) => void;
}

/** A likely token with its text, or a class with its label; `value` for a regression. */
export interface Scored {
  label?: string;
  token?: number;
  text?: string;
  probability?: number;
  value?: number;
}

export interface Result {
  tokens?: number;
  generated?: string | null;
  generated_ids?: number[];
  finish_reason?: "end" | "stop" | "length" | null;
  embedding?: Float32Array;
  /** A vector for each token; `features` if the model selects layers. */
  last_hidden_state?: Float32Array[];
  features?: Float32Array[];
  masks?: Scored[][];
  /** The likeliest class, if the classes have names. */
  label?: string;
  /** The same for a model of several labels: all classes above 0.5. */
  labels?: string[];
  /** In the order of the model's classes, as `values` are; `classes` has the highest first. */
  probabilities?: Float64Array;
  /** Of a regression. */
  values?: Float32Array;
  classes?: Scored[];
}

/** What a worker loaded. */
export interface Loaded {
  runtime: "web-wasm" | "web-webgpu";
  threads: number;
}
