// @ts-check

/** The first of the largest values; the first that is no number, if there is one. @param {ArrayLike<number>} values */
export function best(values) {
  let found = 0;
  for (let place = 0; place < values.length; place++) {
    if (Number.isNaN(values[place])) return place;
    if (values[place] > values[found]) found = place;
  }
  return found;
}

/** The places of values, largest first. @param {ArrayLike<number>} values */
export const ranked = (values) => Array.from(values, (_, place) => place).sort((one, other) => values[other] - values[one] || one - other);

/** @param {number[]} sizes */
export const product = (sizes) => sizes.reduce((all, size) => all * size, 1);

/** Arrays of the types of tensors. */
const ARRAYS = { float32: Float32Array, int64: BigInt64Array, int32: Int32Array, bool: Uint8Array };

/**
 * Return a tensor of these numbers, or of zeros.
 * @param {typeof import("onnxruntime-web")} ort @param {keyof typeof ARRAYS} dtype @param {number[]} shape
 * @param {ArrayLike<number> | null} values
 */
export function tensor(ort, dtype, shape, values = null) {
  const data = new ARRAYS[dtype](product(shape)), isLong = data instanceof BigInt64Array;
  for (let place = 0; values && place < data.length; place++) data[place] = isLong ? BigInt(values[place]) : values[place];
  return new ort.Tensor(dtype, /** @type {any} */ (data), shape);
}
