// The neuron view: what the weights of a query are computed from, dimension by dimension.

/** Colours of signed numbers, from the most negative on: two hues that any colour vision tells apart, and the ground. */
const SIGNED = {
  light: [[127, 59, 8], [224, 130, 20], [255, 255, 255], [67, 147, 195], [5, 48, 97]],
  dark: [[255, 224, 178], [230, 140, 30], [19, 20, 22], [60, 140, 200], [190, 225, 250]],
};

/** Return the colour of a fraction from -1 to 1 as [red, green, blue]. */
function signedColour(fraction) {
  const ramp = SIGNED[themeName()], place = (Math.min(1, Math.max(-1, fraction)) + 1) / 2 * (ramp.length - 1);
  const low = Math.min(ramp.length - 2, Math.floor(place)), part = place - low;
  return ramp[low].map((value, i) => Math.round(value + (ramp[low + 1][i] - value) * part));
}

/** Return a number with its sign. */
const signed = (value) => (value < 0 ? `\u2212${number(-value)}` : number(value));

/** Return a function that reads a row of stored numbers, (heads, rows, columns), given its head and its place. */
async function storedRows({ block, kind, heads }, rows, columns) {
  const buffer = await cachedBlock(block), count = heads * rows;
  const at = kind.startsWith("int") ? 4 * count : 0;
  const Numbers = { float32: Float32Array, int16: Int16Array, int8: Int8Array, bits: Uint8Array }[kind];
  const values = new Numbers(buffer, at, count * columns), scales = at ? new Float32Array(buffer, 0, count) : null;
  return (head, row) => {
    const place = (heads === 1 ? 0 : head) * rows + row;
    return Float64Array.from(values.subarray(place * columns, (place + 1) * columns), (value) => value * (scales ? scales[place] : 1));
  };
}

/**
 * Return what the weights of a query are computed from: the query, and for every key {key, products, sum, scaled,
 * capped, bias, seen, score, weight}. A hidden key has no score, and the weight 0.
 */
async function neuronsOf(map, place, query) {
  const { size, scale, softcap, key_heads: keyHeads, queries, keys, bias, seen } = map.vectors;
  const rows = FACTS.axes[map.queries].labels.length, columns = FACTS.axes[map.keys].labels.length;
  const vector = (await storedRows(queries, rows, size))(place, query);
  const keyRow = await storedRows(keys, columns, size);
  const biases = bias && (await storedRows(bias, rows, columns))(place, query);
  const sees = seen && (await storedRows(seen, rows, columns))(place, query);
  const found = Array.from({ length: columns }, (_, column) => {
    const key = keyRow(keys.heads === 1 ? 0 : keyHeads[place], column);
    const products = vector.map((value, i) => value * key[i]);
    const sum = products.reduce((total, value) => total + value, 0), scaled = sum * scale;
    const capped = softcap === null ? scaled : softcap * Math.tanh(scaled / softcap);
    const own = biases ? biases[column] : 0, isSeen = !sees || sees[column] !== 0;
    return { key, products, sum, scaled, capped, bias: own, seen: isSeen, score: isSeen ? capped + own : null, weight: 0 };
  });
  const seenKeys = found.filter((item) => item.seen), highest = Math.max(...seenKeys.map((item) => item.score));
  const total = seenKeys.reduce((sum, item) => sum + Math.exp(item.score - highest), 0);
  for (const item of seenKeys) item.weight = Math.exp(item.score - highest) / total;
  return { query: vector, keys: found };
}

/** Return the largest absolute value in lists of numbers. */
const largestOf = (lists) => lists.reduce((most, list) => list.reduce((top, value) => Math.max(top, Math.abs(value)), most), 0);

/** Draw numbers as a strip of cells. */
function strip(values, top, width, label) {
  const canvas = make("canvas", { width: values.length, height: 1, role: "img", "aria-label": label });
  const context = canvas.getContext("2d"), image = context.createImageData(values.length, 1);
  values.forEach((value, i) => image.data.set([...signedColour(top ? value / top : 0), 255], 4 * i));
  context.putImageData(image, 0, 0);
  Object.assign(canvas.style, { width: `${width}px`, height: "16px" });
  return canvas;
}

