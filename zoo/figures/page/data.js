"use strict";
// The weights of the page: decoding, averages and rollout. A matrix is a Float64Array of rows * columns.

const FACTS = JSON.parse(document.getElementById("facts").textContent);
const decodedMaps = new Map();
const cachedMatrices = new Map();

/** Read base64 text into bytes. */
function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** Return {scales, integers, rows, columns} of a map, decompressed on first use. */
function decodeMap(index) {
  if (!decodedMaps.has(index)) decodedMaps.set(index, decompress(index));
  return decodedMaps.get(index);
}

async function decompress(index) {
  const map = FACTS.maps[index];
  const rows = FACTS.axes[map.queries].labels.length, columns = FACTS.axes[map.keys].labels.length;
  const packed = bytesOf(document.getElementById(`map-${index}`).textContent);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const count = map.heads.length * rows;
  return { scales: new Float32Array(buffer, 0, count), integers: new Uint8Array(buffer, 4 * count), rows, columns };
}

/** Return the weights of the head at `place` of a map. */
async function headMatrix(index, place) {
  const { scales, integers, rows, columns } = await decodeMap(index);
  const result = new Float64Array(rows * columns);
  for (let row = 0; row < rows; row++) {
    const scale = scales[place * rows + row], from = (place * rows + row) * columns;
    for (let column = 0; column < columns; column++) result[row * columns + column] = integers[from + column] * scale;
  }
  return result;
}

/** Compute a matrix once per key; the latest 64 are kept. */
function cachedMatrix(key, compute) {
  if (!cachedMatrices.has(key)) {
    cachedMatrices.set(key, compute());
    if (cachedMatrices.size > 64) cachedMatrices.delete(cachedMatrices.keys().next().value);
  }
  return cachedMatrices.get(key);
}

/** Return the mean over the heads of a map. */
function meanOfHeads(index) {
  return cachedMatrix(`mean ${index}`, async () => {
    const { scales, integers, rows, columns } = await decodeMap(index);
    const result = new Float64Array(rows * columns), heads = FACTS.maps[index].heads.length;
    for (let row = 0; row < heads * rows; row++) {
      const scale = scales[row] / heads, to = (row % rows) * columns;
      for (let column = 0; column < columns; column++) result[to + column] += integers[row * columns + column] * scale;
    }
    return result;
  });
}

/** Return the indices of a group's maps, by layer. */
function mapsOf(group) {
  return FACTS.maps.flatMap((map, index) => (map.group === group ? [index] : []));
}

/** Return whether all maps of a group have the same axes, so that they can be averaged. */
function isUniform(group) {
  const maps = mapsOf(group).map((index) => FACTS.maps[index]);
  return maps.every((map) => map.queries === maps[0].queries && map.keys === maps[0].keys);
}

/** Return the mean over the layers and heads of a group. */
function meanOfLayers(group) {
  return cachedMatrix(`all ${group}`, async () => {
    let result = null;
    const indices = mapsOf(group);
    for (const index of indices) {
      const mean = await meanOfHeads(index);
      result ??= new Float64Array(mean.length);
      for (let i = 0; i < mean.length; i++) result[i] += mean[i] / indices.length;
    }
    return result;
  });
}

/** Return the attention rollout up to the layer at `place` in its group (Abnar & Zuidema 2020, section 3). */
function rollout(group, place) {
  return cachedMatrix(`rollout ${group} ${place}`, async () => {
    const mean = await meanOfHeads(mapsOf(group)[place]);
    const size = Math.sqrt(mean.length);
    const below = place ? await rollout(group, place - 1) : null;
    await new Promise((resolve) => setTimeout(resolve));  // lets the page react between layers
    const result = new Float64Array(mean.length);
    for (let row = 0; row < size; row++) {
      let sum = 0;
      for (let key = 0; key < size; key++) sum += mean[row * size + key] / 2 + (row === key ? 0.5 : 0);
      for (let key = 0; key < size; key++) {
        const weight = (mean[row * size + key] / 2 + (row === key ? 0.5 : 0)) / sum;
        if (weight === 0) continue;
        if (!below) result[row * size + key] = weight;
        else for (let i = 0; i < size; i++) result[row * size + i] += weight * below[key * size + i];
      }
    }
    return result;
  });
}

/** Return the matrix that a selection names: a head, an average, or a rollout. */
function matrixOf(group, layer, head) {
  if (layer === "mean") return meanOfLayers(group);
  const index = mapsOf(group).find((item) => FACTS.maps[item].layer === Number(layer));
  if (head === "mean") return meanOfHeads(index);
  if (head === "rollout") return rollout(group, mapsOf(group).indexOf(index));
  const place = FACTS.maps[index].heads.indexOf(Number(head));
  return cachedMatrix(`head ${index} ${place}`, () => headMatrix(index, place));
}
