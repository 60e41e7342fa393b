// Colours, elements, labels of tokens, and files of what is seen.

/** Ramps with increasing contrast to the ground, readable with any colour vision: one hue, monotonic lightness. */
const RAMPS = {
  light: [[255, 255, 255], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]],
  dark: [[19, 20, 22], [20, 66, 110], [38, 125, 182], [110, 190, 240], [238, 248, 255]],
};
const INKS = {
  light: { ink: "#1a1a1a", quiet: "#555555", ground: "#ffffff", query: "#0072b2", key: "#b34700", mark: "#d55e00" },
  dark: { ink: "#e8e8e8", quiet: "#b4b8bd", ground: "#131416", query: "#56b4e9", key: "#e69f00", mark: "#e69f00" },
};
const CHARACTER = 7.3;  // pixels per character of the 12-pixel monospaced font
const FONT = 'ui-monospace, "DejaVu Sans Mono", monospace';

const themeName = () => document.documentElement.dataset.theme;
const inks = () => INKS[themeName()];

/** Return the colour of a fraction from 0 to 1 as [red, green, blue]. */
function colour(fraction) {
  const ramp = RAMPS[themeName()], place = Math.min(1, Math.max(0, fraction)) * (ramp.length - 1);
  const low = Math.min(ramp.length - 2, Math.floor(place)), part = place - low;
  return ramp[low].map((value, i) => Math.round(value + (ramp[low + 1][i] - value) * part));
}

const rgb = (values) => `rgb(${values.join(",")})`;

/** Return black or white, whichever has the greater contrast with a colour (WCAG 2, relative luminance). */
function inkOn(values) {
  const [red, green, blue] = values.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

/** Create an HTML element with properties, attributes (names with a dash) and children. Text is never parsed. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else if (name === "style") Object.assign(element.style, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Create an SVG element with attributes, and text or children. */
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Return a token as visible text: control and format characters by their code points, outer spaces as dots. */
function visible(text) {
  if (text === "") return "(empty)";
  return text
    .replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cs}]/gu, (character) => {
      const known = { "\n": "\\n", "\t": "\\t", "\r": "\\r" }[character];
      return known ?? `<${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}>`;
    })
    .replace(/^\s+|\s+$/gu, (spaces) => "·".repeat(spaces.length));
}

const isolated = (text) => `\u2068${text}\u2069`;
const shortened = (text, length) => ([...text].length > length ? [...text].slice(0, length - 1).join("") + "…" : text);
const number = (value) => (value === 0 ? "0" : value < 1e-3 ? value.toExponential(2) : value.toPrecision(4));

/** Return a bound with two digits, rounded up. */
function bound(value) {
  if (value === 0) return "0";
  const unit = 10 ** (Math.floor(Math.log10(value)) - 1), rounded = Math.ceil(value / unit) * unit;
  return rounded < 1e-3 ? rounded.toExponential(1) : String(Number(rounded.toPrecision(2)));
}

/** Return a canvas with a cell per weight; `fraction` maps a row and a column to a colour. */
function heatMap(rows, columns, fraction) {
  const canvas = make("canvas", { width: columns, height: rows });
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const table = Array.from({ length: 256 }, (_, i) => colour(i / 255));
  for (let row = 0, at = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++, at += 4) {
      const [red, green, blue] = table[Math.min(255, Math.max(0, Math.round(255 * fraction(row, column))))];
      image.data[at] = red; image.data[at + 1] = green; image.data[at + 2] = blue; image.data[at + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Return what the stage shows as one SVG: canvases as images, drawings as groups, texts with their grounds. */
function snapshot(stage, title) {
  const box = stage.getBoundingClientRect(), { ink, ground } = inks(), top = 24;
  const width = stage.scrollWidth, height = stage.scrollHeight + top;
  const picture = draw("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
  picture.append(draw("rect", { width, height, fill: ground }));
  picture.append(draw("text", { x: 8, y: 17, fill: ink, "font-family": FONT, "font-size": 13 }, title));
  for (const element of stage.querySelectorAll("canvas, svg, [data-text]")) {
    const { left, top: upper, width: wide, height: high } = element.getBoundingClientRect();
    const x = left - box.left + stage.scrollLeft, y = upper - box.top + stage.scrollTop + top;
    if (element.tagName === "CANVAS") {
      const size = { x, y, width: wide, height: high, preserveAspectRatio: "none", href: element.toDataURL() };
      picture.append(draw("image", { ...size, style: "image-rendering: pixelated" }));
    } else if (element.tagName === "svg") {
      const copy = element.cloneNode(true);
      for (const [name, value] of Object.entries({ x, y, width: wide, height: high })) copy.setAttribute(name, value);
      copy.setAttribute("font-family", FONT);
      copy.setAttribute("font-size", 12);
      picture.append(copy);
    } else {
      const style = getComputedStyle(element);
      if (element.tagName === "BUTTON") {
        const edge = element.getAttribute("aria-pressed") === "true" ? inks().mark : "none";
        const filled = { x, y, width: wide, height: high, fill: style.backgroundColor, stroke: edge, "stroke-width": 2 };
        picture.append(draw("rect", filled));
      }
      const place = { x: x + parseFloat(style.paddingLeft) + parseFloat(style.borderLeftWidth), y: y + high / 2 + 5, fill: style.color };
      const font = { "font-family": style.fontFamily, "font-size": style.fontSize, "font-weight": style.fontWeight };
      picture.append(draw("text", { ...place, ...font }, element.textContent));
    }
  }
  return { text: new XMLSerializer().serializeToString(picture), width, height };
}

/** Offer bytes as a file. */
function save(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/** Draw an SVG at twice its size, or as large as canvases may be, and return a PNG. */
async function rasterised({ text, width, height }) {
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  await image.decode();
  const scale = Math.min(2, 8192 / Math.max(width, height));
  const canvas = make("canvas", { width: Math.ceil(width * scale), height: Math.ceil(height * scale) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
