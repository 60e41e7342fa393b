// The views. Each fills the stage from `seen`: the matrix, its axes, the visible rows and columns, and the colour scale.

const MOST_LINES = 3000;
const PICTURE = 384;
const TITLE = 18;

const partName = (axis, part) => axis.part_names[part] ?? String(part);

/** Return where each part of the input begins among positions, as [index, name]; nothing if there is one part. */
function starts(axis, places) {
  const found = [];
  let before = null;
  places.forEach((place, index) => {
    const part = axis.parts[place] ?? null; // null for special tokens
    if (part === null || part === before) return;
    found.push([index, partName(axis, part)]);
    before = part;
  });
  return found.length > 1 ? found : [];
}

/** Return the weights of a thumbnail: the largest of each block of cells, at most `size` by `size`. */
function pooled(at, rows, columns, size) {
  const high = Math.min(size, rows.length), wide = Math.min(size, columns.length);
  const result = new Float32Array(high * wide);
  let largest = 0;
  for (let i = 0; i < rows.length; i++) {
    const to = Math.floor((i * high) / rows.length) * wide;
    for (let j = 0; j < columns.length; j++) {
      const value = at(rows[i], columns[j]), place = to + Math.floor((j * wide) / columns.length);
      if (value > result[place]) result[place] = value;
      if (value > largest) largest = value;
    }
  }
  return { result, high, wide, largest };
}

/** All layers by heads, then the mean over heads and the rollout, as thumbnails that open a head. */
function overview(stage, seen) {
  const { group, chosen, open, isCurrent } = seen;
  const maps = mapsOf(group), heads = [...new Set(maps.flatMap((index) => FACTS.maps[index].heads))];
  const names = [...heads.map(String), "mean", ...(FACTS.groups[group].rollout === null ? [] : ["rollout"])];
  const room = (stage.clientWidth - 80) / names.length - 6;
  const size = Math.max(36, Math.min(110, Math.floor(room)));
  const grid = make("div", { className: "grid", style: { gridTemplateColumns: `auto repeat(${names.length}, auto)` } });
  grid.append(make("span", {}), ...names.map((name) => make("span", { "data-text": "" }, name)));
  const waiting = [];
  for (const index of maps) {
    const { layer, heads: own } = FACTS.maps[index];
    grid.append(make("span", { "data-text": "" }, String(layer)));
    for (const name of names) {
      if (!["mean", "rollout"].includes(name) && !own.includes(Number(name))) { grid.append(make("span")); continue; }
      const canvas = make("canvas", { width: 1, height: 1, style: { width: `${size}px`, height: `${size}px` } });
      const label = `layer ${layer}, ${name === "mean" || name === "rollout" ? name : `head ${name}`}`;
      const isChosen = String(layer) === chosen.layer && name === chosen.head;
      const button = make("button", { type: "button", title: label, "aria-label": label, tabIndex: isChosen ? 0 : -1 }, canvas);
      button.dataset.layer = layer;
      button.dataset.head = name;
      button.onclick = () => open(String(layer), name);
      grid.append(button);
      waiting.push([index, layer, name, canvas]);
    }
  }
  if (!grid.querySelector("[tabindex='0']")) grid.querySelector("button").tabIndex = 0;
  stage.append(grid);
  grid.onkeydown = (event) => moveFocus(event, grid, names.length);
  (async () => {
    for (const [index, layer, name, canvas] of waiting) {
      const { queries, keys } = FACTS.maps[index], rows = seen.shown(queries, 0), columns = seen.shown(keys, 1);
      const width = FACTS.axes[keys].labels.length;
      const values = await (["mean", "rollout"].includes(name)
        ? matrixOf(group, layer, name) : blockMatrix(index, FACTS.maps[index], FACTS.maps[index].heads.indexOf(Number(name))));
      if (!isCurrent()) return;
      const { result, high, wide, largest } = pooled((row, column) => values[row * width + column], rows, columns, size);
      const top = seen.scale === "one" ? 1 : largest || 1;
      const drawn = heatMap(high, wide, (row, column) => result[row * wide + column] / top);
      [canvas.width, canvas.height] = [wide, high];
      if (drawn.width && drawn.height) canvas.getContext("2d").drawImage(drawn, 0, 0);
    }
    stage.dataset.ready = "all";
  })();
}

