// Images to the pixels that a model reads: Pillow's resizing, in its fixed-point arithmetic.
// @ts-check
/** @import { Manifest } from "./types.js" */
import { refuse } from "./errors.js";

/** Filters of Pillow: the half width of each, and its value at a distance. @type {Record<string, [number, (x: number) => number]>} */
const FILTERS = {
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, (x) => (x === 0 ? 1 : Math.abs(x) < 1 ? Math.sin(Math.PI * x) / (Math.PI * x) * (0.54 + 0.46 * Math.cos(Math.PI * x)) : 0)],
  bicubic: [2, (x) => cubic(Math.abs(x), -0.5)],
  lanczos: [3, (x) => (Math.abs(x) < 3 ? sinc(x) * sinc(x / 3) : 0)],
};
/** A PNG with one transparent pixel of the colour 200, 100, 50. */
const PROBE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGM4kWLEAAAEtQFfoI2A0AAAAABJRU5ErkJggg==";
/** Bits of a fixed-point weight after the point. */
const BITS = 22;

const sinc = (/** @type {number} */ x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
const cubic = (/** @type {number} */ x, /** @type {number} */ a) =>
  x < 1 ? ((a + 2) * x - (a + 3)) * x * x + 1 : x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;

/**
 * Return the normalised pixels, (channels, height, width).
 * @param {Blob | ImageData} image @param {NonNullable<Manifest["image"]>} settings
 */
export async function pixels(image, { width, height, channels, resample, crop, keepsRatio, roundsToEven, whitens, mean, std }) {
  const source = image instanceof ImageData ? image : await decode(image, whitens);
  const bytes = planes(source, channels);
  let size = [Math.floor(width / crop + 1e-6), Math.floor(height / crop + 1e-6)];
  if (keepsRatio) size = source.width <= source.height ? [size[0], Math.max(size[1], Math.floor(size[0] * source.height / source.width))]
    : [Math.max(size[0], Math.floor(size[1] * source.width / source.height)), size[1]];
  const margin = (/** @type {number} */ surplus) => Math.floor(surplus / 2) + (roundsToEven && surplus % 4 === 3 ? 1 : 0);
  const left = margin(size[0] - width), top = margin(size[1] - height);
  const values = new Float32Array(channels * height * width);
  bytes.forEach((plane, channel) => {
    const resized = resize(plane, source.width, source.height, size[0], size[1], resample);
    for (let row = 0; row < height; row++) for (let column = 0; column < width; column++) {
      const byte = resized[(row + top) * size[0] + column + left];
      const unit = Math.fround(byte * Math.fround(1 / 255));
      values[(channel * height + row) * width + column] = Math.fround(unit - mean[channel]) / std[channel];
    }
  });
  return values;
}

/**
 * Return the pixels of a file, transparent ones in their stored colours.
 * @param {Blob} file @param {boolean} whitens whether a colour that a PNG declares transparent becomes white
 */
async function decode(file, whitens) {
  const bitmap = await open(file), { width, height } = bitmap;
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  if (!context) refuse("The browser cannot draw images.");
  context.drawImage(bitmap, 0, 0);
  const image = context.getImageData(0, 0, width, height);
  if (image.data.every((byte, place) => place % 4 !== 3 || byte === 255)) return image;
  const head = new Uint8Array(await file.slice(0, 26).arrayBuffer()), isPng = head[1] === 0x50 && head[2] === 0x4e;
  if (whitens && isPng && head[25] !== 4 && head[25] !== 6) refuse("Pages do not make a transparent colour white: save the image without transparency.");
  const isGif = (await file.slice(0, 3).text()) === "GIF"; // browsers forget the colours of its transparent pixels
  const probe = isGif ? null : stored(await open(new Blob([Uint8Array.from(atob(PROBE), (byte) => byte.charCodeAt(0))])));
  if (probe?.join() !== "200,100,50,0") refuse("The browser loses the colours of transparent pixels: save the image without transparency" + (isGif ? ", or as PNG." : "."));
  return { data: stored(bitmap) ?? refuse("The browser cannot read so large an image with transparency: make it smaller."), width, height };
}

/** @param {Blob} file */
function open(file) {
  return createImageBitmap(file, { premultiplyAlpha: "none", colorSpaceConversion: "none" }).catch(() => {
    refuse("The browser cannot read this file as an image: give a PNG, JPEG, WebP, GIF, BMP or AVIF.");
  });
}

/** Return the pixels as they are stored, which a 2D canvas multiplies by their opacity; null if they cannot be read. @param {ImageBitmap} bitmap */
function stored(bitmap) {
  const gl = new OffscreenCanvas(1, 1).getContext("webgl2"), data = new Uint8Array(4 * bitmap.width * bitmap.height);
  if (!gl) return null;
  const texture = gl.createTexture();
  gl.bindTexture(gl.TEXTURE_2D, texture);
  gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA, gl.RGBA, gl.UNSIGNED_BYTE, bitmap);
  gl.bindFramebuffer(gl.FRAMEBUFFER, gl.createFramebuffer());
  gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0, gl.TEXTURE_2D, texture, 0);
  gl.readPixels(0, 0, bitmap.width, bitmap.height, gl.RGBA, gl.UNSIGNED_BYTE, data);
  const failed = gl.getError();
  gl.getExtension("WEBGL_lose_context")?.loseContext();
  return failed ? null : data;
}

