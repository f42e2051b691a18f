// The steps of one engine in their order, and what each slot did in them; it knows neither the stream nor a canvas.

/** @typedef {import("./grammar.js").Kind} Kind */
/**
 * What one slot did in one step.
 * @typedef {{slot: number, request: number, tokens: number, outputs: number, kind: Kind}} Cell
 */
/**
 * One step. It took from `begin_ns` (when the one before was back, or its own planning) to `end_ns`; its rows computed
 * tokens for `execute_ns`. Counts are those after it.
 * @typedef {{id: number, scheduled_ns: number, begin_ns: number, end_ns: number, execute_ns: number, num_decode: number,
 *   num_prefill: number, num_padded: number, num_running: number, num_waiting: number, num_held: number, num_free: number,
 *   num_cached: number, num_evicted: number, is_slow: boolean, cells: Cell[]}} Step
 */
/**
 * Consecutive steps in which a slot did the same for the same request; `first` and `last` are positions of steps.
 * @typedef {{slot: number, request: number, kind: Kind, first: number, last: number, begin_ns: number, end_ns: number,
 *   tokens: number}} Run
 */
/** A request's time in a slot. @typedef {{request: number, first: number, last: number, begin_ns: number, end_ns: number}} Stay */

const SLOTS_SHOWN = 8;

/**
 * The first index in an ordered list whose value is above a limit.
 * @template T
 * @param {T[]} list @param {number} limit @param {(item: T) => number} value @returns {number}
 */
