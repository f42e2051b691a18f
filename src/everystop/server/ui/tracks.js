// A picture of what happened, as a viewer of traces shows it: tracks of nested slices, and counters, on one time axis.

/** @typedef {Record<string, string | number>} Arguments */
/** @typedef {{number: number, name: string, rank: number, isCounter: boolean}} Track */
/** @typedef {{ns: number, kind: "begin" | "end" | "count", track: number, name: string, args: Arguments, value: number}} Mark */

/** The number of the outermost track, which stands for the server. */
export const ROOT = 1;

/** Owns the tracks, in the order in which they are shown, and what is marked on them. */
export class Picture {
  constructor() {
    /** @type {Track[]} */
    this.tracks = [];
    /** @type {Mark[]} */
    this.marks = [];
  }

  /** A track for slices; lanes of one track share its rank. @param {string} name @param {number} [rank] @returns {number} */
  track(name, rank) {
    return this.#add(name, rank, false);
  }

  /** @param {number} track @param {number} ns @param {string} name @param {Arguments} args */
  begin(track, ns, name, args) {
    this.marks.push({ ns, kind: "begin", track, name, args, value: 0 });
  }

  /** @param {number} track @param {number} ns @param {Arguments} [args] */
  end(track, ns, args = {}) {
    this.marks.push({ ns, kind: "end", track, name: "", args, value: 0 });
  }

  /** A count from then on; the same as before is not drawn again. @param {string} name @returns {(ns: number, value: number) => void} */
  counter(name) {
    const track = this.#add(name, undefined, true);
    let last = NaN;
    return (ns, value) => {
      if (value === last) return;
      last = value;
      this.marks.push({ ns, kind: "count", track, name: "", args: {}, value });
    };
  }

  /** All marks in the order of time; those of one time stay in the order of their track. */
  inOrder() {
    return this.marks.sort((one, other) => one.ns - other.ns);
  }

  /** @param {string} name @param {number | undefined} rank @param {boolean} isCounter */
  #add(name, rank, isCounter) {
    const number = ROOT + 1 + this.tracks.length;
    this.tracks.push({ number, name, rank: rank ?? number, isCounter });
    return number;
  }
}
