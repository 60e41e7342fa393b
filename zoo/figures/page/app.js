// State, controls, keyboard and readout. The state is in the fragment of the address, so links keep it.

const VIEWS = { overview, lines, matrix, text, image, sound, neurons };
const TITLES = { overview: "Overview", lines: "Lines", matrix: "Heat map", text: "Text", image: "Image", sound: "Sound", neurons: "Neurons" };
const DEFAULTS = {
  view: "overview", attention: FACTS.groups[0].name, layer: String(FACTS.maps[0].layer), head: String(FACTS.maps[0].heads[0]),
  query: "", key: "", tokens: "all", special: "1", colours: "map", lines: "0.1", theme: "",
};
const $ = (id) => document.getElementById(id);
const stage = $("stage");
const state = { ...DEFAULTS };
let renders = 0, seen = null;

const groupIndex = () => FACTS.groups.findIndex((group) => group.name === state.attention);
const position = (text, axis) => (/^\d+$/.test(text) && Number(text) < axis.labels.length ? Number(text) : null);

/** Return the map whose axes the selection has. */
function currentMap() {
  const maps = mapsOf(groupIndex()).map((index) => FACTS.maps[index]);
  return maps.find((map) => String(map.layer) === state.layer) ?? maps[0];
}

/** Return the positions of an axis that the filters leave; `side` is 0 for queries and 1 for keys. */
function shown(axisIndex, side) {
  const { labels, parts } = FACTS.axes[axisIndex], places = labels.map((_, place) => place);
  if (!parts.length) return places;
  const wanted = state.tokens === "all" ? null : Number(state.tokens.split("-")[side]);
  return places.filter((place) =>
    wanted !== null ? parts[place] === wanted : state.special === "1" || parts[place] !== null);
}

/** Return whether a view is defined for the axes of a map. */
function hasView(view, map) {
  if (view === "image") return Boolean(FACTS.axes[map.keys].grid);
  if (view === "sound") return FACTS.axes[map.keys].seconds !== null;
  return view !== "neurons" || FACTS.vectors !== null;
}

/** Replace settings that do not exist by ones that do. */
function settle() {
  if (groupIndex() < 0) state.attention = DEFAULTS.attention;
  const group = groupIndex(), layers = mapsOf(group).map((index) => FACTS.maps[index].layer);
  if (!layers.map(String).includes(state.layer) && !(state.layer === "mean" && isUniform(group))) state.layer = String(layers[0]);
  const map = currentMap();
  const heads = [...map.heads.map(String), "mean", ...(FACTS.groups[group].rollout === null ? [] : ["rollout"])];
  if (!heads.includes(state.head)) state.head = heads[0];
  if (state.layer === "mean") state.head = "mean";
  const isVisible = (axis, side, text) => shown(axis, side).includes(position(text, FACTS.axes[axis]));
  if (!scopes(map).some(([value]) => value === state.tokens)) state.tokens = "all";
  if (!isVisible(map.queries, 0, state.query)) state.query = "";
  if (!isVisible(map.keys, 1, state.key)) state.key = "";
  if (!Object.hasOwn(VIEWS, state.view) || !hasView(state.view, map)) state.view = "overview";
  if (!["", "light", "dark"].includes(state.theme)) state.theme = "";
  if (!["0", "1"].includes(state.special)) state.special = "1";
  if (!["map", "row", "one"].includes(state.colours)) state.colours = "map";
  if (!(Number(state.lines) >= 0 && Number(state.lines) <= 1)) state.lines = DEFAULTS.lines;
}

/** Return the filters by parts of the input, as [value, text]; only "all" if there is one part. */
function scopes(map) {
  const [queries, keys] = [FACTS.axes[map.queries], FACTS.axes[map.keys]];
  const parts = (axis) => [...new Set(axis.parts.filter((part) => part !== null))].sort();
  const pairs = parts(queries).flatMap((one) => parts(keys).map((other) => [one, other]));
  if (pairs.length < 2) return [["all", "all"]];
  return [["all", "all"], ...pairs.map(([one, other]) => [`${one}-${other}`, `${partName(queries, one)} to ${partName(keys, other)}`])];
}

function fill(id, options, value) {
  $(id).replaceChildren(...options.map(([key, label]) => make("option", { value: key, selected: key === value }, label)));
  $(id).closest("label").hidden = options.length < 2;
}

