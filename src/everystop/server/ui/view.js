// Which part of a timeline is on the screen, for all charts that share it: by the clock or by step number.

import { tick, ticks, timeOfDay } from "./format.js";

/** @typedef {import("./timeline.js").Timeline} Timeline */
/** @typedef {import("./timeline.js").Step} Step */
/** Where somebody points: a step, and perhaps a slot. @typedef {{position: number, slot: number | null}} Cursor */

const MIN_SPAN = { time: 0.05e9, steps: 8 };
const MAX_SPAN = { time: 600e9, steps: 20_000 };
/** Room for a word on the axis, in pixels. */
const WORD_WIDTH = 90;

/** Changes are told to `listeners`; while `isPaused` the view stays where it is, though steps go on coming. */
export class View {
  /** @param {Timeline} timeline @param {{span_ns?: number, spanSteps?: number}} [options] */
  constructor(timeline, { span_ns = 30e9, spanSteps = 300 } = {}) {
    this.timeline = timeline;
    /** @type {"time" | "steps"} */
    this.mode = "time";
    this.span = { time: span_ns, steps: spanSteps };
    this.isPaused = false;
    this.end = 0;
    /** While it is paused: what turns times into those of this machine's clock, in ms. */
    this.offset_ms = 0;
    /** How often somebody has moved it, also in vain, where there is nothing further. */
    this.numMoves = 0;
    /** @type {Cursor | null} */
    this.cursor = null;
    /** @type {number | null} */
    this.pinned = null;
    /** @type {(() => void)[]} */
    this.listeners = [];
  }

  /** Tell everybody that something of the view has changed. */
  changed() {
    for (const listener of this.listeners) listener();
  }

  /** The newest value of the axis. */
  get newest() {
    const { timeline } = this;
    return this.mode === "time" ? Math.max(timeline.now_ns, timeline.last?.end_ns ?? 0) : timeline.end;
  }

  /** The oldest value of the axis. */
  get oldest() {
    return this.mode === "time" ? (this.timeline.steps[0]?.begin_ns ?? this.timeline.now_ns) : this.timeline.start;
  }

  /** The ends of what is shown. @returns {{from: number, to: number}} */
  get domain() {
    const to = this.isPaused ? this.end : this.newest;
    return { from: to - this.span[this.mode], to };
  }

  /** @param {boolean} isPaused */
  pause(isPaused) {
    if (isPaused) this.#hold();
    else this.isPaused = false;
    this.changed();
  }

  /** Stay where it is; the times of day in sight stay the same, too, however quickly later messages come. */
  #hold() {
    if (this.isPaused) return;
    this.end = this.newest;
    this.offset_ms = this.timeline.offset_ms;
    this.isPaused = true;
  }

  /** When that was, by this machine's clock. @param {number} ns @returns {Date} */
  dateOf(ns) {
    return new Date(ns / 1e6 + (this.isPaused ? this.offset_ms : this.timeline.offset_ms));
  }

  /** Change between clock and step number; the same moment stays at the right edge. @param {"time" | "steps"} mode */
  show(mode) {
    if (mode === this.mode) return;
    const end = this.mode === "time" ? this.timeline.positionAt(this.end) + 1 : this.timeline.at(this.end - 1)?.end_ns;
    this.mode = mode;
    if (this.isPaused) this.end = end ?? this.newest;
    this.changed();
  }

  /** Show `factor` times as much, keeping the point at `share` of the width. @param {number} factor @param {number} share */
  zoom(factor, share = 1) {
    this.numMoves += 1;
    const { from, to } = this.domain;
    const held = from + (to - from) * share;
    const span = Math.min(Math.max((to - from) * factor, MIN_SPAN[this.mode]), MAX_SPAN[this.mode]);
    this.span[this.mode] = span;
    if (this.isPaused) this.end = this.#bounded(held + span * (1 - share));
    this.changed();
  }

  /** Move by a share of the width, back if negative; pauses. @param {number} share */
  pan(share) {
    this.numMoves += 1;
    const { to } = this.domain;
    this.#hold();
    this.end = this.#bounded(to + share * this.span[this.mode]);
    this.changed();
  }

  /** @param {number} end @returns {number} */
  #bounded(end) {
    return Math.min(Math.max(end, this.oldest + this.span[this.mode] / 4), this.newest);
  }

  /** Point at a step, and bring it into view. @param {number} position @param {number | null} slot */
  point(position, slot) {
    this.numMoves += 1;
    const { timeline } = this;
    const bounded = Math.min(Math.max(position, timeline.start), timeline.end - 1);
    const step = timeline.at(bounded);
    if (step === undefined) return;
    this.cursor = { position: bounded, slot };
    const { from, to } = this.domain;
    const [begin, end] = this.mode === "time" ? [step.begin_ns, step.end_ns] : [bounded, bounded + 1];
    if (begin < from) this.pan((begin - from) / (to - from));
    else if (end > to) this.pan((end - to) / (to - from));
    this.changed();
  }

  /** An axis over pixels. @param {number} left @param {number} width @returns {Axis} */
  axis(left, width) {
    const { from, to } = this.domain;
    const dateOf = this.isPaused ? (/** @type {number} */ ns) => this.dateOf(ns) : null;
    return new Axis(this.timeline, this.mode, from, to, left, width, dateOf);
  }
}

