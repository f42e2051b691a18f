// The panel that puts a second request beside the page's own; which one is kept in the address, as `beside`.

import { causeStyle } from "./grammar.js";
import { count, counted, duration, percent } from "./format.js";
import { Span } from "./span.js";
import { Surface } from "./surface.js";
import { Tip } from "./tip.js";
import { MARGIN } from "./plot.js";
import { pilot } from "./pilot.js";
import { inquire, slowest } from "./inquire.js";
import { quantile } from "./gaps.js";
import { shortId } from "./life-words.js";
import { PAIR_HEIGHT, changes, drawPair, endOf, pairWords, sidesOf } from "./pair.js";
import { byId, canvasOf, fillTable, keyOf, make, requestLink, setText } from "./dom.js";

/** @typedef {import("./life.js").Explanation} Explanation */
/** @typedef {{name: string, value: (e: Explanation) => number | null, text: (value: number | null) => string}} Figure */

const PARAMETER = "beside";
const HINT = "Point at the chart to read it.";
const ASK = "The id of another answer, or the x-request-id that was sent with it.";

/** @param {Explanation} e @param {number} share @returns {number | null} */
function gap({ tokens }, share) {
  const gaps = tokens.flatMap(({ gap_ns }) => (gap_ns === null ? [] : [gap_ns]));
  return gaps.length > 0 ? quantile(gaps, share) : null;
}

/** @type {Figure[]} */
const FIGURES = [
  { name: "to first token", value: (e) => e.ttft_ns, text: duration },
  { name: "queued", value: (e) => e.queue_ns, text: duration },
  { name: "gap between tokens, median", value: (e) => gap(e, 0.5), text: duration },
  { name: "gap between tokens, p99", value: (e) => gap(e, 0.99), text: duration },
  { name: "longest gap", value: (e) => gap(e, 1), text: duration },
  { name: "prompt tokens", value: (e) => e.num_prompt_tokens, text: count },
  { name: "of them cached", value: (e) => e.num_cached_tokens, text: count },
  { name: "output tokens", value: (e) => e.num_output_tokens, text: count },
  { name: "preemptions", value: (e) => e.num_preemptions, text: count },
];

/** The second less the first, with its sign. @param {number | null} first @param {number | null} second
 * @param {(value: number | null) => string} text @returns {string}
 */
function difference(first, second, text) {
  if (first === null || second === null) return "–";
  const by = second - first;
  return by === 0 ? "the same" : `${by > 0 ? "+" : "−"}${text(Math.abs(by))}`;
}

/** Rows of the table: the causes of both with their sum, then figures. @param {Explanation} first @param {Explanation} second */
function rowsOf(first, second) {
  const labels = new Map([...first.causes, ...second.causes].map(({ cause, label }) => [cause, label]));
  const causes = [...labels].map(([cause, label]) => {
    const [one, other] = [first, second].map((e) => e.causes.find((each) => each.cause === cause));
    /** @param {import("./life.js").Cause | undefined} found */
    const text = (found) => (found === undefined ? "–" : `${duration(found.ns)} (${percent(found.share)})`);
    return [keyOf(causeStyle(cause), label), text(one), text(other), difference(one?.ns ?? 0, other?.ns ?? 0, duration)];
  });
  /** @type {Figure} */
  const whole = { name: "sum = end to end", value: (e) => e.causes.reduce((sum, { ns }) => sum + ns, 0), text: duration };
  const figures = [whole, ...FIGURES].map(({ name, value, text }) => {
    const [one, other] = [value(first), value(second)];
    return [name === whole.name ? make("strong", "", [name]) : name, text(one), text(other), difference(one, other, text)];
  });
  return [...causes, ...figures];
}

/** Owns the panel; it is there as soon as the page's own request is known. */
export class Beside {
  constructor() {
    this.span = new Span();
    this.isByClock = false;
    /** @type {Explanation | null} */
    this.own = null;
    /** @type {Explanation | null} */
    this.other = null;
    /** @type {AbortController | null} */
    this.asking = null;
    this.tip = new Tip(byId("beside-tip"));
    this.field = /** @type {HTMLInputElement} */ (byId("beside-id"));
    this.surface = new Surface(canvasOf("beside"), (sheet) => {
      if (this.other !== null) drawPair(sheet, this.span, this.sides);
    });
    this.surface.canvas.style.height = `${PAIR_HEIGHT}px`;
    this.#wire();
  }

  /** @returns {import("./pair.js").Side[]} */
  get sides() {
    return this.own === null || this.other === null ? [] : sidesOf(this.own, this.other, this.isByClock);
  }

