// What the charts of a request's life say about one moment, for the tip and for those who do not see charts.

import { count, counted, duration } from "./format.js";
import { firstAbove } from "./timeline.js";

/** @typedef {import("./life.js").Explanation} Explanation */

const MAX_MATES = 4;

/** @param {{id: string | null, num_tokens: number}[]} mates @returns {string} */
function matesWords(mates) {
  const largest = [...mates].sort((one, other) => other.num_tokens - one.num_tokens);
  const named = largest.slice(0, MAX_MATES).map(({ id, num_tokens }) => `${shortId(id)} (${count(num_tokens)})`);
  const others = mates.length - named.length;
  return `with ${named.join(", ")}${others > 0 ? ` and ${others} more` : ""}`;
}

/** The end of a long id is what tells it from others. @param {string | null} id @returns {string} */
export function shortId(id) {
  if (id === null) return "another request";
  return id.length > 16 ? `…${id.slice(-8)}` : id;
}

/** Lines about a moment: its segment, its step, the token that came next. @param {Explanation} e @param {number} ns @returns {string[]} */
export function lifeWords(e, ns) {
  const lines = [`${duration(ns)} after it was received`];
  const segment = e.segments[Math.min(firstAbove(e.segments, ns, (one) => one.end_ns), e.segments.length - 1)];
  if (segment !== undefined) {
    const label = e.causes.find(({ cause }) => cause === segment.cause)?.label ?? segment.cause;
    lines.push(`${label}, ${duration(segment.end_ns - segment.start_ns)}${segment.detail ? `: ${segment.detail}` : ""}`);
  }
  const step = e.steps[firstAbove(e.steps, ns, (one) => one.end_ns - 1)];
  if (step !== undefined && step.start_ns <= ns) lines.push(...stepWords(step));
  const token = e.tokens.findIndex(({ at_ns }) => at_ns >= ns);
  if (token >= 0) lines.push(tokenWords(e, token));
  return lines;
}

/** @param {import("./life.js").Part} step @returns {string[]} */
function stepWords(step) {
  const others = step.others_ns > 0 ? `, of which ${duration(step.others_ns)} for prompts of others` : "";
  const own = `step ${count(step.step_id)}: ${duration(step.end_ns - step.start_ns)}${others}; ${counted(step.num_tokens, "token")}, its own ${count(step.own_tokens)}`;
  return step.mates.length > 0 ? [own, matesWords(step.mates)] : [own, "alone in the step"];
}

/** @param {Explanation} e @param {number} index @returns {string} */
function tokenWords({ tokens }, index) {
  const { gap_ns, at_ns, why } = tokens[index];
  const gap = gap_ns === null ? `the first, at ${duration(at_ns)}` : `a gap of ${duration(gap_ns)}`;
  return `next token ${index + 1}: ${gap}${why === null ? "" : `; ${why}`}`;
}