function fillControls() {
  const group = groupIndex(), map = currentMap(), queries = FACTS.axes[map.queries], keys = FACTS.axes[map.keys];
  for (const button of $("views").children) {
    button.setAttribute("aria-pressed", button.value === state.view);
    button.hidden = !hasView(button.value, map);
  }
  $("keys").textContent = `Keys in the drawing: ${state.view === "overview" ? "arrows move, Enter opens a head."
    : "\u2191 \u2193 query, Shift with arrows key, \u2190 \u2192 head, Page Up and Page Down layer, Escape back."}`;
  fill("group", FACTS.groups.map(({ name, title }) => [name, title]), state.attention);
  const layers = mapsOf(group).map((index) => String(FACTS.maps[index].layer)).map((layer) => [layer, layer]);
  fill("layer", [...layers, ...(layers.length > 1 && isUniform(group) ? [["mean", "mean of layers"]] : [])], state.layer);
  const heads = [...map.heads.map((head) => [String(head), String(head)]), ["mean", "mean of heads"]];
  if (FACTS.groups[group].rollout !== null) heads.push(["rollout", "rollout to this layer"]);
  fill("head", state.layer === "mean" ? [["mean", "mean of heads"]] : heads, state.head);
  const places = shown(map.queries, 0), isDivided = starts(queries, places).length > 0;
  const of = (place) => (isDivided && queries.parts[place] !== null ? `, ${partName(queries, queries.parts[place])}` : "");
  const tokens = places.map((place) => [String(place), `${place}${of(place)}: ${shortened(visible(queries.labels[place]), 24)}`]);
  fill("query", [["", "all"], ...tokens], state.query);
  fill("scope", scopes(map), state.tokens);
  fill("scale", [["map", "largest weight"], ["row", "largest of each query"], ["one", "0 to 1"]], state.colours);
  $("special").checked = state.special === "1";
  $("special-label").hidden = state.tokens !== "all" || ![queries, keys].some((axis) => axis.parts.includes(null));
  $("threshold").value = $("threshold-value").textContent = state.lines;
  $("threshold-label").hidden = state.view !== "lines";
  if (state.view === "neurons") $("scale").closest("label").hidden = true;
  if (state.view === "overview") for (const id of ["layer", "head", "query"]) $(id).closest("label").hidden = true;
}

/** Describe the selection: the title of the drawing and of its files. */
function heading() {
  const title = FACTS.groups[groupIndex()].title;
  if (state.view === "overview") return `${title}: layers by heads`;
  if (state.layer === "mean") return `${title}: mean of all layers and heads`;
  const head = { mean: "mean of heads", rollout: "rollout to this layer" }[state.head] ?? `head ${state.head}`;
  return `${title}: layer ${state.layer}, ${head}`;
}

/** Collect what a view draws. */
async function look(turn) {
  const map = currentMap(), group = groupIndex(), width = FACTS.axes[map.keys].labels.length;
  const base = {
    group, scale: state.colours, shown, open, select: (change) => set(change), isCurrent: () => turn === renders,
    chosen: { layer: state.layer, head: state.head },
  };
  if (state.view === "overview") return base;
  const values = await matrixOf(group, state.layer, state.head);
  const rows = shown(map.queries, 0), columns = shown(map.keys, 1), at = (row, column) => values[row * width + column];
  const tops = new Map();
  let largest = 0;
  for (const row of rows) {
    let top = 0;
    for (const column of columns) top = Math.max(top, at(row, column));
    tops.set(row, top);
    largest = Math.max(largest, top);
  }
  const unit = (row) => (state.colours === "one" ? 1 : state.colours === "row" ? tops.get(row) : largest) || 1;
  const queries = FACTS.axes[map.queries], keys = FACTS.axes[map.keys];
  const place = state.layer === "mean" ? -1 : map.heads.indexOf(Number(state.head));
  const query = position(state.query, queries) ?? rows.at(-1);
  const isComputed = state.view === "neurons" && map.vectors !== null && place >= 0 && query !== undefined;
  return {
    ...base, map, neurons: isComputed ? { query, found: await neuronsOf(map, place, query) } : null, values, queries, keys, rows, columns, at, largest, threshold: Number(state.lines), isUnscoped: state.tokens === "all",
    fraction: (row, column) => at(row, column) / unit(row), point: pair,
    chosen: { ...base.chosen, query: position(state.query, queries), key: position(state.key, keys) },
  };
}

function open(layer, head) {
  set({ layer, head, view: ["image", "sound"].find((view) => hasView(view, currentMap())) ?? "lines" });
  stage.focus();
}

/** Change the state, the address and what is shown. */
function set(change) {
  for (const [key, value] of Object.entries(change)) state[key] = value === null ? "" : String(value);
  render();
}