/** Move the focus among the thumbnails with the arrow keys. */
function moveFocus(event, grid, columns) {
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (!step || !event.target.closest("button")) return;
  const buttons = [...grid.querySelectorAll("button")];
  const next = buttons[buttons.indexOf(event.target) + step];
  event.preventDefault();
  if (!next) return;
  for (const button of buttons) button.tabIndex = button === next ? 0 : -1;
  next.focus();
}

/** One head as lines from queries, on the left, to keys, on the right. */
function lines(stage, seen) {
  const { rows, columns, at, chosen, select } = seen, { ink, ground, query, key, mark, quiet } = inks();
  const wide = Math.max(260, Math.min(760, stage.clientWidth - 14));
  const height = Math.max(rows.length, columns.length) > 150 ? 14 : 19;
  const most = Math.floor(Math.min(150, wide * 0.3) / CHARACTER);
  const left = most * CHARACTER + 12, right = wide - left;
  const picture = draw("svg", { width: wide, height: 30 + height * Math.max(rows.length, columns.length) });
  const y = (place) => 34 + height * place;
  picture.append(draw("text", { x: left - 8, y: 14, fill: query, "text-anchor": "end" }, "queries"));
  picture.append(draw("text", { x: right + 8, y: 14, fill: key }, "keys"));
  const strokes = draw("g", { fill: "none", stroke: query });
  picture.append(strokes);
  const found = [];
  rows.forEach((row, i) => columns.forEach((column, j) => {
    if (chosen.query !== null ? row !== chosen.query : chosen.key !== null && column !== chosen.key) return;
    const value = at(row, column), fraction = seen.fraction(row, column);
    if (value > 0 && fraction >= seen.threshold) found.push([fraction, i, j]);
  }));
  found.sort((one, other) => other[0] - one[0]);
  for (const [fraction, i, j] of found.slice(0, MOST_LINES)) {
    const middle = (left + right) / 2;
    const path = `M${left} ${y(i) - 4}C${middle} ${y(i) - 4} ${middle} ${y(j) - 4} ${right} ${y(j) - 4}`;
    const opacity = (0.08 + 0.92 * fraction).toFixed(3);
    strokes.append(draw("path", { d: path, "stroke-opacity": opacity, "stroke-width": (0.6 + 2.4 * fraction).toFixed(2) }));
  }
  const divide = (axis, places, x, name) => starts(axis, places).forEach(([i, part]) => {
    const top = y(i) - height + 4;
    picture.append(draw("line", { x1: x, y1: top, x2: x + left - 4, y2: top, stroke: quiet, "stroke-dasharray": "4 3" }));
    picture.append(draw("text", { ...name, y: y(i), fill: quiet, "font-weight": "bold" }, shortened(part, 6)));
  });
  const column = (axis, places, side, anchor, x, current) => places.forEach((place, i) => {
    const label = shortened(visible(axis.labels[place]), most), isChosen = place === current;
    const tokenBox = draw("g", { cursor: "pointer" });
    const from = side === "query" ? 0 : x - 4;
    const fill = isChosen ? mark : ground, opacity = isChosen ? 0.3 : 0;
    tokenBox.append(draw("rect", { x: from, y: y(i) - height + 4, width: left, height, fill, "fill-opacity": opacity }));
    const style = { x, y: y(i), fill: ink, "text-anchor": anchor, "font-size": height < 19 ? 11 : 12 };
    tokenBox.append(draw("text", style, isolated(label)), draw("title", {}, `${place}: ${visible(axis.labels[place])}`));
    tokenBox.onclick = () => select({ [side]: isChosen ? null : place });
    picture.append(tokenBox);
  });
  column(seen.queries, rows, "query", "end", left - 8, chosen.query);
  column(seen.keys, columns, "key", "start", right + 8, chosen.key);
  divide(seen.queries, rows, 0, { x: 2 });
  divide(seen.keys, columns, right + 4, { x: wide - 2, "text-anchor": "end" });
  stage.append(picture);
  const shown = Math.min(found.length, MOST_LINES);
  seen.remark = found.length > shown ? `The ${shown} strongest of ${found.length} weights.` : `Weights drawn: ${shown}.`;
}

