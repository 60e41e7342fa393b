"use strict";
// The weights of the page: decoding and averages. A matrix is a Float64Array of rows * columns.

const FACTS = JSON.parse(document.getElementById("facts").textContent);
const decodedBlocks = new Map();
const cachedMatrices = new Map();

/** Read base64 text into bytes. */
function bytesOf(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** Return {scales, integers, rows, columns} of a block with the axes of a map, decompressed on first use. */
function decodeBlock(block, map) {
  if (!decodedBlocks.has(block)) decodedBlocks.set(block, decompress(block, map));
  return decodedBlocks.get(block);
}

/** Return the bytes of a block of numbers, decompressed on first use. */
function cachedBlock(block) {
  if (!decodedBlocks.has(block)) decodedBlocks.set(block, inflated(block));
  return decodedBlocks.get(block);
}

function inflated(block) {
  const packed = bytesOf(document.getElementById(`block-${block}`).textContent);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function decompress(block, map) {
  const rows = FACTS.axes[map.queries].labels.length, columns = FACTS.axes[map.keys].labels.length;
  const buffer = await inflated(block);
  const count = buffer.byteLength / (columns + 4);  // a scale of 4 bytes, and an integer per column
  return { scales: new Float32Array(buffer, 0, count), integers: new Uint8Array(buffer, 4 * count), rows, columns };
}

/** Return the matrix at `place` of a block. */
async function blockMatrix(block, map, place) {
  const { scales, integers, rows, columns } = await decodeBlock(block, map);
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
    const { scales, integers, rows, columns } = await decodeBlock(index, FACTS.maps[index]);
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

/** Return the matrix that a selection names: a head, an average, or a rollout. */
function matrixOf(group, layer, head) {
  if (layer === "mean") return meanOfLayers(group);
  const index = mapsOf(group).find((item) => FACTS.maps[item].layer === Number(layer));
  if (head === "mean") return meanOfHeads(index);
  const isRollout = head === "rollout";
  const block = isRollout ? FACTS.groups[group].rollout.block : index;
  const place = isRollout ? mapsOf(group).indexOf(index) : FACTS.maps[index].heads.indexOf(Number(head));
  return cachedMatrix(`block ${block} ${place}`, () => blockMatrix(block, FACTS.maps[index], place));
}