/** One query against all keys: vectors and products as strips, and the numbers from their sums to the weights. */
function neurons(stage, seen) {
  const { rows, columns, queries, keys, chosen, select, map } = seen;
  if (!seen.neurons) {
    const why = map.vectors ? "Choose a head: an average has no queries and keys."
      : "These weights have no queries and keys: they are not computed as scaled dot products.";
    stage.append(make("p", { className: "caption", "data-text": "" }, rows.length ? why : "No query is shown."));
    return;
  }
  const { query, found } = seen.neurons, shownKeys = columns.map((column) => [column, found.keys[column]]);
  const top = largestOf(shownKeys.map(([, item]) => item.key)), own = largestOf([found.query]);
  const most = largestOf(shownKeys.map(([, item]) => item.products));
  const width = Math.max(96, Math.min(12 * found.query.length, Math.floor((stage.clientWidth - 560) / 2)));
  const { softcap, bias, scale } = map.vectors;
  const name = `query ${query} ${isolated(visible(queries.labels[query]))}`;
  stage.append(make("div", { className: "query" },
    make("span", { className: "caption", "data-text": "" }, name), strip(found.query, own, width, `query vector of ${name}`)));
  if (chosen.key !== null) stage.append(bars(found.query, found.keys[chosen.key], Math.min(stage.clientWidth - 24, 900)));
  const titles = ["key", "k", "q × k", "sum", `× ${Number(scale.toPrecision(4))}`, ...(softcap === null ? [] : [`cap ${Number(softcap.toPrecision(4))}`]),
    ...(bias ? ["+ bias", "= score"] : []), "softmax", "weight"];
  const cell = (text) => make("td", { "data-text": "" }, text);
  const lines = shownKeys.map(([column, item]) => {
    const label = shortened(visible(keys.labels[column]), 16);
    const button = make("button", { type: "button", title: `${column}: ${visible(keys.labels[column])}` }, make("bdi", {}, label));
    button.dataset.text = "";
    button.setAttribute("aria-pressed", column === chosen.key);
    button.onclick = () => select({ query, key: column === chosen.key ? null : column });
    const numbers = [item.sum, item.scaled, ...(softcap === null ? [] : [item.capped]), ...(bias ? [item.bias, item.score] : [])];
    return make("tr", {}, make("th", { scope: "row" }, button),
      make("td", {}, strip(item.key, top, width, `key vector of ${label}`)),
      make("td", {}, strip(item.products, most, width, `products with ${label}`)),
      ...numbers.map((value) => cell(value === null ? "hidden" : signed(value))),
      cell(item.seen ? number(item.weight) : "hidden"), cell(number(seen.at(query, column))));
  });
  const head = titles.map((title) => make("th", { scope: "col", "data-text": "" }, title));
  stage.append(make("table", { className: "neurons" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines)));
  seen.signs = { query: own, key: top, products: most };
}

/** The dimensions of one pair as bars: the query, the key and their products. */
function bars(query, { key, products }, wide) {
  const { ink, quiet } = inks(), count = query.length, step = Math.max(3, Math.min(24, Math.floor((wide - 60) / count)));
  const high = 60, gap = 18, panels = [["q", query], ["k", key], ["q × k", products]];
  const picture = draw("svg", { width: 60 + step * count, height: panels.length * (high + gap) + 22, role: "img" });
  picture.setAttribute("aria-label", "query, key and products by dimension");
  panels.forEach(([title, values], i) => {
    const top = largestOf([values]) || 1, middle = gap + i * (high + gap) + high / 2;
    picture.append(draw("text", { x: 4, y: middle + 4, fill: ink }, title));
    picture.append(draw("line", { x1: 52, x2: 52 + step * count, y1: middle, y2: middle, stroke: quiet }));
    values.forEach((value, d) => {
      const height = Math.abs(value) / top * (high / 2);
      const fill = rgb(signedColour(value < 0 ? -0.7 : 0.7)), y = value < 0 ? middle : middle - height;
      const bar = draw("rect", { x: 52 + step * d + 0.5, y, width: step - 1, height, fill });
      bar.append(draw("title", {}, `dimension ${d}: ${signed(value)}`));
      picture.append(bar);
    });
  });
  const every = [1, 2, 4, 8, 16, 32].find((unit) => unit * step >= 26) ?? 64;
  for (let d = 0; d < count; d += every) {
    const place = { x: 52 + step * (d + 0.5), y: panels.length * (high + gap) + 18, "text-anchor": "middle", fill: quiet, "font-size": 11 };
    picture.append(draw("text", place, String(d)));
  }
  return picture;
}

/** Explain the colours of the strips. */
function neuronLegend() {
  const bar = make("canvas", { width: 61, height: 1, "aria-hidden": "true" }), context = bar.getContext("2d");
  for (let i = 0; i < 61; i++) { context.fillStyle = rgb(signedColour((i - 30) / 30)); context.fillRect(i, 0, 1, 1); }
  const { query, key, products } = seen.signs;
  const { error, weight_error: off } = FACTS.vectors;
  return ["from the negative to the positive of ", bar, ` ${number(query)} for q, ${number(key)} for k, ${number(products)} for q × k. Stored numbers are `
    + `off by at most ${bound(error)}; their softmax is within ${bound(off)} of the weights of the graph.`];
}

/** List the dimensions of a pair with the largest products. */
function neuronReadout(found, key) {
  const { products, key: values } = found.keys[key];
  const best = [...products.keys()].sort((one, other) => Math.abs(products[other]) - Math.abs(products[one])).slice(0, 12);
  const cells = ["dim", "q", "k", "q × k"].map((name) => make("th", { scope: "col" }, name));
  const lines = best.map((d) => make("tr", {}, ...[String(d), ...[found.query[d], values[d], products[d]].map(signed)].map((text) => make("td", {}, text))));
  return make("table", { className: "dimensions" }, make("thead", {}, make("tr", {}, ...cells)), make("tbody", {}, ...lines));
}
