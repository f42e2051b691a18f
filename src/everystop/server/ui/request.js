// The page of one request: what the server says of where its time went, drawn; asked again while it is not over.

import { KINDS, causeStyle } from "./grammar.js";
import { counted, duration } from "./format.js";
import { MARGIN } from "./plot.js";
import { Span } from "./span.js";
import { Surface } from "./surface.js";
import { Tip } from "./tip.js";
import { drawMates, drawTokens, drawWaterfall, waterfallHeight } from "./life.js";
import { lifeWords } from "./life-words.js";
import { pilot } from "./pilot.js";
import { showAdvice, showBlame, showFacts, showLate, showMates, showSegments, showSentence } from "./verdicts.js";
import { Beside } from "./beside.js";
import { WhatIf } from "./what-if.js";
import { inquire, slowest } from "./inquire.js";
import { byId, canvasOf, keyOf, setText } from "./dom.js";
import { chooseTheme } from "./theme.js";

/** @typedef {import("./life.js").Explanation} Explanation */

const HINT = "Point at a chart to read it.";
const ZOOM = 1.5;

const name = nameIn(location.pathname.replace(/^.*\/ui\/r\//, ""));
const span = new Span();
const tip = new Tip(byId("tip"));
const beside = new Beside();
const whatIf = new WhatIf(name, estimated);
/** What the server said last. @type {Explanation | null} */
let answer = null;
/** The choice of it that is drawn. @type {Explanation | null} */
let shown = null;

/** The name in an address; one that was never encoded is taken as it is. @param {string} part */
function nameIn(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** @param {string} id @param {(sheet: import("./surface.js").Sheet, span: Span, explanation: Explanation) => void} draw */
function chart(id, draw) {
  return new Surface(canvasOf(id), (sheet) => {
    if (shown !== null) draw(sheet, span, shown);
  });
}

const charts = [chart("waterfall", drawWaterfall), chart("mates", drawMates), chart("tokens", drawTokens)];

/** Show an explanation, or the choice of it that is selected. @param {Explanation} explanation */
function show(explanation) {
  answer = explanation;
  showChoices(explanation);
  const choice = /** @type {HTMLSelectElement} */ (byId("choice")).value;
  shown = explanation.choices?.[Number(choice)] ?? explanation;
  setText(byId("state"), shown.state);
  for (const part of [showSentence, showFacts, showBlame, showLate, showMates]) part(shown);
  whatIf.offer(explanation);
  showAdvice(shown, whatIf);
  byId("life-panel").hidden = shown.segments.length === 0;
  canvasOf("waterfall").style.height = `${waterfallHeight(shown.causes)}px`;
  const thinned = shown.steps_thinned ? ", thinned evenly" : "";
  setText(byId("mates-title"), `Batch-mates: tokens of each step it was in, square-root scale${thinned}`);
  span.setTotal(shown.e2e_ns);
  for (const surface of charts) surface.invalidate();
  beside.showOwn(shown);
  describe(shown);
}

/** One entry for each sequence of a request that has several; the slowest is shown first. @param {Explanation} explanation */
function showChoices({ choices = [] }) {
  const select = /** @type {HTMLSelectElement} */ (byId("choice"));
  byId("choice-label").hidden = choices.length < 2;
  if (choices.length < 2 || select.options.length === choices.length) return;
  select.replaceChildren(...choices.map((choice, i) => new Option(`${i}: ${duration(choice.e2e_ns)}`, `${i}`)));
  select.value = `${slowest(choices)}`;
}

/** What the charts show, for those who do not see them. @param {Explanation} e */
function describe(e) {
  const causes = e.causes.map(({ label, ns }) => `${label} ${duration(ns)}`).join(", ");
  const late = e.tokens.filter((token) => token.is_outlier).length;
  const words = [
    `Waterfall over ${duration(e.e2e_ns)}: ${causes}.`,
    `Batch-mates in ${counted(e.steps.length, "step")}.`,
    `${counted(e.tokens.length, "token")}, ${late} of them late.`,
  ];
  for (const [i, { canvas }] of charts.entries()) canvas.setAttribute("aria-label", words[i]);
  if (!byId("life-table").hidden) showSegments(byId("life-table"), e);
}

/** There are estimates, which belong beside the advice as well. */
function estimated() {
  if (shown !== null) showAdvice(shown, whatIf);
}

/** The cursor has moved, or the zoom has changed. */
function spanChanged() {
  for (const surface of charts) surface.invalidate();
  const words = shown === null || span.cursor_ns === null ? [] : lifeWords(shown, span.cursor_ns);
  setText(byId("readout"), words.join("; ") || HINT);
  const width = charts[0].canvas.clientWidth - MARGIN.left - MARGIN.right;
  const x = span.cursor_ns === null ? 0 : span.axis(MARGIN.left, width).x(span.cursor_ns);
  tip.show(words, span.cursor_ns === null ? null : { x, y: charts[0].canvas.clientHeight });
}

/** How the asking goes. @param {string} text @param {string} state */
function say(text, state) {
  const status = byId("connection");
  setText(status, text);
  status.className = `connection ${state}`;
}

/** There is nothing to show. @param {import("./api.js").ServerError} error */
function refuse(error) {
  say(error.status === 404 ? "unknown" : "refused", "bad");
  setText(byId("state"), "unknown");
  setText(byId("sentence"), error.message);
}

/** When it first got a place, by the end of its first wait. */
function boarding() {
  const segments = shown?.segments ?? [];
  const first = segments.find(({ cause }) => cause !== "receive" && !cause.startsWith("queue"));
  return first?.start_ns ?? 0;
}

function toggleTable() {
  const table = byId("life-table");
  table.hidden = !table.hidden;
  byId("life-chart").hidden = !table.hidden;
  byId("life-as-table").setAttribute("aria-pressed", String(!table.hidden));
  if (shown !== null && !table.hidden) showSegments(table, shown);
}

function start() {
  chooseTheme(/** @type {HTMLSelectElement} */ (byId("theme")));
  document.title = `Everystop: ${name}`;
  setText(byId("name"), name);
  setText(byId("readout"), HINT);
  byId("life-legend").append(
    keyOf(KINDS.prefill, "its own prompt"),
    keyOf(KINDS.decode, "its own token"),
    keyOf(KINDS.skipped, "tokens of batch-mates"),
    keyOf(causeStyle("others_prefill"), "prompts of batch-mates"),
    keyOf(KINDS.slow, "late token, with a marker"),
  );
  span.listeners.push(spanChanged);
  for (const { canvas } of charts) pilot(canvas, span, () => (shown?.tokens ?? []).map(({ at_ns }) => at_ns));
  byId("zoom-in").addEventListener("click", () => span.zoom(1 / ZOOM));
  byId("zoom-out").addEventListener("click", () => span.zoom(ZOOM));
  byId("whole").addEventListener("click", () => span.showWhole());
  byId("on-board").addEventListener("click", () => span.show(boarding(), span.total_ns));
  byId("life-as-table").addEventListener("click", toggleTable);
  byId("choice").addEventListener("change", () => answer !== null && show(answer));
  inquire(name, { show, say, refuse });
}

start();
