// A stretch of one request's life on the screen, with zoom and cursor; times count from when it was received.

import { tick, ticks } from "./format.js";

const SHORTEST_NS = 1e5;

/** Changes are told to `listeners`; `cursor_ns` is where somebody points. */
export class Span {
  constructor() {
    this.total_ns = 1;
    this.from = 0;
    this.to = 1;
    /** @type {number | null} */
    this.cursor_ns = null;
    /** @type {(() => void)[]} */
    this.listeners = [];
  }

  changed() {
    for (const listener of this.listeners) listener();
  }

  /** The life is so long now; who looked at the whole of it still does. @param {number} total_ns */
  setTotal(total_ns) {
    const isWhole = this.from === 0 && this.to === this.total_ns;
    this.total_ns = Math.max(total_ns, 1);
    if (isWhole || this.to > this.total_ns) this.showWhole();
  }

  showWhole() {
    [this.from, this.to, this.cursor_ns] = [0, this.total_ns, null];
    this.changed();
  }

  /** @param {number} from @param {number} to */
  show(from, to) {
    this.#place(from, Math.max(to - from, SHORTEST_NS));
  }

  /** Show `factor` times as much, keeping the cursor or the middle where it is. @param {number} factor @param {number} [share] */
  zoom(factor, share) {
    const held = share ?? (this.cursor_ns === null ? 0.5 : (this.cursor_ns - this.from) / (this.to - this.from));
    const at = Math.min(Math.max(held, 0), 1);
    const middle = this.from + (this.to - this.from) * at;
    const span = Math.min(Math.max((this.to - this.from) * factor, SHORTEST_NS), this.total_ns);
    this.#place(middle - span * at, span);
  }

  /** Move by a share of the width. @param {number} share */
  pan(share) {
    const span = this.to - this.from;
    this.#place(this.from + share * span, span);
  }

  /** @param {number} from @param {number} span */
  #place(from, span) {
    this.from = Math.min(Math.max(from, 0), Math.max(this.total_ns - span, 0));
    this.to = this.from + span;
    this.changed();
  }

  /** Point somewhere, and bring it into view. @param {number | null} ns */
  point(ns) {
    this.cursor_ns = ns;
    const span = this.to - this.from;
    if (ns !== null && (ns < this.from || ns > this.to)) this.#place(ns - span / 2, span);
    else this.changed();
  }

  /** An axis over pixels. @param {number} left @param {number} width */
  axis(left, width) {
    const scale = width / (this.to - this.from);
    const { from, to } = this;
    return {
      left,
      width,
      /** @param {number} ns */
      x: (ns) => left + (ns - from) * scale,
      /** @param {number} x */
      time: (x) => from + (x - left) / scale,
      labels: () =>
        ticks(from, to, Math.max(2, Math.floor(width / 90))).map((ns) => ({
          x: left + (ns - from) * scale,
          text: ns === 0 ? "received" : tick(ns),
        })),
    };
  }
}