/** One head as a heat map, queries down, keys across. */
function matrix(stage, seen) {
  const { rows, columns, chosen, select } = seen, { ink, mark, query, key, quiet } = inks();
  const length = (axis, places) => Math.max(3, ...places.map((place) => Math.min(14, visible(axis.labels[place]).length)));
  const labels = Math.min(columns.length, rows.length) <= 160;
  const side = TITLE + (labels ? length(seen.queries, rows) * CHARACTER + 8 : 6);
  const above = TITLE + (labels ? length(seen.keys, columns) * CHARACTER + 8 : 6);
  const room = Math.min(stage.clientWidth - side - 16, 900);
  const cell = Math.max(labels ? 14 : 2, Math.min(34, Math.floor(room / columns.length)));
  const canvas = heatMap(rows.length, columns.length, (i, j) => seen.fraction(rows[i], columns[j]));
  const wide = cell * columns.length, high = cell * rows.length;
  Object.assign(canvas.style, { left: `${side}px`, top: `${above}px`, width: `${wide}px`, height: `${high}px` });
  const titled = 8 * CHARACTER; // a title may be longer than the side of a small map
  const picture = draw("svg", { width: side + Math.max(wide, titled) + 2, height: above + Math.max(high, titled) + 2 });
  picture.append(draw("text", { x: side, y: 12, fill: key }, "keys"));
  picture.append(draw("text", { transform: `translate(12 ${above}) rotate(-90)`, "text-anchor": "end", fill: query }, "queries"));
  if (labels) {
    rows.forEach((row, i) => picture.append(draw("text", {
      x: side - 4, y: above + cell * (i + 0.5) + 4, "text-anchor": "end", fill: ink,
    }, isolated(shortened(visible(seen.queries.labels[row]), 14)))));
    columns.forEach((column, j) => picture.append(draw("text", {
      transform: `translate(${side + cell * (j + 0.5) + 4} ${above - 4}) rotate(-90)`, fill: ink,
    }, isolated(shortened(visible(seen.keys.labels[column]), 14)))));
  }
  picture.append(draw("rect", { x: side, y: above, width: wide, height: high, fill: "none", stroke: quiet }));
  const divide = (x1, y1, x2, y2) => picture.append(draw("line", { x1, y1, x2, y2, stroke: quiet, "stroke-dasharray": "4 3" }));
  for (const [i] of starts(seen.queries, rows).slice(1)) divide(TITLE, above + cell * i, side + wide, above + cell * i);
  for (const [j] of starts(seen.keys, columns).slice(1)) divide(side + cell * j, TITLE, side + cell * j, above + high);
  const outline = (x, y, width, height) => picture.append(
    draw("rect", { x, y, width, height, fill: "none", stroke: mark, "stroke-width": 2 }));
  const i = rows.indexOf(chosen.query), j = columns.indexOf(chosen.key);
  if (i >= 0) outline(side, above + cell * i, wide, cell);
  if (j >= 0) outline(side + cell * j, above, cell, high);
  const pointed = (event) => {
    const box = picture.getBoundingClientRect();
    const row = rows[Math.floor((event.clientY - box.top - above) / cell)];
    const column = columns[Math.floor((event.clientX - box.left - side) / cell)];
    return row === undefined || column === undefined ? null : { query: row, key: column };
  };
  picture.onclick = (event) => { const pair = pointed(event); if (pair) select(pair); };
  picture.onpointermove = (event) => { const pair = pointed(event); if (pair) seen.point(pair); };
  stage.append(make("div", { className: "matrix" }, canvas, picture));
}

/** The tokens as text, shaded by the weights of the query; for generated texts, step by step. */
function text(stage, seen) {
  const { queries, keys, rows, columns, chosen, select } = seen, steps = queries.steps;
  const isOne = queries === keys && seen.isUnscoped;
  const step = steps.findIndex((item) => item.query === chosen.query);
  if (steps.length) stage.append(stepControls(steps, step, select));
  const block = (axis, places, caption, isQuery, shade) => {
    const tokens = places.map((place) => {
      const button = make("button", { type: "button", title: `${place}` }, make("bdi", {}, visible(axis.labels[place])));
      button.dataset.text = "";
      if (shade) {
        const filled = chosen.query === null ? colour(0) : colour(seen.fraction(chosen.query, place));
        Object.assign(button.style, { background: rgb(filled), color: inkOn(filled) });
        if (chosen.query !== null) button.title += `: ${number(seen.at(chosen.query, place))}`;
      }
      if (isQuery) {
        button.setAttribute("aria-pressed", place === chosen.query);
        if (step >= 0 && place > chosen.query) button.className = "later";
        button.onclick = () => select({ query: place === chosen.query ? null : place });
      } else button.onclick = () => select({ key: place });
      return button;
    });
    stage.append(make("p", { className: "caption", "data-text": "" }, caption));
    for (const [index, name] of starts(axis, places).reverse())
      tokens.splice(index, 0, make("span", { className: "part", "data-text": "" }, name));
    stage.append(make("div", { className: "tokens", role: "group", "aria-label": caption }, ...tokens));
  };
  const isShaded = chosen.query !== null;
  if (isOne) block(queries, rows, isShaded ? "tokens, shaded by the weights of the chosen one" : "tokens: choose one to see its weights", true, true);
  else {
    block(queries, rows, isShaded ? "queries" : "queries: choose one to see its weights", true, false);
    block(keys, columns, isShaded ? "keys, shaded by the weights of the chosen query" : "keys", false, true);
  }
}

