// How long steps usually take, and so which of them are slow: the rule of a comparison's report, on what has come so far.

import { quantile } from "./gaps.js";

const SLOW_FACTOR = 2;
const REMEMBERED = 256;
const LEAST = 16;
const LEARN_EVERY = 32;

/** @typedef {{durations: number[], numSeen: number, median_ns: number}} Usual */

/** Owns the durations of the last steps that only decoded, apart for each size of the batch up to a power of two. */
export class StepPace {
  constructor() {
    /** @type {Map<number, Usual>} */
    this.sizes = new Map();
  }

  clear() {
    this.sizes.clear();
  }

  /** A step is over. @param {number} numRows @param {number} took_ns */
  addDecode(numRows, took_ns) {
    const usual = this.sizes.get(sizeOf(numRows)) ?? { durations: [], numSeen: 0, median_ns: 0 };
    this.sizes.set(sizeOf(numRows), usual);
    usual.durations.push(took_ns);
    usual.numSeen += 1;
    if (usual.durations.length > REMEMBERED) usual.durations.shift();
    const isDue = usual.numSeen === LEAST || usual.numSeen % LEARN_EVERY === 0;
    if (isDue) usual.median_ns = quantile(usual.durations, 0.5);
  }

  /** Whether a step took more than twice what decode steps with about as many rows take; where there were too few of
   * those, than the median of the other sizes' medians. @param {number} numRows @param {number} took_ns
   */
  isSlow(numRows, took_ns) {
    const known = [...this.sizes.values()].map(({ median_ns }) => median_ns).filter((median_ns) => median_ns > 0);
    const own_ns = this.sizes.get(sizeOf(numRows))?.median_ns ?? 0;
    const usual_ns = own_ns > 0 ? own_ns : known.length > 0 ? quantile(known, 0.5) : Infinity;
    return took_ns > SLOW_FACTOR * usual_ns;
  }
}

/** Bits of the number of rows: 1 for one row, 2 for two and three, 3 for four to seven. @param {number} numRows */
function sizeOf(numRows) {
  return 32 - Math.clz32(numRows);
}
