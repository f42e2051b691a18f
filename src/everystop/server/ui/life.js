// The charts of one request's life: waterfall, batch-mates, tokens; all on one axis.

import { KINDS, causeStyle, fillCell } from "./grammar.js";
import { count, percent, tick, ticks } from "./format.js";
import { MARGIN, clipped, drawAxis, rule } from "./plot.js";

/** @typedef {import("./surface.js").Sheet} Sheet */
/** @typedef {import("./span.js").Span} Span */
/** @typedef {ReturnType<Span["axis"]>} SpanAxis */
/** @typedef {{cause: string, label: string, ns: number, share: number, is_modelled: boolean}} Cause */
/** @typedef {{start_ns: number, end_ns: number, cause: string, num_steps: number, detail: string | null}} Segment */
/**
 * @typedef {{step_id: number, start_ns: number, end_ns: number, own_ns: number, others_ns: number, host_ns: number,
 *   num_rows: number, num_tokens: number, own_tokens: number, mates: {id: string | null, num_tokens: number}[]}} Part
 */
/** @typedef {{at_ns: number, gap_ns: number | null, step_id: number, is_outlier: boolean, why: string | null}} Token */
/**
 * @typedef {{id: string, state: string, is_live: boolean, sentence: string, received_ns: number, e2e_ns: number,
 *   ttft_ns: number | null, queue_ns: number, num_prompt_tokens: number, num_cached_tokens: number,
 *   num_output_tokens: number, num_preemptions: number, num_recomputed_tokens: number, finish_reason: string | null,
 *   causes: Cause[], segments: Segment[], steps: Part[], steps_thinned?: unknown, tokens: Token[],
 *   choices?: Explanation[], advice?: {cause: string, flag: string, text: string}[],
 *   why_no_what_if?: string | null}} Explanation
 */

export const LANE = 22;
const TOP = 6;

/** @param {Sheet} sheet @param {Span} span @returns {SpanAxis} */
export function axisOf(sheet, span) {
  return span.axis(MARGIN.left, Math.max(sheet.width - MARGIN.left - MARGIN.right, 10));
}

/** @param {Sheet} sheet @param {SpanAxis} axis @param {number | null} cursor_ns @param {number} bottom */
export function drawCursor({ context, theme }, axis, cursor_ns, bottom) {
  if (cursor_ns === null) return;
  context.fillStyle = theme.ink;
  context.fillRect(Math.round(axis.x(cursor_ns)), 0, 1, bottom);
}

/** How high the waterfall is. @param {Cause[]} causes @returns {number} */
export function waterfallHeight(causes) {
  return TOP + Math.max(causes.length, 1) * LANE + MARGIN.bottom;
}

/** A lane for each cause, in their order; every segment in its own. @param {Sheet} sheet @param {Span} span @param {Explanation} explanation */
export function drawWaterfall(sheet, span, { causes, segments }) {
  const axis = axisOf(sheet, span);
  const lanes = new Map(causes.map(({ cause }, lane) => [cause, lane]));
  const bottom = sheet.height - MARGIN.bottom;
  for (const [lane, { share }] of causes.entries()) {
    rule(sheet, TOP + (lane + 1) * LANE, "");
    sheet.context.fillText(percent(share), MARGIN.left - 6, TOP + (lane + 0.5) * LANE);
  }
  clipped(sheet, 0, bottom, () => {
    for (const { start_ns, end_ns, cause } of segments) {
      const lane = lanes.get(cause);
      if (lane === undefined) continue;
      const [left, right] = [Math.max(axis.x(start_ns), -50), Math.min(axis.x(end_ns), sheet.width + 50)];
      if (right < axis.left || left > axis.left + axis.width) continue;
      const isQueue = cause.startsWith("queue");
      const inset = isQueue ? LANE * 0.3 : 3;
      fillCell(sheet.context, causeStyle(cause), sheet.theme, sheet.ratio, left, TOP + lane * LANE + inset, Math.max(right - left, 1.5), LANE - 2 * inset);
    }
    drawLaneNames(sheet, axis, causes, segments);
    drawCursor(sheet, axis, span.cursor_ns, bottom);
  });
  drawAxis(sheet, axis);
}

/** The words of a lane, in its longest stretch without a segment that has room for them.
 * @param {Sheet} sheet @param {SpanAxis} axis @param {Cause[]} causes @param {Segment[]} segments
 */
function drawLaneNames({ context, theme }, axis, causes, segments) {
  context.textAlign = "left";
  context.fillStyle = theme.ink;
  for (const [lane, { cause, label }] of causes.entries()) {
    const own = segments.filter((segment) => segment.cause === cause);
    const width = context.measureText(label).width + 12;
    const room = freeRoom(own, axis, width);
    const y = TOP + (lane + 0.5) * LANE;
    if (room !== null) {
      context.fillText(label, room + 6, y);
      continue;
    }
    context.globalAlpha = 0.88;
    context.fillStyle = theme.panel;
    context.fillRect(axis.left + 4, y - 8, width, 16);
    context.globalAlpha = 1;
    context.fillStyle = theme.ink;
    context.fillText(label, axis.left + 10, y);
  }
}