export function firstAbove(list, limit, value) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (value(list[middle]) > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Positions of steps count from the first ever added, so that they stay when the oldest are forgotten; earlier ones,
 * which come later, have negative positions. */
export class Timeline {
  /** @param {number} numSlots @param {number} maxSteps how many steps are remembered */
  constructor(numSlots, maxSteps = 30_000) {
    this.numSlots = numSlots;
    /** Slots to draw: those that were in use, in eights. */
    this.numShown = 0;
    this.maxSteps = maxSteps;
    this.now_ns = 0;
    /** What turns its times into those of this machine's clock, in ms. */
    this.offset_ms = 0;
    this.start = 0;
    /** @type {Step[]} */
    this.steps = [];
    /** @type {Run[][]} */
    this.runs = [];
    /** @type {Stay[][]} */
    this.stays = [];
    this.clear(numSlots);
  }

  /** Forget everything; positions go on. @param {number} numSlots */
  clear(numSlots) {
    this.start += this.steps.length;
    this.numSlots = numSlots;
    this.numShown = Math.min(numSlots, SLOTS_SHOWN);
    this.steps = [];
    this.runs = Array.from({ length: numSlots }, () => []);
    this.stays = Array.from({ length: numSlots }, () => []);
  }

  /** One past the last position. */
  get end() {
    return this.start + this.steps.length;
  }

  /** @param {number} position @returns {Step | undefined} */
  at(position) {
    return this.steps[position - this.start];
  }

  /** @returns {Step | undefined} */
  get last() {
    return this.steps[this.steps.length - 1];
  }

  /** @param {Step} step */
  add(step) {
    const position = this.end;
    this.steps.push(step);
    for (const cell of step.cells) {
      if (cell.slot < 0 || cell.slot >= this.numSlots) continue;
      if (cell.slot >= this.numShown) this.#showMore(cell.slot);
      this.#extendRun(cell, position, step);
      this.#extendStay(cell, position, step);
    }
    if (this.steps.length > this.maxSteps * 1.25) this.#forget(this.end - this.maxSteps);
  }

  /** Put the steps of an earlier timeline, which is then of no more use, before all others. @param {Timeline} older */
  prepend(older) {
    const { last, end } = older;
    if (last === undefined) return;
    const shift = this.start - end;
    const first = this.steps[0];
    if (first !== undefined) first.begin_ns = Math.max(first.begin_ns, last.end_ns);
    for (const lists of [...this.runs, ...this.stays]) {
      if (lists[0]?.first === this.start && first !== undefined) lists[0].begin_ns = first.begin_ns;
    }
    for (const lists of [...older.runs, ...older.stays]) {
      for (const item of lists) {
        item.first += shift;
        item.last += shift;
      }
    }
    for (let slot = 0; slot < this.numSlots; slot += 1) {
      this.runs[slot] = joined(older.runs[slot], this.runs[slot], this.start);
      this.stays[slot] = joined(older.stays[slot], this.stays[slot], this.start);
    }
    this.steps = older.steps.concat(this.steps);
    this.start -= older.steps.length;
    this.numShown = Math.max(this.numShown, older.numShown);
  }

  /** Slots that nobody has had are not worth a row each. @param {number} slot */
  #showMore(slot) {
    this.numShown = Math.min(this.numSlots, Math.ceil((slot + 1) / SLOTS_SHOWN) * SLOTS_SHOWN);
  }

  /** @param {Cell} cell @param {number} position @param {Step} step */
  #extendRun(cell, position, step) {
    const runs = this.runs[cell.slot];
    const last = runs[runs.length - 1];
    if (last?.request === cell.request && last.kind === cell.kind && last.last === position - 1) {
      last.last = position;
      last.end_ns = step.end_ns;
      last.tokens += cell.tokens;
      return;
    }
    const { begin_ns, end_ns } = step;
    const { slot, request, kind, tokens } = cell;
    runs.push({ slot, request, kind, first: position, last: position, begin_ns, end_ns, tokens });
  }

  /** @param {Cell} cell @param {number} position @param {Step} step */
  #extendStay(cell, position, step) {
    const stays = this.stays[cell.slot];
    const last = stays[stays.length - 1];
    if (last?.request === cell.request && last.last >= position - 1) {
      last.last = position;
      last.end_ns = step.end_ns;
      return;
    }
    const { begin_ns, end_ns } = step;
    stays.push({ request: cell.request, first: position, last: position, begin_ns, end_ns });
  }

  /** @param {number} position */
  #forget(position) {
    this.steps.splice(0, position - this.start);
    this.start = position;
    for (const lists of [this.runs, this.stays]) {
      for (const list of lists) list.splice(0, firstAbove(/** @type {Stay[]} */ (list), position - 1, (run) => run.last));
    }
  }

  /**
   * Position of the last step that had begun by then; `start - 1` if none had.
   * @param {number} ns @returns {number}
   */
  positionAt(ns) {
    return this.start + firstAbove(this.steps, ns, (step) => step.begin_ns) - 1;
  }

  /**
   * Runs of a slot that touch the positions from `first` to `last`.
   * @param {number} slot @param {number} first @param {number} last @returns {Run[]}
   */
  runsBetween(slot, first, last) {
    return between(this.runs[slot], first, last);
  }

  /** @param {number} slot @param {number} first @param {number} last @returns {Stay[]} */
  staysBetween(slot, first, last) {
    return between(this.stays[slot], first, last);
  }

  /** @param {number} position @param {number} slot @returns {Cell | undefined} */
  cell(position, slot) {
    return this.at(position)?.cells.find((cell) => cell.slot === slot);
  }
}

/**
 * Two lists of one slot as one; what goes on over `position` becomes one item.
 * @template {Stay & {kind?: Kind, tokens?: number}} T
 * @param {T[]} older @param {T[]} newer @param {number} position @returns {T[]}
 */
function joined(older, newer, position) {
  const [before, after] = [older[older.length - 1], newer[0]];
  const meet = before?.last === position - 1 && after?.first === position;
  if (!meet || before.request !== after.request || before.kind !== after.kind) return older.concat(newer);
  const { first, begin_ns } = before;
  const one = { ...after, first, begin_ns };
  if (before.tokens !== undefined) one.tokens = before.tokens + (after.tokens ?? 0);
  return [...older.slice(0, -1), one, ...newer.slice(1)];
}

/**
 * @template {{first: number, last: number}} T
 * @param {T[]} list @param {number} first @param {number} last @returns {T[]}
 */
function between(list, first, last) {
  return list.slice(
    firstAbove(list, first - 1, (item) => item.last),
    firstAbove(list, last, (item) => item.first),
  );
}