async function render() {
  const turn = ++renders;
  settle();
  writeFragment();
  applyTheme();
  fillControls();
  $("heading").textContent = heading();
  const found = await look(turn);
  if (turn !== renders) return;
  const isInside = stage.contains(document.activeElement) && document.activeElement !== stage;
  const scroll = [stage.scrollLeft, stage.scrollTop];
  seen = found;
  stage.dataset.ready = "";
  stage.replaceChildren();
  $("work").classList.toggle("wide", state.view === "overview");
  VIEWS[state.view](stage, seen);
  legend();
  if (stage.dataset.view === state.view) [stage.scrollLeft, stage.scrollTop] = scroll;
  stage.dataset.view = state.view;
  if (isInside) (stage.querySelector("[aria-pressed='true'], input[type='range']") ?? stage).focus();
  readout();
  if (state.view !== "overview") stage.dataset.ready = "all";
}

function legend() {
  if (state.view === "neurons") {
    $("legend").replaceChildren(...(seen.signs ? neuronLegend() : []));
    return;
  }
  if (state.view === "text" && seen.chosen.query === null) {
    $("legend").replaceChildren();
    return;
  }
  const map = state.view === "overview" ? "the largest weight of each map" : number(seen.largest);
  const top = { map, row: "the largest weight of each query", one: "1" };
  const bar = heatMap(1, 60, (_, column) => column / 59);
  bar.setAttribute("aria-hidden", "true");
  $("legend").replaceChildren("0 ", bar, ` ${top[state.colours]}. ${seen.remark ?? ""}`);
  if (state.tokens !== "all" || state.special !== "1") $("legend").append(" Hidden tokens keep their share: rows do not add up to 1.");
}

/** Return the largest error of the weights that are shown. */
function errorShown() {
  const group = groupIndex();
  if (state.head === "rollout") return FACTS.groups[group].rollout.error;
  return Math.max(...mapsOf(group).map((index) => FACTS.maps[index].error));
}

function pair({ query, key }) {
  const names = [seen.queries.labels[query], seen.keys.labels[key]].map((label) => isolated(visible(label)));
  const line = `query ${query} ${names[0]}, key ${key} ${names[1]}: ${number(seen.at(query, key))} ± ${bound(errorShown())}`;
  if (!$("readout").querySelector("p")) $("readout").prepend(make("p"));
  $("readout").querySelector("p").textContent = line;
}

/** List the strongest keys of the query, and the strongest queries of the key. */
function readout() {
  $("readout").replaceChildren();
  const { query, key } = seen.chosen;
  if (state.view === "overview" || (query === null && key === null)) return;
  const table = (title, axis, places, value) => {
    const best = places.filter((place) => value(place) > 0).sort((one, other) => value(other) - value(one)).slice(0, 8);
    const rows = best.map((place) => make("tr", {}, make("td", {}, String(place)),
      make("td", {}, make("bdi", {}, visible(axis.labels[place]))), make("td", {}, number(value(place)))));
    const cells = ["", title, "weight"].map((name) => (name ? make("th", { scope: "col" }, name) : make("td")));
    $("readout").append(make("table", {}, make("thead", {}, make("tr", {}, ...cells)), make("tbody", {}, ...rows)));
  };
  const name = (axis, place) => isolated(shortened(visible(axis.labels[place]), 24));
  if (seen.neurons) {
    if (key === null) return;
    pair({ query: seen.neurons.query, key });
    $("readout").append(neuronReadout(seen.neurons.found, key));
    return;
  }
  if (query !== null) table(`keys of ${name(seen.queries, query)}`, seen.keys, seen.columns, (place) => seen.at(query, place));
  if (key !== null) table(`queries to ${name(seen.keys, key)}`, seen.queries, seen.rows, (place) => seen.at(place, key));
  if (query !== null && key !== null) pair({ query, key });
}

function readFragment() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const key of Object.keys(DEFAULTS)) state[key] = given.get(key) ?? DEFAULTS[key];
}

function writeFragment() {
  const changed = Object.entries(state).filter(([key, value]) => value !== DEFAULTS[key]);
  const fragment = new URLSearchParams(changed).toString();
  try {
    history.replaceState(null, "", fragment ? `#${fragment}` : "#");
  } catch { /* a frame without an address of its own, as in a notebook */ }
}

function applyTheme() {
  const wanted = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = state.theme || wanted;
  $("theme").textContent = themeName() === "dark" ? "Light theme" : "Dark theme";
}

/** Move within a list of values; the ends stop. */
function moved(list, value, step) {
  const place = list.indexOf(value);
  return list[place < 0 ? (step > 0 ? 0 : list.length - 1) : Math.max(0, Math.min(list.length - 1, place + step))];
}

