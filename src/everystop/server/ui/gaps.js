// Gaps between the tokens of each request, as far as this page has seen the tokens come.

/** @typedef {import("./model.js").Req} Req */
/** `gaps` are given up for `p99_ns` when all are known.
 * @typedef {{gaps: number[], longest_ns: number, p99_ns: number | null, numTokens: number}} Seen
 */

/** Owns the gaps by request. */
export class RequestGaps {
  constructor() {
    /** @type {Map<number, Seen>} */
    this.seen = new Map();
  }

  clear() {
    this.seen.clear();
  }

  /** @param {number} id */
  forget(id) {
    this.seen.delete(id);
  }

  /** Take over what was seen earlier of requests of which nothing was seen since. @param {RequestGaps} older */
  addPast(older) {
    for (const [id, seen] of older.seen) if (!this.seen.has(id)) this.seen.set(id, seen);
  }

  /** Tokens of a request have come; `gap_ns` is null where none of it was seen before. @param {number} id
   * @param {number} numTokens @param {number | null} gap_ns
   */
  add(id, numTokens, gap_ns) {
    if (id < 0) return; // nobody whose numbers this reader may see
    const seen = this.seen.get(id) ?? { gaps: [], longest_ns: 0, p99_ns: null, numTokens: 0 };
    seen.numTokens += numTokens;
    if (gap_ns !== null) seen.gaps.push(gap_ns);
    seen.longest_ns = Math.max(seen.longest_ns, gap_ns ?? 0);
    this.seen.set(id, seen);
  }

  /** The longest of a request's gaps, null before there is one. The stream tells it once a second, so the page may have
   * seen a longer one since. @param {Req} request
   */
  longest({ id, max_gap_ns }) {
    return Math.max(max_gap_ns ?? 0, this.seen.get(id)?.longest_ns ?? 0) || null;
  }

  /** What 99 of 100 of its gaps stay below; null if it has none, or if not all its tokens were seen. @param {Req} request */
  p99({ id, num_output_tokens, finish_ns }) {
    const seen = this.seen.get(id);
    if (seen === undefined || num_output_tokens === null || seen.numTokens < num_output_tokens) return null;
    if (seen.p99_ns !== null || seen.gaps.length === 0) return seen.p99_ns;
    const p99_ns = quantile(seen.gaps, 0.99);
    if (finish_ns !== null) {
      seen.p99_ns = p99_ns;
      seen.gaps = [];
    }
    return p99_ns;
  }
}

/**
 * The value below which that share of the values lies.
 * @param {number[]} values @param {number} share @returns {number}
 */
export function quantile(values, share) {
  const sorted = Float64Array.from(values).sort();
  return sorted.length === 0 ? NaN : sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
