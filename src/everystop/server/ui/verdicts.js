// What an explanation says in words and tables: facts, the blame bar that sums to the whole, late tokens, advice.

import { causeStyle, paint } from "./grammar.js";
import { count, counted, duration, percent } from "./format.js";
import { besideLink, byId, fillTable, keyOf, linked, make, requestLink, setText } from "./dom.js";

/** @typedef {import("./life.js").Explanation} Explanation */

const MAX_LATE = 100;
const MAX_MATES = 30;
const SIBLING = "its sibling"; // what a choice of the same request is called: it has no page of its own
const ROOM = 0.06;

/** @param {string} id @returns {HTMLTableElement} */
function tableIn(id) {
  return /** @type {HTMLTableElement} */ (byId(id));
}

/** @param {Explanation} e */
export function showFacts(e) {
  const cached = e.num_cached_tokens > 0 ? ` (${count(e.num_cached_tokens)} cached)` : "";
  const facts = [
    ["end to end", duration(e.e2e_ns)],
    ["to first token", duration(e.ttft_ns)],
    ["queued", duration(e.queue_ns)],
    ["prompt tokens", count(e.num_prompt_tokens) + cached],
    ["output tokens", count(e.num_output_tokens)],
    ["finish", e.finish_reason ?? "–"],
  ];
  if (e.num_preemptions > 0) facts.push([`preempted; ${counted(e.num_recomputed_tokens, "token")} again`, counted(e.num_preemptions, "time")]);
  byId("facts").replaceChildren(
    ...facts.map(([term, value]) => make("div", "", [make("dt", "", [term]), make("dd", "", [value])])),
  );
}

/** What is said of the request as a whole. @param {Explanation} e */
export function showSentence(e) {
  const sentence = byId("sentence");
  if (sentence.textContent !== e.sentence) sentence.replaceChildren(...linked(e.sentence, e.id));
}

/** A text of a table, with links. @param {string | null} text */
function cell(text) {
  return make("span", "", linked(text ?? "", ""));
}

/** The bar, and its parts as a table that ends with the sum. @param {Explanation} e */
export function showBlame(e) {
  byId("blame-panel").hidden = e.causes.length === 0;
  const bar = byId("blame");
  bar.replaceChildren(...e.causes.map(blamePart));
  bar.setAttribute("aria-label", e.causes.map(({ label, share }) => `${label} ${percent(share)}`).join(", "));
  const rows = e.causes.map(({ cause, label, ns, share, is_modelled }) => [
    keyOf(causeStyle(cause), label),
    duration(ns),
    percent(share),
    count(ns),
    is_modelled ? "modelled share" : "",
  ]);
  const sum = e.causes.reduce((so_far, { ns }) => so_far + ns, 0);
  rows.push([make("strong", "", ["sum = end to end"]), duration(sum), percent(sum / Math.max(e.e2e_ns, 1)), count(sum), ""]);
  fillTable(tableIn("causes"), "Where its time went", ["cause", "time", "share", "nanoseconds", ""], rows, [1, 2, 3]);
}

/** @param {import("./life.js").Cause} cause @returns {HTMLElement} */
function blamePart({ cause, label, ns, share }) {
  const part = make("span", "", share > ROOM ? [make("b", "", [percent(share)])] : []);
  paint(part, causeStyle(cause));
  part.style.flex = `${ns} 0 0px`;
  part.title = `${label}: ${duration(ns)}`;
  return part;
}

/** Tokens that came late, the longest gap first. @param {Explanation} e */
export function showLate({ tokens }) {
  const late = tokens.map((token, i) => ({ ...token, number: i + 1 })).filter((token) => token.is_outlier);
  byId("late-panel").hidden = late.length === 0;
  const note = late.length > MAX_LATE ? `, the longest ${MAX_LATE} are listed` : "";
  setText(byId("late-note"), `${late.length} of ${counted(tokens.length, "token")} came after more than twice the median gap${note}`);
  const rows = late
    .sort((one, other) => (other.gap_ns ?? 0) - (one.gap_ns ?? 0))
    .slice(0, MAX_LATE)
    .map(({ number, at_ns, gap_ns, step_id, why }) => [`${number}`, duration(at_ns), duration(gap_ns), `${step_id}`, cell(why)]);
  fillTable(tableIn("late"), "Late tokens, the longest gap first", ["token", "at", "gap", "step", "why"], rows);
}

/** Who was in the same steps, those with the most prompt tokens first: they may have stretched them. @param {Explanation} e */
export function showMates({ steps }) {
  /** @type {Map<string, {steps: number, prompt: number}>} */
  const mates = new Map();
  for (const { id, num_tokens } of steps.flatMap((step) => step.mates)) {
    if (id === null) continue;
    const mate = mates.get(id) ?? { steps: 0, prompt: 0 };
    mates.set(id, { steps: mate.steps + 1, prompt: mate.prompt + (num_tokens > 1 ? num_tokens : 0) });
  }
  byId("mates-panel").hidden = mates.size === 0;
  const rows = [...mates]
    .sort(([, one], [, other]) => other.prompt - one.prompt || other.steps - one.steps)
    .slice(0, MAX_MATES)
    .map(([id, mate]) => [
      id === SIBLING ? id : requestLink(id, id),
      count(mate.steps),
      count(mate.prompt),
      id === SIBLING ? "" : besideLink(id),
    ]);
  const columns = ["request", "steps shared", "prompt tokens in them", ""];
  fillTable(tableIn("mates-list"), "Who shared its steps", columns, rows, [1, 2]);
}

/** What might help, each with what the estimates of the request, if there are any, say of it. @param {Explanation} e @param {import("./what-if.js").WhatIf} whatIf */
export function showAdvice({ advice = [] }, whatIf) {
  byId("advice-panel").hidden = advice.length === 0;
  byId("advice").replaceChildren(
    ...advice.map(({ flag, text }) => {
      const predicted = whatIf.predicted(flag);
      const words = predicted === null ? [] : [make("span", "estimate muted", [`Estimate: ${predicted}`])];
      return make("li", "", [make("code", "", [flag]), ` ${text}`, ...words]);
    }),
  );
}

/** The life as a table. @param {HTMLElement} box @param {Explanation} e */
export function showSegments(box, { segments, causes }) {
  const labels = new Map(causes.map(({ cause, label }) => [cause, label]));
  const rows = segments.map(({ start_ns, end_ns, cause, num_steps, detail }) => [
    keyOf(causeStyle(cause), labels.get(cause) ?? cause),
    duration(start_ns),
    duration(end_ns - start_ns),
    count(num_steps),
    cell(detail),
  ]);
  const table = /** @type {HTMLTableElement} */ (box.firstElementChild);
  fillTable(table, "Its life in segments", ["cause", "from", "for", "steps", "detail"], rows, [1, 2, 3]);
}