/** Return a plane of bytes for each channel; grey is Pillow's. @param {Pick<ImageData, "width" | "height"> & { data: Uint8Array | Uint8ClampedArray }} image @param {number} channels */
function planes({ data, width, height }, channels) {
  const result = Array.from({ length: channels }, () => new Uint8Array(width * height));
  for (let place = 0; place < width * height; place++) {
    const [red, green, blue] = data.subarray(4 * place, 4 * place + 3);
    if (channels === 1) result[0][place] = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16;
    else result.forEach((plane, channel) => { plane[place] = data[4 * place + channel]; });
  }
  return result;
}

/**
 * Resize a plane along rows and along columns, each rounded to bytes, in the order of Pillow 13.
 * @param {Uint8Array} plane @param {number} width @param {number} height @param {number} toWidth @param {number} toHeight
 * @param {string} name of the filter
 */
export function resize(plane, width, height, toWidth, toHeight, name) {
  const across = (/** @type {Uint8Array} */ from, /** @type {number} */ lines) =>
    width === toWidth ? from : convolve(from, lines, width, toWidth, 1, width, 1, toWidth, name);
  const down = (/** @type {Uint8Array} */ from, /** @type {number} */ columns) =>
    height === toHeight ? from : convolve(from, columns, height, toHeight, columns, 1, columns, 1, name);
  const isDownFirst = height - toHeight > Math.max(0, 2 * (width - toWidth));
  return isDownFirst ? across(down(plane, width), toHeight) : down(across(plane, height), toWidth);
}

/**
 * Resample lines of `from` bytes to `to` bytes. Strides are those along a line, and between lines.
 * @param {Uint8Array} plane @param {number} lines @param {number} from @param {number} to
 * @param {number} step @param {number} jump @param {number} toStep @param {number} toJump @param {string} name
 */
function convolve(plane, lines, from, to, step, jump, toStep, toJump, name) {
  const [half, filter] = FILTERS[name] ?? [0, () => 0], scale = from / to, stretch = Math.max(scale, 1), support = half * stretch;
  const result = new Uint8Array(lines * to);
  for (let place = 0; place < to; place++) {
    const centre = (place + 0.5) * scale;
    if (name === "nearest") {
      for (let line = 0; line < lines; line++) result[line * toJump + place * toStep] = plane[line * jump + Math.floor(centre) * step];
      continue;
    }
    const first = Math.max(0, Math.floor(centre - support + 0.5)), last = Math.min(from, Math.floor(centre + support + 0.5));
    const weights = Array.from({ length: last - first }, (_, x) => filter((x + first - centre + 0.5) / stretch));
    const sum = weights.reduce((total, weight) => total + weight, 0);
    const fixed = weights.map((weight) => Math.trunc(weight / sum * 2 ** BITS + (weight < 0 ? -0.5 : 0.5)));
    for (let line = 0; line < lines; line++) {
      let total = 2 ** (BITS - 1);
      for (let x = 0; x < fixed.length; x++) total += plane[line * jump + (first + x) * step] * fixed[x];
      result[line * toJump + place * toStep] = Math.max(0, Math.min(255, Math.floor(total / 2 ** BITS)));
    }
  }
  return result;
}
