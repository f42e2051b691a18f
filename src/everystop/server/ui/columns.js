// Step composition: what each step computed, stacked against the budget, and below how long it took.

import { KINDS, fillCell } from "./grammar.js";
import { tick, ticks } from "./format.js";
import { MARGIN, axisOf, clipped, drawAxis, drawCursor, rule } from "./plot.js";

/** @typedef {import("./surface.js").Sheet} Sheet */
/** @typedef {import("./view.js").View} View */
/** @typedef {import("./view.js").Axis} Axis */
/** @typedef {import("./timeline.js").Step} Step */

const TOP = 8;
const GAP = 16;
const TOKENS_SHARE = 0.62;

/** One column: the steps under it, of which it shows the largest and the longest.
 * @typedef {{left: number, right: number, step: Step, longest_ns: number}} Column
 */

/** Tokens of a step. @param {Step} step */
function tokensOf(step) {
  return step.num_decode + step.num_prefill + step.num_padded;
}

/** Draw the chart; its token axis has a square-root scale, so that a few decodes show beside a large budget.
 * @param {Sheet} sheet @param {View} view @param {number} budget tokens a step may compute
 */
export function drawColumns(sheet, view, budget) {
  const axis = axisOf(sheet, view);
  const columns = columnsOf(axis);
  const bottom = sheet.height - MARGIN.bottom;
  const split = TOP + (bottom - TOP - GAP) * TOKENS_SHARE;
  const most = columns.reduce((so_far, { step }) => Math.max(so_far, tokensOf(step)), budget);
  /** @param {number} tokens */
  const y = (tokens) => split - (split - TOP) * Math.sqrt(tokens / Math.max(most, 1));
  for (const tokens of [0, most / 16, most / 4]) rule(sheet, y(Math.round(tokens)), `${Math.round(tokens)}`);
  clipped(sheet, TOP - 4, split - TOP + 4, () => {
    for (const column of columns) drawColumn(sheet, column, y);
  });
  rule(sheet, y(budget), `${budget}`, { dash: [6, 4], color: sheet.theme.ink });
  drawDurations(sheet, columns, split + GAP, bottom);
  clipped(sheet, 0, bottom, () => drawCursor(sheet, view, axis));
  drawAxis(sheet, axis);
}

/** Steps as columns of at least two pixels. @param {Axis} axis @returns {Column[]} */
function columnsOf(axis) {
  /** @type {Column[]} */
  const columns = [];
  for (let position = axis.first; position <= axis.last; position += 1) {
    const step = axis.timeline.at(position);
    if (step === undefined) continue;
    const [left, right] = axis.ofStep(position, step);
    const took_ns = step.end_ns - step.begin_ns;
    const last = columns[columns.length - 1];
    if (last !== undefined && right - last.left < 2.5) {
      last.right = right;
      last.longest_ns = Math.max(last.longest_ns, took_ns);
      if (tokensOf(step) > tokensOf(last.step)) last.step = step;
    } else columns.push({ left, right, step, longest_ns: took_ns });
  }
  return columns;
}

/** @param {Sheet} sheet @param {Column} column @param {(tokens: number) => number} y */
function drawColumn({ context, theme, ratio }, { left, right, step }, y) {
  let below = 0;
  /** @type {[import("./grammar.js").Kind, number][]} */
  const parts = [["decode", step.num_decode], ["prefill", step.num_prefill], ["waste", step.num_padded]];
  const width = Math.max(right - left - (right - left > 4 ? 1 : 0), 1);
  for (const [kind, tokens] of parts) {
    if (tokens === 0) continue;
    const top = y(below + tokens);
    fillCell(context, KINDS[kind], theme, ratio, left, top, width, y(below) - top);
    below += tokens;
  }
}

/** @param {Sheet} sheet @param {Column[]} columns @param {number} top @param {number} bottom */
function drawDurations(sheet, columns, top, bottom) {
  const { context, theme } = sheet;
  const longest = columns.reduce((so_far, column) => Math.max(so_far, column.longest_ns), 1e6);
  /** @param {number} ns */
  const y = (ns) => bottom - (bottom - top) * (ns / (longest * 1.05));
  for (const ns of ticks(0, longest, 2)) rule(sheet, y(ns), ns === 0 ? "0" : tick(ns));
  clipped(sheet, top - 4, bottom - top + 4, () => {
    context.strokeStyle = theme.ink;
    context.lineWidth = 1.5;
    context.beginPath();
    let previous = -Infinity;
    for (const { left, right, longest_ns } of columns) {
      if (left - previous > 3) context.moveTo(left, bottom);
      context.lineTo(left, y(longest_ns));
      context.lineTo(right, y(longest_ns));
      previous = right;
    }
    context.stroke();
  });
}
