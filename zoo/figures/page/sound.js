// The sound view: the weights of a query over the sound, and those of all queries, along a time axis in seconds.

const WAVE = 60, CURVE = 90;

/** Return the marks of a time axis as [seconds, text], at most `most` of them. */
function timeMarks(duration, most) {
  const unit = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10].find((step) => duration / step <= most) ?? 20;
  return Array.from({ length: Math.floor(duration / unit + 1e-6) + 1 }, (_, i) => [i * unit, String(Number((i * unit).toFixed(2)))]);
}

/** The sound, the weights of the query over it, and a row of weights for each query. */
function sound(stage, seen) {
  const { rows, columns, queries, keys, chosen, select } = seen, { ink, quiet, query: accent, mark } = inks();
  const query = chosen.query ?? rows.at(-1);
  if (query === undefined || !columns.length) { stage.append(make("p", { className: "caption", "data-text": "" }, "No position is shown.")); return; }
  const labels = rows.length <= 160, isTime = queries.seconds !== null;
  const side = Math.min(14, Math.max(8, ...rows.map((row) => visible(queries.labels[row]).length))) * CHARACTER + 10;
  const wide = Math.max(200, Math.min(1000, stage.clientWidth - side - 20)), step = wide / columns.length;
  const cell = labels ? 16 : Math.max(1, Math.floor(480 / rows.length)), above = WAVE + CURVE + 44;
  const x = (place) => side + step * place, bottom = WAVE + 10 + CURVE;
  const picture = draw("svg", { width: side + wide + 4, height: above + cell * rows.length + 4 });
  const words = (content, attributes) => picture.append(draw("text", { fill: quiet, "font-size": 11, ...attributes }, content));
  if (keys.peaks) {
    const half = WAVE / 2, peaks = columns.map((column) => (keys.peaks[column] / 100) * (half - 2));
    const upper = peaks.map((peak, i) => `${x(i + 0.5).toFixed(1)} ${(half - peak).toFixed(1)}`);
    const lower = peaks.map((peak, i) => `${x(i + 0.5).toFixed(1)} ${(half + peak).toFixed(1)}`).reverse();
    picture.append(draw("path", { d: `M${[...upper, ...lower].join("L")}Z`, fill: quiet, stroke: quiet, "stroke-width": 0.5 }));
    words("sound", { x: side - 6, y: half + 4, "text-anchor": "end" });
  }
  const top = Math.max(...columns.map((column) => seen.at(query, column))) || 1;
  const height = (column) => CURVE * Math.min(1, seen.at(query, column) / (seen.scale === "one" ? 1 : top));
  const curve = columns.map((column, i) => `L${x(i).toFixed(1)} ${(bottom - height(column)).toFixed(1)}H${x(i + 1).toFixed(1)}`);
  picture.append(draw("path", { d: `M${side} ${bottom}${curve.join("")}V${bottom}Z`, fill: accent, "fill-opacity": 0.75 }));
  picture.append(draw("line", { x1: side, x2: side + wide, y1: bottom, y2: bottom, stroke: quiet }));
  picture.append(draw("text", { x: side - 6, y: bottom - CURVE / 2, "text-anchor": "end", fill: ink },
    isolated(shortened(visible(queries.labels[query]), 14))));
  const start = columns[0] * keys.seconds;
  for (const [seconds, text] of timeMarks(columns.length * keys.seconds, wide / 60)) {
    const at = side + (seconds / keys.seconds) * step;
    picture.append(draw("line", { x1: at, x2: at, y1: bottom, y2: bottom + 5, stroke: quiet }));
    words(start ? String(Number((start + seconds).toFixed(2))) : text, { x: at, y: bottom + 17, "text-anchor": "middle" });
  }
  words("seconds", { x: side - 6, y: bottom + 17, "text-anchor": "end" });
  if (labels) {
    rows.forEach((row, i) => picture.append(draw("text", { x: side - 6, y: above + cell * (i + 0.5) + 4, "text-anchor": "end", fill: ink },
      isolated(shortened(visible(queries.labels[row]), 14)))));
  } else if (isTime) {
    for (const [seconds, text] of timeMarks(rows.length * queries.seconds, 10)) {
      words(text, { x: side - 6, y: above + (seconds / queries.seconds) * cell + 4, "text-anchor": "end" });
    }
  }
  const canvas = heatMap(rows.length, columns.length, (i, j) => seen.fraction(rows[i], columns[j]));
  Object.assign(canvas.style, { left: `${side}px`, top: `${above}px`, width: `${wide}px`, height: `${cell * rows.length}px` });
  const outline = (left, upper, width, tall) => picture.append(
    draw("rect", { x: left, y: upper, width, height: tall, fill: "none", stroke: mark, "stroke-width": 2 }));
  const i = rows.indexOf(query), j = columns.indexOf(chosen.key);
  outline(side, above + cell * i, wide, Math.max(2, cell));
  if (j >= 0) outline(x(j), 0, Math.max(2, step), above + cell * rows.length);
  const pointed = (event) => {
    const box = picture.getBoundingClientRect();
    const row = rows[Math.floor((event.clientY - box.top - above) / cell)] ?? query;
    const column = columns[Math.floor((event.clientX - box.left - side) / step)];
    return column === undefined ? { query: row } : { query: row, key: column };
  };
  picture.onclick = (event) => select(pointed(event));
  picture.onpointermove = (event) => { const pair = pointed(event); if (pair.key !== undefined) seen.point(pair); };
  stage.append(make("div", { className: "matrix" }, canvas, picture));
  seen.remark = `The curve: largest ${number(top)}.`;
}