stage.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const map = currentMap(), step = { ArrowUp: -1, ArrowDown: 1, ArrowLeft: -1, ArrowRight: 1, PageUp: -1, PageDown: 1 }[event.key];
  if (event.key === "Escape") { set(state.query || state.key ? { query: "", key: "" } : { view: "overview" }); event.preventDefault(); return; }
  if (!step || event.target.matches("input")) return;
  if (state.view === "overview") {
    if (event.target !== stage) return; // the thumbnails move the focus themselves
    stage.querySelector("[tabindex='0']").focus();
    event.preventDefault();
    return;
  }
  event.preventDefault();
  const choices = (id) => [...$(id).options].map((option) => option.value);
  if (event.shiftKey && event.key.startsWith("Arrow")) set({ key: moved(shown(map.keys, 1).map(String), state.key, step) });
  else if (event.key === "ArrowUp" || event.key === "ArrowDown") set({ query: moved(shown(map.queries, 0).map(String), state.query, step) });
  else if (event.key.startsWith("Arrow")) set({ head: moved(choices("head"), state.head, step) });
  else set({ layer: moved(choices("layer"), state.layer, step) });
});
for (const [id, key] of Object.entries({ group: "attention", layer: "layer", head: "head", query: "query", scope: "tokens", scale: "colours" }))
  $(id).onchange = () => set({ [key]: $(id).value });
$("special").onchange = () => set({ special: $("special").checked ? 1 : 0 });
$("threshold").oninput = () => set({ lines: $("threshold").value });
$("theme").onclick = () => set({ theme: themeName() === "dark" ? "light" : "dark" });
$("controls").onsubmit = (event) => event.preventDefault();
const fileName = () => `${FACTS.title} ${heading()} ${state.view === "overview" ? "" : TITLES[state.view]}`.trim().replace(/[^\p{L}\p{N}.-]+/gu, "-").toLowerCase();
$("save-svg").onclick = () => save(new Blob([snapshot(stage, heading()).text], { type: "image/svg+xml" }), `${fileName()}.svg`);
$("save-png").onclick = async () => save(await rasterised(snapshot(stage, heading())), `${fileName()}.png`);
$("views").append(...Object.keys(VIEWS).map((view) =>
  make("button", { type: "button", value: view, onclick: () => set({ view }) }, TITLES[view])));

function stateEvidence() {
  const { verified, reason, provider, points, worst, file, dtype, digests, versions } = FACTS.evidence;
  const limit = worst ? `; largest error of an attention weight ${bound(worst.error)} (${worst.output}), limit ${number(worst.limit)}` : "";
  const text = verified
    ? `Verified on ${provider} at ${points} points against the model in float64${limit}.` : `NOT VERIFIED: ${reason}.`;
  $("verdict").textContent = `${text} Stored with ${FACTS.levels + 1} levels per query: error at most ${bound(FACTS.error)}.`;
  $("verdict").classList.toggle("bad", !verified);
  const rows = [["model", `${FACTS.model} (${FACTS.architecture}, ${dtype})`], ["evidence", file], ...Object.entries(digests).map(([name, digest]) => [name, `sha256 ${digest}`]),
    ["versions", Object.entries(versions).map((item) => item.join(" ")).join(", ")]];
  for (const { title, rollout } of FACTS.groups) if (rollout) rows.push([`rollout of ${title.toLowerCase()}`, `error at most ${bound(rollout.error)}`]);
  if (FACTS.vectors) {
    const { kind, error, weight_error: off } = FACTS.vectors;
    rows.push(["queries and keys", `stored as ${kind}: error at most ${bound(error)}; their softmax is within ${bound(off)} of the weights`]);
  }
  $("evidence").querySelector("dl").append(...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
addEventListener("hashchange", () => { readFragment(); render(); });
addEventListener("resize", render);
readFragment();
stateEvidence();
render();

/** For scripts: what the page states, and the weights of a head as it shows them. */
window.attentionPage = {
  facts: FACTS,
  state,
  /** Return the weights of a head, "mean" or "rollout" of a map, row by row. */
  async weights(name, head) {
    const map = FACTS.maps.find((item) => item.name === name);
    return Array.from(await matrixOf(map.group, map.layer, String(head)));
  },
  /** Return what the weights of a query are computed from; null if the page does not have it. */
  async neurons(name, head, query) {
    const map = FACTS.maps.find((item) => item.name === name);
    if (map.vectors === null) return null;
    const found = await neuronsOf(map, map.heads.indexOf(Number(head)), query);
    const plain = (item) => ({ ...item, key: Array.from(item.key), products: Array.from(item.products) });
    return { query: Array.from(found.query), keys: found.keys.map(plain) };
  },
};
