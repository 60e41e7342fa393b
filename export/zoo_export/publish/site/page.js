// The page: shows the evidence, loads the model when asked, and runs what the visitor writes.
// @ts-check
/** @import { Evidence, Manifest, Result, Runtime, Scored } from "./types.js" */
import { chooseRuntime, describe, loadSession } from "./zoo.js";

/** @template {HTMLElement} T @param {string} id @returns {T} */
const $ = (id) => /** @type {any} */ (document.getElementById(id));
/** @param {string} tag @param {Record<string, any>} properties @param {(Node | string)[]} children */
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
/** @type {Record<string, string[]>} */
const LABELS = {
  "text-generation": ["Prompt", "Write"],
  "text2text-generation": ["Source", "Write"],
  "sentence-embedding": ["Texts, one per line", "Compare"],
  "fill-mask": ["Text with a mask", "Fill"],
  "text-classification": ["Text", "Classify"],
  "image-classification": ["Image", "Classify"],
};
/** @type {Record<string, string>} */
const EXAMPLES = {
  "text-generation": "Once upon a time",
  "text2text-generation": "The rain has stopped.",
  "sentence-embedding": "time flies like an arrow\nthe clock is ticking\na recipe for soup",
  "fill-mask": "The capital of France is MASK.",
  "text-classification": "The rain has stopped by now.",
  "image-classification": "",
};
/** Values of the number fields; an empty one means none. */
const OPTIONS = /** @type {const} */ (["max_new_tokens", "temperature", "top_k", "top_p"]);

/** @param {number} count */
const bytes = (count) => (count < 1e6 ? `${(count / 1e3).toFixed(1)} kB` : count < 1e9 ? `${(count / 1e6).toFixed(1)} MB` : `${(count / 1e9).toFixed(2)} GB`);
/** @param {unknown} error */
const said = (error) => String(/** @type {Error} */ (error).message ?? error);

/** @type {Manifest} */
let manifest;
/** @type {import("./zoo.js").Session | null} */
let session = null;
/** @type {AbortController | null} */
let control = null;

