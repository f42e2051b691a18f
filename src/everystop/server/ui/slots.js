// The slot chart: a row for each slot of the batch, and in it what the slot did, step by step. It knows a timeline and
// a view, and asks by functions for what it should say about a request.

import { KINDS, ending, fillCell } from "./grammar.js";
import { MARGIN, axisOf, clipped, drawAxis, drawCursor } from "./plot.js";

/** @typedef {import("./surface.js").Sheet} Sheet */
/** @typedef {import("./view.js").View} View */
/** @typedef {import("./view.js").Axis} Axis */
/** @typedef {import("./timeline.js").Run} Run */
/** @typedef {import("./timeline.js").Stay} Stay */
/**
 * What the chart asks about requests: a short label ("" for none), tokens that came from the prefix cache, and how and
 * when it ended.
 * @typedef {{label: (request: number) => string, numCached: (request: number) => number,
 *   end: (request: number) => {ns: number, reason: string | null} | null}} Teller
 */

const TOP = 4;
const MAX_ROW = 30;
const MIN_ROW = 3;
const BEST_HEIGHT = 260;
/** As wide as this, waste has a word, with room for the name of the request before it. */
const WASTE_WORD_FROM = 140;

/**
 * How high a chart of so many slots wants to be, in CSS pixels.
 * @param {number} numSlots @returns {number}
 */
export function slotChartHeight(numSlots) {
  const row = Math.min(MAX_ROW, Math.max(MIN_ROW, Math.floor(BEST_HEIGHT / Math.max(numSlots, 1))));
  return TOP + row * numSlots + MARGIN.bottom;
}

/** @param {number} height @param {number} numSlots @returns {number} */
function rowHeight(height, numSlots) {
  return (height - TOP - MARGIN.bottom) / Math.max(numSlots, 1);
}

/** The slot at a height, null outside. @param {number} y @param {number} height @param {number} numSlots */
export function slotAt(y, height, numSlots) {
  const slot = Math.floor((y - TOP) / rowHeight(height, numSlots));
  return slot >= 0 && slot < numSlots ? slot : null;
}

/** Draw the chart. @param {Sheet} sheet @param {View} view @param {Teller} teller */
export function drawSlots(sheet, view, teller) {
  const axis = axisOf(sheet, view);
  const { numShown: numSlots } = view.timeline;
  const row = rowHeight(sheet.height, numSlots);
  drawRows(sheet, numSlots, row);
  clipped(sheet, 0, sheet.height - MARGIN.bottom, () => {
    for (let slot = 0; slot < numSlots; slot += 1) {
      const y = TOP + slot * row;
      for (const run of view.timeline.runsBetween(slot, axis.first, axis.last)) drawRun(sheet, view, axis, run, y, row);
      for (const stay of view.timeline.staysBetween(slot, axis.first, axis.last)) {
        drawStay(sheet, view, axis, stay, teller, y, row);
      }
    }
    drawCursor(sheet, view, axis);
    drawSlotCursor(sheet, view, axis, row);
  });
  drawAxis(sheet, axis);
}

/** @param {Sheet} sheet @param {number} numSlots @param {number} row */
function drawRows({ context, width, theme }, numSlots, row) {
  const every = [1, 2, 4, 8, 16, 32, 64].find((step) => step * row >= 15) ?? 128;
  context.textAlign = "right";
  context.fillStyle = theme.muted;
  context.strokeStyle = theme.rule;
  context.lineWidth = 1;
  context.beginPath();
  for (let slot = 0; slot <= numSlots; slot += 1) {
    const y = Math.round(TOP + slot * row) + 0.5;
    if (slot % every === 0 || slot === numSlots) {
      context.moveTo(MARGIN.left, y);
      context.lineTo(width - MARGIN.right, y);
    }
    if (slot % every === 0 && slot < numSlots) context.fillText(`slot ${slot}`, MARGIN.left - 6, TOP + slot * row + Math.max(row, 12) / 2);
  }
  context.stroke();
}

/** @param {Sheet} sheet @param {View} view @param {Axis} axis @param {Run} run @param {number} y @param {number} row */
function drawRun(sheet, view, axis, run, y, row) {
  const { context, theme, ratio } = sheet;
  const [left, right] = visible(axis, axis.ofRun(run));
  const inset = row >= 12 ? 2 : row >= 6 ? 1 : 0;
  const height = row - 2 * inset;
  const isFaded = view.pinned !== null && view.pinned !== run.request;
  context.globalAlpha = isFaded ? 0.28 : 1;
  fillCell(context, KINDS[run.kind], theme, ratio, left, y + inset, Math.max(right - left, 1), height);
  if (run.kind === "waste") drawWaste(context, axis, run, y + row / 2, row);
  else if (run.kind !== "skipped") drawTicks(sheet, axis, run, y + inset, height);
  context.globalAlpha = 1;
}

/** Keep coordinates near the plot, so that patterns and outlines stay cheap. @param {Axis} axis @param {[number, number]} ends */
function visible(axis, [left, right]) {
  return [Math.max(left, axis.left - 20), Math.min(right, axis.left + axis.width + 20)];
}

