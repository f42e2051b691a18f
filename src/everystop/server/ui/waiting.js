// The waiting room: who waits, in the order in which they would board, and why each is not in.

import { KINDS, paint } from "./grammar.js";
import { counted, duration, requestLabel } from "./format.js";
import { make, requestLink, setText } from "./dom.js";

/** @typedef {import("./model.js").Waiter} Waiter */
/** @typedef {{item: HTMLElement, bar: HTMLElement, age: HTMLElement, chip: HTMLElement, sentence: HTMLElement}} Line */

const MAX_LINES = 40;

/** Words for a reason as short as a chip. @type {Record<string, string>} */
const CHIPS = {
  step_running: "step running",
  no_slot: "no slot",
  token_budget: "token budget",
  batch_barrier: "batch barrier",
  batch_fill: "batch fills",
  after_preempt: "after a preemption",
  tenant_limit: "tenant limit",
  over_share: "over its share",
  late: "late",
  fork: "fork",
};

/** @param {Waiter} waiter @returns {string} */
export function chipOf({ reason, need, have, behind, name }) {
  if (reason === "no_blocks") return `KV −${Math.max((need ?? 0) - (have ?? 0), 1)} blocks`;
  if (reason === "behind") return behind !== null && behind >= 0 && name !== null ? `behind r${behind}` : "behind others";
  return reason === null ? "" : (CHIPS[reason] ?? reason);
}

/** Owns the list in the page; elements of who still waits are kept, so that the focus stays. */
export class WaitingRoom {
  /** @param {HTMLElement} list @param {HTMLElement} note */
  constructor(list, note) {
    this.list = list;
    this.note = note;
    /** @type {Map<number, Line>} */
    this.lines = new Map();
  }

  /** @param {Waiter[]} waiting @param {number} numWaiting @param {number} now_ns @param {number | null} pinned */
  show(waiting, numWaiting, now_ns, pinned) {
    const shown = waiting.slice(0, MAX_LINES);
    const longest = Math.max(1, ...shown.map((waiter) => waiter.num_prompt_tokens ?? 0));
    const ids = new Set(shown.map((waiter) => waiter.id));
    for (const [id, line] of this.lines) {
      if (ids.has(id)) continue;
      line.item.remove();
      this.lines.delete(id);
    }
    for (const [place, waiter] of shown.entries()) this.#show(place, waiter, longest, now_ns, waiter.id === pinned);
    const others = numWaiting - shown.length;
    setText(this.note, numWaiting === 0 ? "Nobody waits." : others > 0 ? `… and ${others} more behind them.` : "");
  }

  /** @param {number} place @param {Waiter} waiter @param {number} longest @param {number} now_ns @param {boolean} isPinned */
  #show(place, waiter, longest, now_ns, isPinned) {
    const line = this.lines.get(waiter.id) ?? this.#line(waiter);
    if (this.list.children[place] !== line.item) this.list.insertBefore(line.item, this.list.children[place] ?? null);
    const { num_prompt_tokens: tokens, since_ns } = waiter;
    const parts = [tokens === null ? "" : counted(tokens, "token"), since_ns === null ? "" : duration(now_ns - since_ns)];
    line.item.classList.toggle("pinned", isPinned);
    line.bar.style.width = `${Math.max(2, (100 * (tokens ?? longest)) / longest).toFixed(1)}%`;
    setText(line.age, parts.filter((part) => part !== "").join(", "));
    setText(line.chip, chipOf(waiter));
    line.chip.hidden = waiter.reason === null;
    setText(line.sentence, waiter.name === null ? "" : waiter.sentence);
  }

  /** @param {Waiter} waiter @returns {Line} */
  #line(waiter) {
    const label = requestLabel(waiter.id, waiter.name);
    const who = waiter.name === null ? make("span", "", [label]) : requestLink(waiter.name, label);
    const [bar, age, chip] = [make("span", "bar"), make("span", "age"), make("span", "chip")];
    const sentence = make("p", "sentence");
    paint(bar, KINDS.queued);
    const item = make("li", "", [make("div", "who", [who, chip, age]), make("div", "bar-row", [bar]), sentence]);
    const line = { item, bar, age, chip, sentence };
    this.lines.set(waiter.id, line);
    return line;
  }
}