/** @param {string} text */
function complain(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

/** @param {Runtime} runtime */
function showEvidence({ name, version, evidence }) {
  const { doubt, provider, browser, device, points, worst, file } = evidence;
  const error = worst ? ` Its largest error is ${worst.error.toExponential(1)}, with a limit of ${worst.limit.toExponential(1)} (${worst.output}).` : "";
  $("verdict").textContent = doubt === null
    ? `Verified on ${provider} in ${browser}: compared with the original in float64 on ${points} inputs.${error}`
    : `Not verified on ${name.replace("web-", "")}: ${doubt}.`;
  $("verdict").className = doubt === null ? "" : "bad";
  $("consent").hidden = doubt === null;
  /** @type {[string, string | Node][]} */
  const rows = [
    ["model", `${manifest.model} (${manifest.architecture}, ${manifest.dtype}${manifest.variant ? `, variant ${manifest.variant}` : ""}), ${manifest.parameters.toLocaleString("en")} parameters`],
    ["runtime", `onnxruntime-web ${version}, ${name.replace("web-", "")}${device ? `, verified on ${device}` : ""}`],
  ];
  if (file) rows.push(["evidence", make("a", { href: file }, file)]);
  for (const { parts } of Object.values(manifest.files))
    for (const { path, size, sha256 } of parts) rows.push([path, `${bytes(size)}, sha256 ${sha256}`]);
  $("evidence").querySelector("dl")?.replaceChildren(...rows.flatMap(([term, value]) => [make("dt", {}, term), make("dd", {}, value)]));
  $("evidence").hidden = false;
}

async function prepare() {
  const found = await describe();
  manifest = found.task === "feature-extraction" ? { ...found, task: "sentence-embedding" } : found;
  const runtime = await chooseRuntime(manifest), { task } = manifest;
  $("facts").textContent = `${manifest.description}${manifest.description ? ". " : ""}It runs in this browser: what you enter stays here.`;
  showEvidence(runtime);
  const total = [{ parts: [runtime.wasm] }, ...Object.values(manifest.files)].flatMap(({ parts }) => parts).reduce((sum, { size }) => sum + size, 0);
  const [label, action] = LABELS[task];
  $("load").textContent = `Load the model (${bytes(total)})`;
  $("text-label").textContent = label;
  $("run").textContent = action;
  $("text-field").hidden = task === "image-classification";
  $("image-field").hidden = task !== "image-classification";
  /** @type {HTMLTextAreaElement} */ ($("text")).value = EXAMPLES[task].replace("MASK", () => manifest.mask?.text ?? "");
  $("options").hidden = !manifest.generation;
  for (const name of OPTIONS) /** @type {HTMLInputElement} */ ($(name)).value = String(manifest.generation?.[name] ?? "");
  complain("");
  $("opening").hidden = false;
}

/** Mark a button as busy, and show the one that cancels; both keep the focus. @param {string} id @param {boolean} isBusy */
function setBusy(id, isBusy) {
  const button = $(id), stop = $(id === "load" ? "stop-load" : "stop");
  if (isBusy) button.setAttribute("aria-disabled", "true");
  else button.removeAttribute("aria-disabled");
  if (!isBusy && document.activeElement === stop) button.focus();
  stop.hidden = !isBusy || (id === "run" && !manifest.generation);
}

async function load() {
  if (control) return;
  control = new AbortController();
  complain("");
  setBusy("load", true);
  $("progress").hidden = false;
  try {
    const unverified = /** @type {HTMLInputElement} */ ($("agreed")).checked;
    session = await loadSession(manifest, {
      unverified,
      signal: control.signal,
      onProgress: ({ loaded, total, cached }) => {
        /** @type {HTMLProgressElement} */ ($("progress")).value = loaded / total;
        $("loaded").textContent = loaded < total ? `${bytes(loaded)} of ${bytes(total)}${cached ? " (cached)" : ""}` : "Opening the model.";
      },
    });
    $("opening").hidden = true;
    $("form").hidden = false;
    const threads = session.threads > 1 ? `${session.threads} threads` : "one thread";
    $("status").textContent = `Loaded, ${session.runtime.replace("web-", "")} with ${threads}.`;
    $(manifest.image ? "image" : "text").focus();
  } catch (error) {
    const cancelled = control.signal.aborted;
    complain(cancelled ? "" : said(error));
    $("loaded").textContent = cancelled ? "Cancelled. What was loaded is kept." : "";
    if (/** @type {Error} */ (error).name === "UnverifiedError") $("consent").hidden = false;
  } finally {
    setBusy("load", false);
    $("progress").hidden = true;
    control = null;
  }
}

async function run() {
  if (!session || control) return;
  control = new AbortController();
  const began = performance.now(), output = $("output");
  complain("");
  output.hidden = false;
  output.replaceChildren();
  output.setAttribute("aria-busy", "true");
  $("status").textContent = "Running.";
  setBusy("run", true);
  const seconds = () => (performance.now() - began) / 1000;
  try {
    const count = await TASKS[manifest.task](output, control.signal);
    const each = count ? `${count} new tokens, ${(count / seconds()).toFixed(1)} per second, ` : "";
    $("status").textContent = `Done: ${each}${seconds().toFixed(2)} s.`;
  } catch (error) {
    const cancelled = control.signal.aborted;
    if (!cancelled) complain(said(error));
    output.hidden = !output.textContent;
    $("status").textContent = cancelled ? "Stopped." : "";
  } finally {
    output.removeAttribute("aria-busy");
    setBusy("run", false);
    control = null;
  }
}

const entered = () => /** @type {HTMLTextAreaElement} */ ($("text")).value;
const opened = () => /** @type {NonNullable<typeof session>} */ (session);

/** @param {HTMLElement} output @param {AbortSignal} signal */
async function write(output, signal) {
  /** @type {Record<string, number | null>} */
  const options = {};
  for (const name of OPTIONS) {
    const { value, validity } = /** @type {HTMLInputElement} */ ($(name));
    if (validity.badInput) throw new Error(`${name} must be a number.`);
    if (value === String(manifest.generation?.[name] ?? "")) continue; // the model's own
    options[name] = value !== "" ? Number(value) : name === "temperature" ? 0 : null;
  }
  const text = make("p", { className: "text" }), input = entered();
  if (manifest.task === "text-generation") text.append(make("span", { className: "prompt" }, input));
  output.append(text);
  const result = await opened().run(input, { .../** @type {any} */ (options), signal, onText: (piece) => text.append(piece) });
  if (!result.generated) text.append(make("em", {}, manifest.task === "text-generation" ? " (nothing more)" : "(an empty text)"));
  return result.generated_ids?.length;
}

/** @param {HTMLElement} output @param {AbortSignal} signal */
async function compare(output, signal) {
  const lines = entered().split("\n").filter((line) => line.trim());
  if (!lines.length) throw new Error("The text is empty.");
  /** @type {Float32Array[]} */
  const vectors = [];
  for (const line of lines) vectors.push(/** @type {Float32Array} */ ((await opened().run(line, { signal })).embedding));
  const norms = vectors.map((vector) => Math.hypot(...vector));
  const cosine = (/** @type {number} */ one, /** @type {number} */ other) =>
    vectors[one].reduce((sum, value, place) => sum + value * vectors[other][place], 0) / (norms[one] * norms[other]);
  const head = make("tr", {}, make("td"), ...lines.map((line) => make("th", { scope: "col" }, line)));
  const rows = lines.map((line, one) => make("tr", {}, make("th", { scope: "row" }, line), ...lines.map((_, other) => make("td", { className: "number" }, cosine(one, other).toFixed(4)))));
  output.append(make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Cosine similarities" },
    make("table", {}, make("caption", {}, "Cosine similarities"), make("thead", {}, head), make("tbody", {}, ...rows))));
  return 0;
}

