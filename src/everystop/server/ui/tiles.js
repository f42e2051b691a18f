// The verdict strip: the numbers of the last minute, each with a sparkline and its definition, and one sentence.

import { counted, duration, percent, rate } from "./format.js";
import { byId, make, setText } from "./dom.js";
import { drawSpark } from "./strips.js";
import { Surface } from "./surface.js";

/** @typedef {import("./model.js").Tiles} Numbers */
/** @typedef {{name: string, definition: string, text: (n: Numbers) => string, detail: (n: Numbers) => string, value: (n: Numbers) => number}} Tile */

const SECONDS = 60;

/** @type {Tile[]} */
const TILES = [
  {
    name: "Slots busy",
    definition: "Requests that hold one of the batch's slots now.",
    text: (n) => `${n.slots_busy} of ${n.slots}`,
    detail: (n) => `${percent(n.slots_busy / Math.max(n.slots, 1))} of the batch`,
    value: (n) => n.slots_busy,
  },
  {
    name: "Waiting",
    definition: "Requests that have arrived and hold no slot, and how long the oldest of them has waited.",
    text: (n) => `${n.num_waiting}`,
    detail: (n) => (n.num_waiting > 0 ? `oldest ${duration(n.oldest_wait_ns)}` : "nobody waits"),
    value: (n) => n.num_waiting,
  },
  {
    name: "KV cache",
    definition: "Share of the cache's blocks that running requests use; blocks kept only for reuse do not count.",
    text: (n) => percent(n.kv_used_share),
    detail: () => "of blocks in use",
    value: (n) => n.kv_used_share,
  },
  {
    name: "Output",
    definition: "Tokens written a second, over the last 60 s.",
    text: (n) => rate(n.output_tokens_per_s),
    detail: () => "tokens a second",
    value: (n) => n.output_tokens_per_s,
  },
  {
    name: "TTFT",
    definition: "Time to first token, from arrival: the median over the last 60 s, and what 95 of 100 stay below.",
    text: (n) => duration(n.ttft_p50_ns),
    detail: (n) => `p95 ${duration(n.ttft_p95_ns)}`,
    value: (n) => n.ttft_p50_ns ?? NaN,
  },
  {
    name: "ITL",
    definition: "Gap between two tokens of a request: the median over the last 60 s, and what 99 of 100 stay below.",
    text: (n) => duration(n.itl_p50_ns),
    detail: (n) => `p99 ${duration(n.itl_p99_ns)}`,
    value: (n) => n.itl_p50_ns ?? NaN,
  },
];

/** One sentence on how things stand. @param {Numbers} n @returns {string} */
export function verdict(n) {
  const slots = n.slots_busy === 0 ? "No request is running" : `${n.slots_busy} of ${n.slots} slots are busy`;
  if (n.num_waiting === 0) return `${slots}, and nobody waits.`;
  const wait = `${counted(n.num_waiting, "request waits", "requests wait")}, the oldest for ${duration(n.oldest_wait_ns)}`;
  return n.slots_busy >= n.slots ? `All ${counted(n.slots, "slot")} are busy; ${wait}.` : `${slots}; ${wait}.`;
}

/** Owns the tiles in the page. */
export class VerdictStrip {
  /** @param {HTMLElement} list */
  constructor(list) {
    this.second = -1;
    this.parts = TILES.map((tile) => {
      const [value, detail] = [make("span", "value", ["–"]), make("span", "detail")];
      const canvas = /** @type {HTMLCanvasElement} */ (make("canvas", "spark"));
      canvas.setAttribute("aria-hidden", "true");
      const item = make("li", "tile", [
        make("span", "name", [tile.name]),
        value,
        detail,
        canvas,
        make("span", "definition", [tile.definition]),
      ]);
      item.title = tile.definition;
      list.append(item);
      /** @type {number[]} */
      const values = [];
      return { tile, value, detail, values, surface: new Surface(canvas, (sheet) => drawSpark(sheet, values)) };
    });
  }

  /** @param {Numbers} numbers @param {number} now_ns */
  show(numbers, now_ns) {
    const second = Math.floor(now_ns / 1e9);
    const isNew = second !== this.second;
    this.second = second;
    for (const { tile, value, detail, values, surface } of this.parts) {
      setText(value, tile.text(numbers));
      setText(detail, tile.detail(numbers));
      if (!isNew) continue;
      values.push(tile.value(numbers));
      if (values.length > SECONDS) values.shift();
      surface.invalidate();
    }
    setText(byId("verdict"), verdict(numbers));
  }
}
