// Latency strips: small charts on the time axis of the slot chart, and the sparklines of the tiles.

import { count, tick, ticks } from "./format.js";
import { firstAbove } from "./timeline.js";
import { MARGIN, axisOf, clipped, drawAxis, drawCursor, rule } from "./plot.js";

/** @typedef {import("./surface.js").Sheet} Sheet */
/** @typedef {import("./view.js").View} View */
/** @typedef {import("./view.js").Axis} Axis */
/** A value from one moment on. @typedef {{ns: number, value: number}} Point */
/**
 * A chart of one or two lines, of dots, or of how often which gap between tokens came up.
 * @typedef {{kind: "lines" | "dots" | "heat", lines: {name: string, isDashed?: boolean, points: Point[]}[]}} Strip
 */

const TOP = 8;
const DECADES = [0.0001, 0.001, 0.01, 0.1, 1, 10, 100, 1000].map((seconds) => seconds * 1e9);
const BINS_PER_DECADE = 5;

/** Draw a strip. @param {Sheet} sheet @param {View} view @param {Strip} strip @param {boolean} hasAxis */
export function drawStrip(sheet, view, strip, hasAxis) {
  const axis = axisOf(sheet, view);
  const bottom = sheet.height - (hasAxis ? MARGIN.bottom : 4);
  if (strip.kind === "lines") drawLines(sheet, axis, strip, bottom);
  else drawLogarithmic(sheet, axis, strip, bottom);
  clipped(sheet, 0, bottom, () => drawCursor(sheet, view, axis));
  if (hasAxis) drawAxis(sheet, axis);
}

/** Points in sight, and the one before. @param {Axis} axis @param {Point[]} points */
function inSight(axis, points) {
  const [from, to] = axis.times;
  const first = Math.max(firstAbove(points, from, ({ ns }) => ns) - 1, 0);
  const last = firstAbove(points, to, ({ ns }) => ns);
  return points.slice(first, last).map(({ ns, value }) => ({ x: axis.ofTime(ns), value }));
}

/** @param {Sheet} sheet @param {Axis} axis @param {Strip} strip @param {number} bottom */
function drawLines(sheet, axis, strip, bottom) {
  const { context, theme } = sheet;
  const lines = strip.lines.map(({ points }) => inSight(axis, points));
  const most = Math.max(1, ...lines.flat().map(({ value }) => value));
  /** @param {number} value */
  const y = (value) => bottom - (bottom - TOP) * (value / (most * 1.08));
  for (const value of ticks(0, most, 2)) rule(sheet, y(value), count(value));
  clipped(sheet, 0, bottom + 1, () => {
    for (const [i, points] of lines.entries()) {
      const { isDashed = false } = strip.lines[i];
      context.strokeStyle = isDashed ? theme.ink : theme.link;
      context.lineWidth = 2;
      context.setLineDash(isDashed ? [5, 3] : []);
      stepLine(context, points, y, axis.left + axis.width);
      context.setLineDash([]);
    }
  });
}

/** @param {CanvasRenderingContext2D} context @param {{x: number, value: number}[]} points @param {(value: number) => number} y @param {number} right */
function stepLine(context, points, y, right) {
  if (points.length === 0) return;
  let before = points[0].value;
  context.beginPath();
  for (const { x, value } of points) {
    context.lineTo(x, y(before));
    context.lineTo(x, y(value));
    before = value;
  }
  context.lineTo(Math.min(right, points[points.length - 1].x + 4), y(before));
  context.stroke();
}

/** @param {Sheet} sheet @param {Axis} axis @param {Strip} strip @param {number} bottom */
function drawLogarithmic(sheet, axis, strip, bottom) {
  const points = inSight(axis, strip.lines[0].points).filter(({ x, value }) => x >= axis.left && value > 0);
  const [low, high] = decadesOf(points.map(({ value }) => value));
  /** @param {number} ns */
  const y = (ns) => bottom - (bottom - TOP) * (Math.log10(ns / low) / Math.log10(high / low));
  for (const ns of DECADES) if (ns >= low && ns <= high) rule(sheet, y(ns), tick(ns));
  clipped(sheet, TOP - 4, bottom - TOP + 4, () => {
    if (strip.kind === "dots") drawDots(sheet, points, y);
    else drawHeat(sheet, points, low, y);
  });
}

/** The decades around all values. @param {number[]} values @returns {[number, number]} */
function decadesOf(values) {
  let low = Infinity;
  let high = 0;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (high === 0) return [1e6, 1e9];
  const from = 10 ** Math.floor(Math.log10(low));
  return [from, Math.max(10 ** Math.ceil(Math.log10(high)), from * 10)];
}

/** @param {Sheet} sheet @param {{x: number, value: number}[]} points @param {(ns: number) => number} y */
function drawDots({ context, theme }, points, y) {
  context.fillStyle = theme.link;
  context.strokeStyle = theme.panel;
  context.lineWidth = 1;
  for (const { x, value } of points) {
    context.beginPath();
    context.arc(x, y(value), 4, 0, 7);
    context.fill();
    context.stroke();
  }
}

/** How many gaps fell into each cell of time and length; the more, the stronger. @param {Sheet} sheet
 * @param {{x: number, value: number}[]} points @param {number} low @param {(ns: number) => number} y
 */
function drawHeat({ context, theme }, points, low, y) {
  const size = 4;
  /** @type {Map<number, number>} */
  const cells = new Map();
  for (const { x, value } of points) {
    const bin = Math.floor(Math.log10(value / low) * BINS_PER_DECADE);
    const cell = Math.floor(x / size) * 100 + bin;
    cells.set(cell, (cells.get(cell) ?? 0) + 1);
  }
  const most = Math.max(1, ...cells.values());
  context.fillStyle = theme.link;
  for (const [cell, number] of cells) {
    const [column, bin] = [Math.floor(cell / 100), cell % 100];
    const top = y(low * 10 ** ((bin + 1) / BINS_PER_DECADE));
    const height = y(low * 10 ** (bin / BINS_PER_DECADE)) - top;
    context.globalAlpha = 0.35 + 0.65 * (number / most);
    context.fillRect(column * size, top, size, height - 0.5);
  }
  context.globalAlpha = 1;
}

/** The last minute of one number, without axes. @param {Sheet} sheet @param {number[]} values */
export function drawSpark({ context, width, height, theme }, values) {
  const known = values.filter(Number.isFinite);
  const most = Math.max(...known, 1e-9);
  const step = width / 59;
  const left = width - (values.length - 1) * step;
  context.strokeStyle = theme.link;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  let isDrawing = false;
  for (const [i, value] of values.entries()) {
    if (!Number.isFinite(value)) {
      isDrawing = false;
      continue;
    }
    const [x, y] = [left + i * step, height - 1.5 - (height - 3) * (value / most)];
    if (isDrawing) context.lineTo(x, y);
    else context.moveTo(x, y);
    isDrawing = true;
  }
  context.stroke();
}