/** Maps times and positions of steps to pixels. */
export class Axis {
  /**
   * @param {Timeline} timeline @param {"time" | "steps"} mode @param {number} from @param {number} to
   * @param {number} left @param {number} width
   * @param {((ns: number) => Date) | null} dateOf when a moment was; null where the right edge is now
   */
  constructor(timeline, mode, from, to, left, width, dateOf) {
    this.timeline = timeline;
    this.mode = mode;
    this.from = from;
    this.to = to;
    this.left = left;
    this.width = width;
    this.dateOf = dateOf;
    this.scale = width / (to - from);
    const first = mode === "time" ? timeline.positionAt(from) : Math.floor(from);
    const last = mode === "time" ? timeline.positionAt(to) : Math.ceil(to) - 1;
    this.first = Math.max(first, timeline.start);
    this.last = Math.min(last, timeline.end - 1);
  }

  /** @param {number} value @returns {number} */
  x(value) {
    return this.left + (value - this.from) * this.scale;
  }

  /** The first and the last moment in sight. @returns {[number, number]} */
  get times() {
    if (this.mode === "time") return [this.from, this.to];
    return [this.timeline.at(this.first)?.begin_ns ?? 0, this.timeline.at(this.last)?.end_ns ?? 0];
  }

  /** Pixel of a moment. @param {number} ns @returns {number} */
  ofTime(ns) {
    if (this.mode === "time") return this.x(ns);
    const position = this.timeline.positionAt(ns);
    const step = this.timeline.at(position);
    if (step === undefined) return this.x(position + 1);
    return this.x(position + Math.min(1, (ns - step.begin_ns) / Math.max(1, step.end_ns - step.begin_ns)));
  }

  /**
   * Left and right pixel of what lasted over these positions.
   * @param {{first: number, last: number, begin_ns: number, end_ns: number}} run @returns {[number, number]}
   */
  ofRun(run) {
    return this.mode === "time" ? [this.x(run.begin_ns), this.x(run.end_ns)] : [this.x(run.first), this.x(run.last + 1)];
  }

  /** Left and right pixel of a step. @param {number} position @param {Step} step @returns {[number, number]} */
  ofStep(position, step) {
    return this.mode === "time" ? [this.x(step.begin_ns), this.x(step.end_ns)] : [this.x(position), this.x(position + 1)];
  }

  /** Position of the step under a pixel, NaN if there is none. @param {number} x @returns {number} */
  positionAt(x) {
    const value = this.from + (x - this.left) / this.scale;
    const position = this.mode === "time" ? this.timeline.positionAt(value) : Math.floor(value);
    return this.timeline.at(position) === undefined ? NaN : position;
  }

  /** Pixels and words of the axis. @returns {{x: number, text: string}[]} */
  labels() {
    const wanted = Math.max(2, Math.floor(this.width / WORD_WIDTH));
    if (this.mode === "steps") return this.#stepLabels(wanted);
    const values = ticks(this.from - this.to, 0, wanted);
    if (this.dateOf !== null) return this.#clockLabels(values, this.dateOf);
    return values.map((value) => ({ x: this.x(this.to + value), text: value === 0 ? "now" : tick(value) }));
  }

  /**
   * Times of day, at both ends and between them where there is room.
   * @param {number[]} values counted back from the right end @param {(ns: number) => Date} dateOf
   */
  #clockLabels(values, dateOf) {
    const apart_ns = values.length > 1 ? values[1] - values[0] : this.to - this.from;
    const moments = values.map((value) => this.to + value).filter((ns) => (ns - this.from) * this.scale >= WORD_WIDTH);
    return [this.from, ...moments].map((ns) => ({ x: this.x(ns), text: timeOfDay(dateOf(ns), apart_ns) }));
  }

  /** Where steps fill only a part of the width, there is room for fewer words. @param {number} wanted */
  #stepLabels(wanted) {
    const positions = ticks(Math.max(this.from, this.timeline.start), this.to, wanted).filter(Number.isInteger);
    const apart = positions.length > 1 ? positions[1] - positions[0] : 1;
    const every = positions.length > 1 ? apart * Math.ceil(WORD_WIDTH / (apart * this.scale)) : 1;
    return positions.flatMap((position) => {
      if (position % every !== 0) return [];
      const step = this.timeline.at(position);
      return step === undefined ? [] : [{ x: this.x(position), text: `step ${step.id}` }];
    });
  }
}