  #wire() {
    this.span.listeners.push(() => this.#pointed());
    pilot(this.surface.canvas, this.span, () => changes(this.sides));
    byId("beside-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.put(this.field.value.trim());
    });
    byId("beside-clear").addEventListener("click", () => {
      this.put("");
      this.field.focus();
    });
    byId("beside-clock").addEventListener("click", () => {
      this.isByClock = !this.isByClock;
      byId("beside-clock").setAttribute("aria-pressed", String(this.isByClock));
      this.span.showWhole();
      this.#show();
    });
    byId("beside-whole").addEventListener("click", () => this.span.showWhole());
  }

  /** The page's own request, as it stands; the first time the one in the address is put beside it. @param {Explanation} own */
  showOwn(own) {
    const isFirst = this.own === null;
    this.own = own;
    byId("beside-panel").hidden = own.segments.length === 0;
    if (isFirst) this.put(new URLSearchParams(location.search).get(PARAMETER) ?? "");
    else this.#show();
  }

  /** Put a request beside the own one; with an empty name, none. @param {string} name */
  put(name) {
    this.asking?.abort();
    this.asking = null;
    this.other = null;
    this.span.showWhole();
    this.field.value = name;
    const address = new URL(location.href);
    if (name === "") address.searchParams.delete(PARAMETER);
    else address.searchParams.set(PARAMETER, name);
    if (address.href !== location.href) history.replaceState(null, "", address);
    byId("beside-clear").hidden = name === "";
    this.#show();
    setText(byId("beside-note"), name === "" ? ASK : "Asking for it.");
    if (name === "") return;
    const asking = new AbortController();
    this.asking = asking;
    /** @type {import("./inquire.js").Listener} */
    const listener = {
      show: (told) => this.#take(told),
      say: (text, state) => {
        if (state === "bad" && !asking.signal.aborted) setText(byId("beside-note"), text);
      },
      refuse: (error) => setText(byId("beside-note"), error.message),
    };
    inquire(name, listener, asking.signal);
  }

  /** @param {Explanation} told */
  #take(told) {
    const choices = told.choices ?? [];
    const index = choices.length > 1 ? slowest(choices) : -1;
    this.other = choices[index] ?? told;
    const choice = index < 0 ? "" : `, choice ${index}, the slowest of ${choices.length}`;
    const { state, is_live, e2e_ns } = this.other;
    const link = requestLink(told.id, told.id);
    const how = is_live ? state : `${state} after ${duration(e2e_ns)}`;
    const words = `${choice}, ${how}. Textures are those of the table.`;
    const note = byId("beside-note");
    const text = `1 is this page's request; 2 is ${told.id}${words}`;
    if (note.textContent !== text) note.replaceChildren("1 is this page's request; 2 is ", link, words);
    this.#show();
  }

  #show() {
    const { own, other, sides } = this;
    byId("beside-shown").hidden = own === null || other === null;
    if (own === null || other === null) return;
    this.span.setTotal(endOf(sides));
    this.surface.invalidate();
    const label = [own, other].map((e, i) => `request ${i + 1}: ${duration(e.e2e_ns)}, ${summary(e)}`).join("; ");
    this.surface.canvas.setAttribute("aria-label", `Two requests on one time axis; ${label}.`);
    const columns = ["part", `1: ${shortId(own.id)}`, `2: ${shortId(other.id)}`, "2 less 1"];
    const table = /** @type {HTMLTableElement} */ (byId("beside-table"));
    fillTable(table, "Both requests, side by side", columns, rowsOf(own, other), [1, 2, 3]);
    if (byId("beside-readout").textContent === "") setText(byId("beside-readout"), HINT);
  }

  /** The cursor has moved, or the zoom has changed. */
  #pointed() {
    this.surface.invalidate();
    const { cursor_ns } = this.span;
    const words = cursor_ns === null || this.other === null ? [] : pairWords(this.sides, cursor_ns, this.isByClock);
    setText(byId("beside-readout"), words.join("; ") || HINT);
    const { clientWidth, clientHeight } = this.surface.canvas;
    const x = this.span.axis(MARGIN.left, clientWidth - MARGIN.left - MARGIN.right).x(cursor_ns ?? 0);
    this.tip.show(words, cursor_ns === null ? null : { x, y: clientHeight });
  }
}

/** @param {Explanation} e */
function summary({ causes, tokens }) {
  const most = causes.reduce((so_far, cause) => (cause.ns > so_far.ns ? cause : so_far), causes[0]);
  return `most of it ${most?.label ?? "unknown"}, ${counted(tokens.length, "token")}`;
}