/** @param {HTMLElement} output @param {Scored[]} scored @param {string} title */
function list(output, scored, title) {
  const rows = scored.slice(0, 10).map(({ label, text, probability, value }) => {
    const bar = make("div");
    bar.style.width = `${100 * (probability ?? 0)}%`;
    return make("tr", {}, make("th", { scope: "row" }, label ?? text ?? ""), make("td", { className: "bar" }, bar),
      make("td", { className: "number" }, (probability ?? value ?? NaN).toFixed(4)));
  });
  output.append(make("table", {}, make("caption", {}, title), make("tbody", {}, ...rows)));
}

/** @type {Record<string, (output: HTMLElement, signal: AbortSignal) => Promise<number | undefined>>} */
const TASKS = {
  "text-generation": write,
  "text2text-generation": write,
  "sentence-embedding": compare,
  async "fill-mask"(output, signal) {
    const { masks = [] } = await opened().run(entered(), { signal });
    masks.forEach((scored, place) => list(output, scored, masks.length > 1 ? `Mask ${place + 1}` : "Likeliest tokens"));
    return 0;
  },
  async "text-classification"(output, signal) {
    list(output, (await opened().run(entered(), { signal })).classes ?? [], "Classes");
    return 0;
  },
  async "image-classification"(output, signal) {
    const file = /** @type {HTMLInputElement} */ ($("image")).files?.[0];
    if (!file) throw new Error("Choose an image first.");
    list(output, (await opened().run(file, { signal })).classes ?? [], "Classes");
    return 0;
  },
};

$("load").onclick = load;
$("stop-load").onclick = $("stop").onclick = () => control?.abort();
$("form").onsubmit = (event) => { event.preventDefault(); run(); };
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
};
document.onkeydown = (event) => { if (event.key === "Escape") control?.abort(); };
$("image").onchange = () => {
  const file = /** @type {HTMLInputElement} */ ($("image")).files?.[0], preview = /** @type {HTMLImageElement} */ ($("preview"));
  URL.revokeObjectURL(preview.src);
  preview.hidden = !file;
  if (file) preview.src = URL.createObjectURL(file);
};
export const start = () => prepare().catch((error) => complain(said(error)));
