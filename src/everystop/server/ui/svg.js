// A chart as SVG: what it asks of a canvas is written down as elements. It can as much of a canvas as the charts use.

import { FONT } from "./surface.js";

/** @typedef {import("./surface.js").Sheet} Sheet */
/** @typedef {import("./grammar.js").Theme} Theme */

const ANCHORS = { left: "start", start: "start", center: "middle", right: "end", end: "end" };
const TILE = 8;

/** Draw in SVG. @param {(sheet: Sheet) => void} draw @param {number} width in CSS pixels @param {number} height
 * @param {Theme} theme @param {string} title @returns {string}
 */
export function svgOf(draw, width, height, theme, title) {
  const pen = new SvgPen();
  draw({ context: /** @type {any} */ (pen), width, height, ratio: 1, theme });
  const size = `width="${width}" height="${height}" viewBox="0 0 ${width} ${height}"`;
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" ${size} role="img" font-family="system-ui, sans-serif" font-size="12">`,
    `<title>${escaped(title)}</title>`,
    `<defs>${pen.definitions.join("")}</defs>`,
    `<rect width="${width}" height="${height}" fill="${theme.panel}"/>`,
    ...pen.elements,
    "</svg>\n",
  ].join("\n");
}

/** How a pen draws, as a canvas has it. */
class Manner {
  fillStyle = "#000000";
  strokeStyle = "#000000";
  lineWidth = 1;
  globalAlpha = 1;
  /** @type {CanvasTextAlign} */
  textAlign = "start";
  /** @type {CanvasLineJoin} */
  lineJoin = "miter";
  /** @type {number[]} */
  dash = [];
}

/** Owns the elements. Texts stand on their middle line. */
class SvgPen extends Manner {
  constructor() {
    super();
    /** @type {string[]} */
    this.definitions = [];
    /** @type {string[]} */
    this.elements = [];
    /** What `restore` returns to. @type {Manner[]} */
    this.kept = [];
    /** The name of each texture that was asked for. @type {Map<string, string>} */
    this.textures = new Map();
    this.path = "";
    this.ruler = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
    this.ruler.font = FONT;
  }

  save() {
    this.kept.push(this.#manner());
    this.elements.push("<g>");
  }

  restore() {
    Object.assign(this, this.kept.pop());
    this.elements.push("</g>");
  }

  /** What is drawn up to `restore` stays within the path. */
  clip() {
    const id = `clip${this.definitions.length}`;
    this.definitions.push(`<clipPath id="${id}"><path d="${this.path}"/></clipPath>`);
    this.elements[this.elements.lastIndexOf("<g>")] = `<g clip-path="url(#${id})">`;
  }

  /** A fill of tiles of 8 by 8, each drawn by `draw`. @param {string} key says which @param {string} fill
   * @param {(pen: any) => void} draw @returns {string}
   */
  texture(key, fill, draw) {
    const known = this.textures.get(key);
    if (known !== undefined) return known;
    const id = `texture${this.textures.size}`;
    const tile = new SvgPen();
    draw(tile);
    const ground = `<rect width="${TILE}" height="${TILE}" fill="${fill}"/>`;
    const size = `width="${TILE}" height="${TILE}" patternUnits="userSpaceOnUse"`;
    this.definitions.push(`<pattern id="${id}" ${size}>${ground}${tile.elements.join("")}</pattern>`);
    this.textures.set(key, `url(#${id})`);
    return `url(#${id})`;
  }

  /** @param {number[]} dash */
  setLineDash(dash) {
    this.dash = dash;
  }

  beginPath() {
    this.path = "";
  }

  /** @param {number} x @param {number} y */
  moveTo(x, y) {
    this.path += `M${short(x)} ${short(y)}`;
  }

  /** @param {number} x @param {number} y */
  lineTo(x, y) {
    this.path += `L${short(x)} ${short(y)}`;
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  rect(x, y, width, height) {
    this.path += `M${short(x)} ${short(y)}h${short(width)}v${short(height)}h${short(-width)}z`;
  }

  /** A whole circle; charts draw no other arcs. @param {number} x @param {number} y @param {number} radius */
  arc(x, y, radius) {
    const half = `a${short(radius)} ${short(radius)} 0 1 0`;
    this.path += `M${short(x - radius)} ${short(y)}${half} ${short(2 * radius)} 0${half} ${short(-2 * radius)} 0z`;
  }

  fill() {
    this.#put(`<path d="${this.path}" ${this.#filled()}/>`);
  }

  stroke() {
    if (this.path !== "") this.#put(`<path d="${this.path}" fill="none" ${this.#stroked()}/>`);
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  fillRect(x, y, width, height) {
    this.#put(`<rect ${box(x, y, width, height)} ${this.#filled()}/>`);
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} height */
  strokeRect(x, y, width, height) {
    this.#put(`<rect ${box(x, y, width, height)} fill="none" ${this.#stroked()}/>`);
  }

  /** @param {string} text */
  measureText(text) {
    return this.ruler.measureText(text);
  }

  /** @param {string} text @param {number} x @param {number} y */
  fillText(text, x, y) {
    this.#text(text, x, y, this.#filled());
  }

  /** @param {string} text @param {number} x @param {number} y */
  strokeText(text, x, y) {
    this.#text(text, x, y, `fill="none" ${this.#stroked()}`);
  }

  /** @param {string} text @param {number} x @param {number} y @param {string} look */
  #text(text, x, y, look) {
    const anchor = `text-anchor="${ANCHORS[this.textAlign]}" dominant-baseline="central"`;
    this.#put(`<text x="${short(x)}" y="${short(y)}" ${anchor} ${look}>${escaped(text)}</text>`);
  }

  #filled() {
    return `fill="${this.fillStyle}"`;
  }

  #stroked() {
    const dash = this.dash.length > 0 ? ` stroke-dasharray="${this.dash.join(" ")}"` : "";
    return `stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}" stroke-linejoin="${this.lineJoin}"${dash}`;
  }

  /** @param {string} element */
  #put(element) {
    const { globalAlpha: alpha } = this;
    this.elements.push(alpha === 1 ? element : `<g opacity="${alpha}">${element}</g>`);
  }

  /** @returns {Manner} */
  #manner() {
    const { fillStyle, strokeStyle, lineWidth, globalAlpha, textAlign, lineJoin, dash } = this;
    return { fillStyle, strokeStyle, lineWidth, globalAlpha, textAlign, lineJoin, dash };
  }
}

/** @param {number} x @param {number} y @param {number} width @param {number} height */
function box(x, y, width, height) {
  return `x="${short(x)}" y="${short(y)}" width="${short(width)}" height="${short(height)}"`;
}

/** A length to a hundredth of a pixel. @param {number} value */
function short(value) {
  return Math.round(value * 100) / 100;
}

/** @param {string} text */
function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}
