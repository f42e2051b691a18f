// Recent requests: a line for each, with its times, and the link to the page that says where they went.

import { ending } from "./grammar.js";
import { count, duration, requestLabel } from "./format.js";
import { besideAddress, make, requestLink, setText } from "./dom.js";

/** @typedef {import("./model.js").Req} Req */
/** @typedef {import("./model.js").LiveModel} LiveModel */
/** @typedef {{row: HTMLElement, cells: HTMLElement[], button: HTMLElement}} Line */

const MAX_LINES = 30;
const COLUMNS = ["request", "state", "prompt", "output", "queued", "TTFT", "ITL p99", "longest gap", "E2E", "main cause", "side by side"];
const FIRST_NUMBER = 2;
const LAST_NUMBER = 8;
const HINTS = [
  "opens the page that says where its time went",
  "where it is now, or how it ended",
  "tokens of its prompt; in brackets those that came from the prefix cache",
  "tokens written so far",
  "from its arrival to a slot",
  "time to first token, from its arrival",
  "what 99 of 100 of its gaps between tokens stay below; of one whose tokens this page has not all seen, nothing",
  "the longest time between two of its tokens",
  "from its arrival to its end",
  "what took most of its time; after ≈ a guess by the times in this row, where there was no time to look at its steps",
  "two that are chosen, one after the other, are shown on one page",
];

/** @param {number | null} from @param {number | null} to @returns {number | null} */
function between(from, to) {
  return from === null || to === null ? null : to - from;
}

/** @param {Req} request @returns {string} */
function stateOf(request) {
  if (request.finish_ns === null) return request.state;
  const [glyph, word] = ending(request.finish_reason);
  return `${glyph} ${request.finish_reason ?? word}`;
}

/** Texts of a request's line, but for its name. @param {Req} request @param {LiveModel} model @returns {string[]} */
function textsOf(request, model) {
  const cached = request.num_cached_tokens ?? 0;
  return [
    stateOf(request),
    `${count(request.num_prompt_tokens)}${cached > 0 ? ` (${count(cached)})` : ""}`,
    count(request.num_output_tokens),
    duration(between(request.arrival_ns, request.admit_ns)),
    duration(between(request.arrival_ns, request.first_token_ns)),
    duration(model.itlP99(request)),
    duration(model.longestGap(request)),
    duration(between(request.arrival_ns, request.finish_ns)),
    request.blame ?? (request.finish_ns === null ? "" : "–"),
  ];
}

/** Owns the table; rows of requests that stay are kept, so that the focus stays. */
export class RecentRequests {
  /** @param {HTMLTableElement} table @param {HTMLElement} note */
  constructor(table, note) {
    this.note = note;
    /** @type {Map<number, Line>} */
    this.lines = new Map();
    /** Which of them another is to be put beside. @type {Req | null} */
    this.chosen = null;
    this.numOthers = 0;
    this.body = make("tbody");
    const heads = COLUMNS.map((text, i) => {
      const isNumber = i >= FIRST_NUMBER && i <= LAST_NUMBER;
      const head = /** @type {HTMLTableCellElement} */ (make("th", isNumber ? "number" : "", [text]));
      head.scope = "col";
      head.title = HINTS[i];
      return head;
    });
    const caption = make("caption", "visually-hidden", ["Recent requests, newest first"]);
    table.replaceChildren(caption, make("thead", "", [make("tr", "", heads)]), this.body);
  }

  /** @param {LiveModel} model @param {number | null} pinned */
  show(model, pinned) {
    const known = [...model.requests.values()].filter((request) => request.name !== null);
    const shown = known.sort((one, other) => other.id - one.id).slice(0, MAX_LINES);
    const ids = new Set(shown.map((request) => request.id));
    for (const [id, line] of this.lines) {
      if (ids.has(id)) continue;
      line.row.remove();
      this.lines.delete(id);
    }
    if (this.chosen !== null && !ids.has(this.chosen.id)) this.#choose(null);
    for (const [place, request] of shown.entries()) {
      this.#show(place, request, model, request.id === pinned);
    }
    this.numOthers = model.requests.size - known.length;
    this.#note();
  }

  #note() {
    const { chosen, lines, numOthers } = this;
    const others = numOthers > 0 ? "Requests of others are not listed." : "";
    const next = `${chosen === null ? "" : requestLabel(chosen.id, chosen.name)} is chosen: choose the one to put beside it.`;
    setText(this.note, lines.size === 0 ? "No request yet." : chosen !== null ? next : others);
  }

  /** @param {number} place @param {Req} request @param {LiveModel} model @param {boolean} isPinned */
  #show(place, request, model, isPinned) {
    const line = this.lines.get(request.id) ?? this.#line(request);
    const { children } = this.body;
    if (children[place] !== line.row) this.body.insertBefore(line.row, children[place] ?? null);
    line.row.classList.toggle("pinned", isPinned);
    for (const [i, text] of textsOf(request, model).entries()) setText(line.cells[i], text);
  }

  /** @param {Req} request @returns {Line} */
  #line(request) {
    const cells = COLUMNS.slice(1).map((_, i) => make("td", i + 1 >= FIRST_NUMBER && i + 1 <= LAST_NUMBER ? "number" : ""));
    const label = requestLabel(request.id, request.name);
    const button = make("button", "small", ["Choose"]);
    button.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-label", `Choose ${label}, to see two requests side by side`);
    button.addEventListener("click", () => this.#choose(request));
    cells[cells.length - 1].append(button);
    const link = requestLink(request.name ?? "", label);
    const head = /** @type {HTMLTableCellElement} */ (make("th", "", [link]));
    head.scope = "row";
    const line = { row: make("tr", "", [head, ...cells]), cells, button };
    this.lines.set(request.id, line);
    return line;
  }

  /** The first choice is kept, again it is taken back, and with a second both are shown. @param {Req | null} request */
  #choose(request) {
    const { chosen } = this;
    if (request !== null && chosen !== null && chosen.id !== request.id) {
      location.assign(besideAddress(chosen.name ?? "", request.name ?? ""));
      return;
    }
    this.chosen = chosen === null ? request : null;
    for (const [id, { button }] of this.lines) button.setAttribute("aria-pressed", String(id === this.chosen?.id));
    this.#note();
  }
}