/** What kind of waste it is, in the middle of what is in sight of it.
 * @param {CanvasRenderingContext2D} context @param {Axis} axis @param {Run} run @param {number} middle @param {number} row
 */
function drawWaste(context, axis, run, middle, row) {
  const [begin, end] = axis.ofRun(run);
  const [left, right] = [Math.max(begin, axis.left), Math.min(end, axis.left + axis.width)];
  const word = run.tokens > 0 ? "padding" : "held";
  if (row >= 14 && right - left > WASTE_WORD_FROM) outlined(context, word, (left + right) / 2, middle, "center");
}

/** A tick where each step begins, once there is room: the chunks of a prompt, the tokens of an answer.
 * @param {Sheet} sheet @param {Axis} axis @param {Run} run @param {number} y @param {number} height
 */
function drawTicks({ context }, axis, run, y, height) {
  const first = Math.max(run.first + 1, axis.first);
  const last = Math.min(run.last, axis.last);
  if (last < first || height < 6) return;
  const [left, right] = axis.ofRun(run);
  if ((right - left) / (run.last - run.first + 1) < 5) return;
  context.strokeStyle = run.kind === "decode" || run.kind === "recompute" ? "#FFFFFF90" : "#333333";
  context.lineWidth = 1;
  context.beginPath();
  for (let position = first; position <= last; position += 1) {
    const step = axis.timeline.at(position);
    if (step === undefined) continue;
    const x = Math.round(axis.ofStep(position, step)[0]) + 0.5;
    context.moveTo(x, y + height * (run.kind === "prefill" ? 0 : 0.55));
    context.lineTo(x, y + height);
  }
  context.stroke();
}

/** The label of a request over its bar, dots where it began in the prefix cache, and the mark of its end. A slot may be
 * held beyond that; the label stands where there is more room.
 * @param {Sheet} sheet @param {View} view @param {Axis} axis @param {Stay} stay @param {Teller} teller
 * @param {number} y @param {number} row
 */
function drawStay({ context, theme }, view, axis, stay, teller, y, row) {
  const [left, right] = axis.ofRun(stay);
  const shownLeft = Math.max(left, axis.left);
  const shownRight = Math.min(right, axis.left + axis.width);
  context.globalAlpha = view.pinned !== null && view.pinned !== stay.request ? 0.28 : 1;
  const middle = y + row / 2;
  if (row >= 9 && teller.numCached(stay.request) > 0 && right - left > 14) drawCached(context, left, middle, row);
  const end = teller.end(stay.request);
  const endX = end === null ? right : Math.min(axis.ofTime(end.ns), right);
  const hasEnded = end !== null && end.ns <= stay.end_ns + 1 && row >= 12 && right - left > 16;
  if (hasEnded && end !== null) outlined(context, ending(end.reason)[0], endX - 9, middle, "center");
  const label = row >= 14 ? teller.label(stay.request) : "";
  const isBefore = endX - shownLeft >= shownRight - endX;
  const from = isBefore ? shownLeft : Math.max(endX, shownLeft);
  const room = (isBefore ? Math.min(endX, shownRight) : shownRight) - from - (hasEnded ? 22 : 8);
  if (label !== "" && room > context.measureText(label).width + 6) outlined(context, label, from + 6, middle, "left");
  if (view.pinned === stay.request) {
    context.strokeStyle = theme.ink;
    context.lineWidth = 2;
    context.strokeRect(left, y + 1, right - left, row - 2);
  }
  context.globalAlpha = 1;
}

/** @param {CanvasRenderingContext2D} context @param {number} left @param {number} middle @param {number} row */
function drawCached(context, left, middle, row) {
  context.fillStyle = "#FFFFFF";
  context.strokeStyle = "#333333";
  context.lineWidth = 1;
  for (const dy of [-row / 5, 0, row / 5]) {
    context.beginPath();
    context.arc(left + 3, middle + dy, 1.4, 0, 7);
    context.fill();
    context.stroke();
  }
}

/** White words with a dark rim: readable on every fill.
 * @param {CanvasRenderingContext2D} context @param {string} text @param {number} x @param {number} y
 * @param {CanvasTextAlign} align
 */
function outlined(context, text, x, y, align) {
  context.textAlign = align;
  context.lineJoin = "round";
  context.lineWidth = 3;
  context.strokeStyle = "#1A1D21CC";
  context.strokeText(text, x, y);
  context.fillStyle = "#FFFFFF";
  context.fillText(text, x, y);
}

/** @param {Sheet} sheet @param {View} view @param {Axis} axis @param {number} row */
function drawSlotCursor({ context, theme }, view, axis, row) {
  const { cursor } = view;
  const step = cursor === null ? undefined : view.timeline.at(cursor.position);
  if (cursor === null || cursor.slot === null || step === undefined) return;
  const [left, right] = axis.ofStep(cursor.position, step);
  context.strokeStyle = theme.ink;
  context.lineWidth = 2;
  context.strokeRect(left - 1, TOP + cursor.slot * row, Math.max(right - left, 2) + 2, row);
}
