// Runs graphs on onnxruntime-web. Tensors are exchanged with the server as safetensors files.
// @ts-check

/** Element types of safetensors, with their names in onnxruntime-web and the arrays that hold them. */
const TYPES = {
  F32: ["float32", Float32Array],
  F16: ["float16", Uint16Array],
  F64: ["float64", Float64Array],
  I64: ["int64", BigInt64Array],
  I32: ["int32", Int32Array],
  I8: ["int8", Int8Array],
  U8: ["uint8", Uint8Array],
  BOOL: ["bool", Uint8Array],
};
const CODES = Object.fromEntries(Object.entries(TYPES).map(([code, [name]]) => [name, code]));

let ort;
const sessions = {};

/**
 * Import onnxruntime-web, with one thread, and return a name of the device: that of the graphics adapter, or "".
 * @param {string} module @param {boolean} gpu
 */
export async function start(module, gpu) {
  const adapter = gpu ? await navigator.gpu?.requestAdapter() : null;
  if (gpu && !adapter) throw new Error("the browser has no WebGPU adapter");
  ort = await import(module);
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = new URL(".", new URL(module, location.href)).href;
  ort.env.logLevel = "error";
  if (!adapter) return "";
  const { vendor, architecture, description } = adapter.info;
  return [vendor, architecture, description].filter(Boolean).join(" ");
}

/**
 * Open a session, and return the names of its inputs and outputs.
 * @param {string} name of the session @param {string} url of the graph
 * @param {string[]} files names of the weights' files, which lie beside the graph
 * @param {string} provider @param {boolean} optimize @param {boolean} [verbose] log where each node is placed
 */
export async function open(name, url, files, provider, optimize, verbose = false) {
  const externalData = files.map((path) => ({ path, data: new URL(path, url).href }));
  const options = { executionProviders: [provider], graphOptimizationLevel: optimize ? "all" : "disabled", externalData };
  if (verbose) {
    ort.env.logLevel = "verbose";
    Object.assign(options, { logSeverityLevel: 0 });
  }
  sessions[name] = await ort.InferenceSession.create(url, options);
  return { inputs: sessions[name].inputNames, outputs: sessions[name].outputNames };
}

/**
 * Run a session on the tensors at one URL, and post its outputs to another.
 * @param {string} name @param {string} feeds @param {string} outputs
 */
export async function run(name, feeds, outputs) {
  const response = await fetch(feeds);
  const results = await sessions[name].run(decode(await response.arrayBuffer()));
  await fetch(outputs, { method: "POST", body: new Blob(await encode(results)) });
  for (const tensor of Object.values(results)) tensor.dispose();
}

/** @param {ArrayBuffer} file */
function decode(file) {
  const length = Number(new DataView(file).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, length)));
  const feeds = {};
  for (const [name, { dtype, shape, data_offsets: [start, stop] }] of Object.entries(header)) {
    const [type, Values] = TYPES[dtype];
    feeds[name] = new ort.Tensor(type, new Values(file.slice(8 + length + start, 8 + length + stop)), shape);
  }
  return feeds;
}

/** Return the parts of a file with these tensors. */
async function encode(tensors) {
  const header = {}, parts = [];
  let offset = 0;
  for (const [name, tensor] of Object.entries(tensors)) {
    const data = await tensor.getData();
    header[name] = { dtype: CODES[tensor.type], shape: tensor.dims, data_offsets: [offset, offset + data.byteLength] };
    offset += data.byteLength;
    parts.push(data);
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const length = new DataView(new ArrayBuffer(8));
  length.setBigUint64(0, BigInt(text.length), true);
  return [length, text, ...parts];
}
