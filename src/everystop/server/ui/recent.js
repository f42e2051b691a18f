// Recent requests: a line for each, with its times, and the link to the page that says where they went.

import { ending } from "./grammar.js";
import { count, duration, requestLabel } from "./format.js";
import { make, requestLink, setText } from "./dom.js";

/** @typedef {import("./model.js").Req} Req */
/** @typedef {import("./model.js").LiveModel} LiveModel */
/** @typedef {{row: HTMLElement, cells: HTMLElement[]}} Line */

const MAX_LINES = 30;
const COLUMNS = ["request", "state", "prompt", "output", "queued", "TTFT", "longest gap", "E2E", "main cause"];
const HINTS = [
  "opens the page that says where its time went",
  "where it is now, or how it ended",
  "tokens of its prompt; in brackets those that came from the prefix cache",
  "tokens written so far",
  "from its arrival to a slot",
  "time to first token, from its arrival",
  "the longest time between two of its tokens",
  "from its arrival to its end",
  "what took most of its time",
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

/** Texts of a request's line, but for its name. @param {Req} request @returns {string[]} */
function textsOf(request) {
  const cached = request.num_cached_tokens ?? 0;
  return [
    stateOf(request),
    `${count(request.num_prompt_tokens)}${cached > 0 ? ` (${count(cached)})` : ""}`,
    count(request.num_output_tokens),
    duration(between(request.arrival_ns, request.admit_ns)),
    duration(between(request.arrival_ns, request.first_token_ns)),
    duration((request.num_output_tokens ?? 0) > 1 ? request.max_gap_ns : null),
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
    this.body = make("tbody");
    const heads = COLUMNS.map((text, i) => {
      const head = /** @type {HTMLTableCellElement} */ (make("th", i > 1 && i < 8 ? "number" : "", [text]));
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
    for (const [place, request] of shown.entries()) this.#show(place, request, request.id === pinned);
    const numOthers = model.requests.size - known.length;
    setText(this.note, shown.length === 0 ? "No request yet." : numOthers > 0 ? "Requests of others are not listed." : "");
  }

  /** @param {number} place @param {Req} request @param {boolean} isPinned */
  #show(place, request, isPinned) {
    const line = this.lines.get(request.id) ?? this.#line(request);
    const { children } = this.body;
    if (children[place] !== line.row) this.body.insertBefore(line.row, children[place] ?? null);
    line.row.classList.toggle("pinned", isPinned);
    for (const [i, text] of textsOf(request).entries()) setText(line.cells[i], text);
  }

  /** @param {Req} request @returns {Line} */
  #line(request) {
    const cells = COLUMNS.slice(1).map((_, i) => make("td", i > 0 && i < 7 ? "number" : ""));
    const link = requestLink(request.name ?? "", requestLabel(request.id, request.name));
    const head = /** @type {HTMLTableCellElement} */ (make("th", "", [link]));
    head.scope = "row";
    const line = { row: make("tr", "", [head, ...cells]), cells };
    this.lines.set(request.id, line);
    return line;
  }
}