/** Left end of the first gap between segments that is wide enough, null if there is none.
 * @param {Segment[]} segments @param {SpanAxis} axis @param {number} width @returns {number | null}
 */
function freeRoom(segments, axis, width) {
  let from = axis.left;
  for (const { start_ns, end_ns } of segments) {
    if (Math.min(axis.x(start_ns), axis.left + axis.width) - from >= width) return from;
    from = Math.max(from, axis.x(end_ns));
  }
  return axis.left + axis.width - from >= width ? from : null;
}

/** Steps as columns: below its own tokens, above those of others; prompts of others hatched. @param {Sheet} sheet @param {Span} span @param {Explanation} explanation */
export function drawMates(sheet, span, { steps }) {
  const axis = axisOf(sheet, span);
  const bottom = sheet.height - MARGIN.bottom;
  const most = steps.reduce((so_far, step) => Math.max(so_far, step.num_tokens), 4);
  /** @param {number} tokens */
  const y = (tokens) => bottom - (bottom - TOP) * Math.sqrt(tokens / most);
  for (const tokens of [0, most / 16, most / 4, most]) rule(sheet, y(Math.round(tokens)), count(Math.round(tokens)));
  clipped(sheet, 0, bottom, () => {
    for (const step of steps) drawMate(sheet, axis, step, y);
    drawCursor(sheet, axis, span.cursor_ns, bottom);
  });
  drawAxis(sheet, axis);
}

/** @param {Sheet} sheet @param {SpanAxis} axis @param {Part} step @param {(tokens: number) => number} y */
function drawMate({ context, theme, ratio }, axis, step, y) {
  const [left, right] = [axis.x(step.start_ns), axis.x(step.end_ns)];
  if (right < axis.left || left > axis.left + axis.width) return;
  const width = Math.max(right - left - (right - left > 4 ? 1 : 0), 1);
  const prompts = step.mates.reduce((sum, mate) => sum + (mate.num_tokens > 1 ? mate.num_tokens : 0), 0);
  const parts = [
    { what: step.own_tokens > 1 ? KINDS.prefill : KINDS.decode, tokens: step.own_tokens },
    { what: KINDS.skipped, tokens: Math.max(step.num_tokens - step.own_tokens - prompts, 0) },
    { what: causeStyle("others_prefill"), tokens: prompts },
  ];
  let below = 0;
  for (const { what, tokens } of parts) {
    if (tokens === 0) continue;
    const top = y(below + tokens);
    fillCell(context, what, theme, ratio, left, top, width, y(below) - top);
    below += tokens;
  }
}

/** A tick for each token, as high as the gap before it. @param {Sheet} sheet @param {Span} span @param {Explanation} explanation */
export function drawTokens(sheet, span, { tokens }) {
  const { context, theme, ratio } = sheet;
  const axis = axisOf(sheet, span);
  const bottom = sheet.height - MARGIN.bottom;
  const longest = tokens.reduce((so_far, token) => Math.max(so_far, token.gap_ns ?? 0), 1e6);
  /** @param {number} ns */
  const y = (ns) => bottom - (bottom - TOP - 12) * (ns / longest);
  for (const ns of ticks(0, longest, 2)) rule(sheet, y(ns), ns === 0 ? "0" : tick(ns));
  clipped(sheet, 0, bottom, () => {
    for (const { at_ns, gap_ns, is_outlier } of tokens) {
      const x = axis.x(at_ns);
      if (x < axis.left - 3 || x > axis.left + axis.width + 3) continue;
      const top = y(gap_ns ?? longest / 8);
      const what = gap_ns === null ? KINDS.prefill : is_outlier ? KINDS.slow : KINDS.decode;
      fillCell(context, what, theme, ratio, x - 1.5, top, 3, bottom - top);
      if (is_outlier) marker(context, theme, Math.min(Math.max(x, axis.left + 4), axis.left + axis.width - 4), top - 6);
    }
    drawCursor(sheet, axis, span.cursor_ns, bottom);
  });
  drawAxis(sheet, axis);
}

/** @param {CanvasRenderingContext2D} context @param {import("./grammar.js").Theme} theme @param {number} x @param {number} y */
function marker(context, theme, x, y) {
  context.fillStyle = theme.ink;
  context.beginPath();
  context.moveTo(x - 4, y - 4);
  context.lineTo(x + 4, y - 4);
  context.lineTo(x, y + 3);
  context.fill();
}