/** Controls and candidates of the step that generated a token. */
function stepControls(steps, step, select) {
  const go = (next) => select({ query: steps[Math.max(0, Math.min(steps.length - 1, next))].query });
  const range = make("input", { type: "range", min: 0, max: steps.length - 1, value: Math.max(0, step) });
  range.setAttribute("aria-label", "Step of generation");
  range.oninput = () => go(Number(range.value));
  const back = make("button", { type: "button", onclick: () => go(step - 1) }, "Back");
  const next = make("button", { type: "button", onclick: () => go(step + 1) }, "Next");
  const box = make("div", { className: "steps" }, back, next, range);
  if (step < 0) return make("div", {}, box, make("p", { className: "caption" }, "Choose a step of the generated text."));
  const title = `step ${step + 1} of ${steps.length}: chose ${visible(steps[step].token)}. Likeliest: `;
  const candidates = steps[step].candidates.map(([token, chance]) => `${visible(token)} ${chance.toPrecision(2)}`);
  return make("div", {}, box, make("p", { className: "caption", "data-text": "" }, make("bdi", {}, title + candidates.join("; "))));
}

/** The patches of an image: lit by the weights of the query, and as a heat map. */
function image(stage, seen) {
  const { keys, queries, chosen, select } = seen, [first, rows, columns] = keys.grid;
  const query = chosen.query ?? 0;
  const wide = Math.min(PICTURE, stage.clientWidth - 14), high = Math.round((wide * rows) / columns);
  const place = (i, j) => first + i * columns + j;
  let top = 0;  // special tokens may have much larger weights than any patch
  for (let at = first; at < first + rows * columns; at++) top = Math.max(top, seen.at(query, at));
  seen.largest = top;
  const part = (i, j) => seen.at(query, place(i, j)) / (seen.scale === "one" ? 1 : top || 1);
  const lit = make("canvas", { width: wide, height: high, role: "img" });
  lit.setAttribute("aria-label", `image, lit by the weights of ${queries.labels[query]}`);
  const context = lit.getContext("2d"), source = new Image();
  const paint = () => {
    context.imageSmoothingEnabled = false;
    if (keys.image) context.drawImage(source, 0, 0, wide, high);
    for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) {
      const [x, y] = [Math.round((j * wide) / columns), Math.round((i * high) / rows)];
      const [right, lower] = [Math.round(((j + 1) * wide) / columns), Math.round(((i + 1) * high) / rows)];
      context.fillStyle = `rgba(0, 0, 0, ${0.85 * (1 - part(i, j))})`;
      context.fillRect(x, y, right - x, lower - y);
      if (queries.grid && place(i, j) === query) {
        context.strokeStyle = inks().mark; context.lineWidth = 3;
        context.strokeRect(x + 1.5, y + 1.5, right - x - 3, lower - y - 3);
      }
    }
  };
  if (keys.image) { source.onload = paint; source.src = keys.image; } else paint();
  const map = heatMap(rows, columns, part);
  Object.assign(map.style, { width: `${wide}px`, height: `${high}px` });
  map.setAttribute("role", "img");
  map.setAttribute("aria-label", "weights of the patches");
  for (const canvas of [lit, map]) canvas.onclick = (event) => {
    const box = canvas.getBoundingClientRect();
    const i = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const j = Math.floor(((event.clientX - box.left) / box.width) * columns);
    select(queries.grid ? { query: place(i, j) } : { key: place(i, j) });
  };
  const others = Array.from({ length: first }, (_, at) => `${keys.labels[at]} ${number(seen.at(query, at))}`);
  stage.append(make("div", { className: "picture" }, lit, map));
  const caption = `query ${queries.labels[query]}${others.length ? `; outside the image: ${others.join(", ")}` : ""}`;
  stage.append(make("p", { className: "caption", "data-text": "" }, caption));
}
