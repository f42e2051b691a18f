// A chart as a picture to keep: as PNG or SVG, on the colour of its panel, with the key to its colours and a caption below.

import { fillCell } from "./grammar.js";
import { MARGIN } from "./plot.js";
import { FONT } from "./surface.js";
import { svgOf } from "./svg.js";

/** @typedef {import("./surface.js").Sheet} Sheet */
/** @typedef {import("./grammar.js").Style} Style */
/** @typedef {import("./grammar.js").Theme} Theme */
/**
 * What is drawn, how large in CSS pixels and in which colours; its key, and what stands below, in pieces.
 * @typedef {{draw: (sheet: Sheet) => void, width: number, height: number, theme: Theme, key: Style[], caption: string[]}} Chart
 */
/** A text below the chart, behind a swatch if it has a style. @typedef {{text: string, style: Style | null, x: number, y: number}} Entry */

const LINE = 20;
const SWATCH = { width: 18, height: 12, gap: 6 };
const LEFT = 10;
const GAP = 14;
const RATIO = 2;

/** @param {Chart} chart @returns {string} */
export function stillSvg(chart) {
  const { entries, height } = layout(chart);
  return svgOf((sheet) => drawStill(sheet, chart, entries), chart.width, height, chart.theme, chart.caption.join(", "));
}

/** As an address with the data in it. @param {Chart} chart @returns {string} */
export function stillPng(chart) {
  const { entries, height } = layout(chart);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(chart.width * RATIO), Math.round(height * RATIO)];
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.scale(RATIO, RATIO);
  context.fillStyle = chart.theme.panel;
  context.fillRect(0, 0, chart.width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  drawStill({ context, width: chart.width, height, ratio: RATIO, theme: chart.theme }, chart, entries);
  return canvas.toDataURL("image/png");
}

/** Where each text stands, and how high the picture is. @param {Chart} chart */
function layout({ width, height, key, caption }) {
  const ruler = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  ruler.font = FONT;
  let y = height + LINE / 2;
  /** @type {Entry[]} */
  const entries = [];
  for (const group of [key.map((style) => ({ text: style.label, style })), caption.map((text) => ({ text, style: null }))]) {
    let x = LEFT;
    for (const { text, style } of group) {
      const size = (style === null ? 0 : SWATCH.width + SWATCH.gap) + ruler.measureText(text).width;
      if (x > LEFT && x + size > width - MARGIN.right) [x, y] = [LEFT, y + LINE];
      entries.push({ text, style, x, y });
      x += size + GAP;
    }
    y += LINE;
  }
  return { entries, height: y - LINE / 4 };
}

/** @param {Sheet} sheet @param {Chart} chart @param {Entry[]} entries */
function drawStill(sheet, chart, entries) {
  const { context, theme, ratio } = sheet;
  chart.draw({ ...sheet, height: chart.height });
  context.textAlign = "left";
  for (const { text, style, x, y } of entries) {
    if (style !== null) fillCell(context, style, theme, ratio, x, y - SWATCH.height / 2, SWATCH.width, SWATCH.height);
    context.fillStyle = style === null ? theme.muted : theme.ink;
    context.fillText(text, style === null ? x : x + SWATCH.width + SWATCH.gap, y);
  }
}
