// Checks inputs and options, by the rules and in the words of zoo_runtime.
// @ts-check
/** @import { Generation, Manifest } from "./types.js" */
import { refuse } from "./errors.js";

/** @type {Record<string, (value: any) => boolean>} */
const FITS = {
  int: Number.isInteger, float: Number.isFinite, str: (value) => typeof value === "string", bool: (value) => typeof value === "boolean",
};

/** A value as it is written in a program. @param {any} value @returns {string} */
function shown(value) {
  if (Array.isArray(value)) return `[${value.map(shown).join(", ")}]`;
  return FITS.str(value) ? JSON.stringify(value) : String(value);
}

/** Refuse what the model's task does not read. @param {Manifest} manifest @param {any} input */
export function checkInput({ image, pairs }, input) {
  const isPair = Array.isArray(input) && input.length === 2 && input.every(FITS.str);
  if (isPair && !image && !pairs) refuse("The task does not accept pairs: give one text.");
  if (image ? !(input instanceof Blob || input instanceof ImageData) : !isPair && !FITS.str(input))
    refuse(`The input must be ${image ? "an image, a Blob or ImageData" : `a text${pairs ? " or a pair" : ""}`}, got ${shown(input).slice(0, 60)}.`);
}

/**
 * Drop options that are undefined, and refuse those that are unknown or break their rule.
 * @template {Record<string, any>} T
 * @param {{ task: string, rules: Manifest["rules"], unsupported?: string[], vocabulary?: number | null }} owner @param {T} given @returns {T}
 */
export function checkOptions({ task, rules, unsupported, vocabulary }, given) {
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined) { delete given[name]; continue; }
    if (unsupported?.includes(name)) refuse(`${name} is not supported in the browser: use zoo run.`);
    if (!Object.hasOwn(rules, name)) refuse(`Unknown option ${name}: ${task} has ${Object.keys(rules).join(", ") || "none"}.`);
    const { type, bound } = rules[name], [kind, none] = type.split(" or "), one = kind.replace("list of ", "");
    const fits = FITS[one] ?? ((/** @type {any} */ value) => value instanceof /** @type {any} */ (globalThis)[one]);
    const must = (/** @type {string} */ what) => refuse(`${name} must ${what}, got ${shown(value)}.`);
    if (value === null && none) continue;
    if (kind === "float" && typeof value === "number" && !fits(value)) must("be finite");
    if (kind === one ? !fits(value) : !Array.isArray(value) || !value.every(fits)) must(`be ${type}`);
    if (value < 0 && bound === "not negative" || value <= 0 && bound === "positive") must(bound.replace(/^(not )?/, "$1be "));
    if (/^..._p$/.test(name) && !(value >= 0 && value <= 1)) must("lie in [0, 1]");
    if (name === "stop" && value.includes("")) refuse("A stop string must not be empty.");
    if (/suppress_tokens$|_ids?$/.test(name) && vocabulary) for (const id of [value].flat())
      if (id < 0 || id >= vocabulary) refuse(`${name} contains ${id}, outside the vocabulary of ${vocabulary}.`);
  }
  return given;
}

/**
 * Return the options to generate with: the given ones, once checked, and those of the model that do not contradict them.
 * @param {Manifest} manifest @param {Record<string, any>} given @returns {Generation | null}
 */
export function settle(manifest, given) {
  const { generation } = manifest;
  checkOptions(manifest, given);
  if (!generation) return null;
  /** @type {any} */
  const options = { ...generation }, sampling = ["top_k", "top_p", "min_p"];
  for (const name of given.temperature === 0 ? sampling : []) options[name] = null;
  for (const [one, other, none] of /** @type {const} */ ([["max_new_tokens", "max_length", null], ["min_new_tokens", "min_length", 0]]))
    if (one in given || other in given) options[one] = options[other] = none;
  Object.assign(options, given);
  options.max_new_tokens ??= options.max_length ?? 32;
  for (const name of sampling)
    if (!options.temperature && options[name] !== null) refuse(`${name} requires sampling, but temperature is 0: set a temperature.`);
  return options;
}
