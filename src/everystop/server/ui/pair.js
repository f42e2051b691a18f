// Two requests' lives on one time axis, one below the other: the picture, and what it says about a moment.

import { causeStyle, fillCell } from "./grammar.js";
import { duration, percent } from "./format.js";
import { firstAbove } from "./timeline.js";
import { axisOf, drawCursor } from "./life.js";
import { MARGIN, clipped, drawAxis } from "./plot.js";

/** @typedef {import("./surface.js").Sheet} Sheet */
/** @typedef {import("./span.js").Span} Span */
/** @typedef {import("./life.js").SpanAxis} SpanAxis */
/** @typedef {import("./life.js").Explanation} Explanation */
/** One of the two, and where on the axis its life begins. @typedef {{told: Explanation, from_ns: number}} Side */
/** @typedef {{cause: string, start_ns: number, end_ns: number, words: string}} Stretch */

const TOP = 6;
const BAR = 26;
const LIFE = 14;
const GAP = 4;
const BETWEEN = 16;
const EACH = BAR + GAP + LIFE + BETWEEN;
const ROOM_FOR_WORDS = 46;

export const PAIR_HEIGHT = TOP + 2 * EACH - BETWEEN + 6 + MARGIN.bottom;

/**
 * Both with their beginnings at 0, or `byClock`, the earlier one's at 0.
 * @param {Explanation} first @param {Explanation} second @param {boolean} byClock @returns {Side[]}
 */
export function sidesOf(first, second, byClock) {
  const begin_ns = byClock ? Math.min(first.received_ns, second.received_ns) : 0;
  return [first, second].map((told) => ({ told, from_ns: byClock ? told.received_ns - begin_ns : 0 }));
}

/** Where the later one ends. @param {Side[]} sides @returns {number} */
export function endOf(sides) {
  return Math.max(...sides.map(({ told, from_ns }) => from_ns + told.e2e_ns));
}

/** Causes as long as they took, one after the other. @param {Side} side @returns {Stretch[]} */
function sums({ told, from_ns }) {
  let end_ns = from_ns;
  return told.causes.map(({ cause, ns, share }) => {
    const start_ns = end_ns;
    end_ns += ns;
    return { cause, start_ns, end_ns, words: percent(share) };
  });
}

/** What happened, when it happened. @param {Side} side @returns {Stretch[]} */
function course({ told, from_ns }) {
  return told.segments.map(({ cause, start_ns, end_ns }) => ({
    cause,
    start_ns: from_ns + start_ns,
    end_ns: from_ns + end_ns,
    words: "",
  }));
}

/** Where something begins or ends in either life, in order. @param {Side[]} sides @returns {number[]} */
export function changes(sides) {
  const times = sides.flatMap((side) => course(side).flatMap(({ start_ns, end_ns }) => [start_ns, end_ns]));
  return [...new Set(times)].sort((one, other) => one - other);
}

/** For each the sums of its causes, and below them its course. @param {Sheet} sheet @param {Span} span @param {Side[]} sides */
export function drawPair(sheet, span, sides) {
  const { context, theme } = sheet;
  const axis = axisOf(sheet, span);
  const bottom = sheet.height - MARGIN.bottom;
  context.fillStyle = theme.muted;
  context.textAlign = "right";
  for (const i of sides.keys()) {
    const top = TOP + i * EACH;
    context.fillText(`${i + 1}: sums`, MARGIN.left - 6, top + BAR / 2);
    context.fillText("course", MARGIN.left - 6, top + BAR + GAP + LIFE / 2);
  }
  clipped(sheet, 0, bottom, () => {
    for (const [i, side] of sides.entries()) {
      const top = TOP + i * EACH;
      drawStretches(sheet, axis, sums(side), top, BAR);
      drawStretches(sheet, axis, course(side), top + BAR + GAP, LIFE);
    }
    drawCursor(sheet, axis, span.cursor_ns, bottom);
  });
  drawAxis(sheet, axis);
}

/** @param {Sheet} sheet @param {SpanAxis} axis @param {Stretch[]} stretches @param {number} top @param {number} height */
function drawStretches(sheet, axis, stretches, top, height) {
  const { context, theme, ratio } = sheet;
  for (const { cause, start_ns, end_ns, words } of stretches) {
    const left = Math.max(axis.x(start_ns), axis.left - 50);
    const right = Math.min(axis.x(end_ns), axis.left + axis.width + 50);
    if (right < axis.left || left > axis.left + axis.width) continue;
    fillCell(context, causeStyle(cause), theme, ratio, left, top, Math.max(right - left, 1), height);
    if (words !== "") drawWords(sheet, words, Math.max(left, axis.left), Math.min(right, axis.left + axis.width), top + height / 2);
  }
}

/** Words in the middle of a stretch that has room for them. @param {Sheet} sheet @param {string} words
 * @param {number} left @param {number} right @param {number} y
 */
function drawWords({ context, theme }, words, left, right, y) {
  if (right - left < ROOM_FOR_WORDS) return;
  const half = context.measureText(words).width / 2 + 5;
  const middle = (left + right) / 2;
  context.fillStyle = theme.panel;
  context.fillRect(middle - half, y - 9, 2 * half, 18);
  context.fillStyle = theme.ink;
  context.textAlign = "center";
  context.fillText(words, middle, y);
}

/** What each was at, at a moment of the axis. @param {Side[]} sides @param {number} ns @param {boolean} byClock @returns {string[]} */
export function pairWords(sides, ns, byClock) {
  const since = byClock ? "the first of them was received" : "each was received";
  return [`${duration(ns)} after ${since}`, ...sides.map((side, i) => `${i + 1}: ${causeAt(side, ns)}`)];
}

/** @param {Side} side @param {number} ns @returns {string} */
function causeAt({ told, from_ns }, ns) {
  const at_ns = ns - from_ns;
  if (at_ns < 0) return "not there yet";
  if (at_ns > told.e2e_ns) return told.is_live ? "not known yet" : "over";
  const { segments, causes } = told;
  const segment = segments[Math.min(firstAbove(segments, at_ns, (one) => one.end_ns), segments.length - 1)];
  if (segment === undefined) return "not known";
  const label = causes.find(({ cause }) => cause === segment.cause)?.label ?? segment.cause;
  return `${label}, ${duration(segment.end_ns - segment.start_ns)}${segment.detail ? `: ${segment.detail}` : ""}`;
}
