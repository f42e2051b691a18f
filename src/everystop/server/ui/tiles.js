// The verdict strip: the numbers of the last minute, each with a sparkline and its definition, and one sentence.

import { counted, duration, percent, rate } from "./format.js";
import { byId, make, setText } from "./dom.js";
import { drawSpark } from "./strips.js";
import { firstAbove } from "./timeline.js";
import { quantile } from "./gaps.js";
import { Surface } from "./surface.js";
import { TargetsTile } from "./targets.js";

/** @typedef {import("./model.js").Tiles} Numbers */
/** @typedef {import("./model.js").LiveModel} LiveModel */
/** @typedef {{name: string, definition: string, text: (n: Numbers) => string, detail: (n: Numbers) => string, value: (n: Numbers) => number, past: (model: LiveModel, ns: number) => number}} Tile */

const SECONDS = 60;
const NS_PER_S = 1e9;

/** The last step that had ended by then. @param {LiveModel} model @param {number} ns */
function stepAt({ timeline }, ns) {
  const step = timeline.at(timeline.positionAt(ns));
  return step !== undefined && step.end_ns > ns ? timeline.at(timeline.positionAt(ns) - 1) : step;
}

/** Values of the minute before. @param {import("./strips.js").Point[]} points @param {number} ns */
function within(points, ns) {
  const first = firstAbove(points, ns - SECONDS * NS_PER_S, (point) => point.ns);
  return points.slice(first, firstAbove(points, ns, (point) => point.ns)).map((point) => point.value);
}

/** @type {Tile[]} */
const TILES = [
  {
    name: "Slots busy",
    definition: "Requests that hold one of the batch's slots now.",
    text: (n) => `${n.slots_busy} of ${n.slots}`,
    detail: (n) => `${percent(n.slots_busy / Math.max(n.slots, 1))} full`,
    value: (n) => n.slots_busy,
    past: (model, ns) => stepAt(model, ns)?.num_running ?? NaN,
  },
  {
    name: "Waiting",
    definition: "Requests that have arrived and hold no slot, and how long the oldest of them has waited.",
    text: (n) => `${n.num_waiting}`,
    detail: (n) => (n.num_waiting > 0 ? `oldest ${duration(n.oldest_wait_ns)}` : "nobody waits"),
    value: (n) => n.num_waiting,
    past: (model, ns) => stepAt(model, ns)?.num_waiting ?? NaN,
  },
  {
    name: "KV cache",
    definition: "Share of the cache's blocks that running requests use; blocks kept only for reuse do not count.",
    text: (n) => percent(n.kv_used_share),
    detail: () => "of blocks in use",
    value: (n) => n.kv_used_share,
    past: (model, ns) => 1 - (stepAt(model, ns)?.num_free ?? NaN) / (model.server?.num_blocks ?? 1),
  },
  {
    name: "Output",
    definition: "Tokens written a second, over the last 60 s.",
    text: (n) => rate(n.output_tokens_per_s),
    detail: () => "tokens a second",
    value: (n) => n.output_tokens_per_s,
    past: (model, ns) => within(model.tokensPerSecond, ns).reduce((sum, value) => sum + value, 0) / SECONDS,
  },
  {
    name: "TTFT",
    definition: "Time to first token, from arrival: the median over the last 60 s, and what 95 of 100 stay below.",
    text: (n) => duration(n.ttft_p50_ns),
    detail: (n) => `p95 ${duration(n.ttft_p95_ns)}`,
    value: (n) => n.ttft_p50_ns ?? NaN,
    past: (model, ns) => quantile(within(model.firstTokens, ns), 0.5),
  },
  {
    name: "ITL",
    definition: "Gap between two tokens of a request: the median over the last 60 s, and what 99 of 100 stay below.",
    text: (n) => duration(n.itl_p50_ns),
    detail: (n) => `p99 ${duration(n.itl_p99_ns)}`,
    value: (n) => n.itl_p50_ns ?? NaN,
    past: (model, ns) => quantile(within(model.gaps, ns), 0.5),
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
    this.targets = new TargetsTile(list);
  }

  /** Show the numbers; once a second the sparklines grow, and at first they are made from the steps.
   * @param {LiveModel} model
   */
  show(model) {
    const { tiles, now_ns } = model;
    if (tiles === null) return;
    const second = Math.floor(now_ns / NS_PER_S);
    const isNew = second !== this.second;
    for (const { tile, value, detail, values, surface } of this.parts) {
      setText(value, tile.text(tiles));
      setText(detail, tile.detail(tiles));
      if (!isNew) continue;
      if (values.length <= 1) values.splice(0, 1, ...pastOf(tile, model, second));
      values.push(tile.value(tiles));
      if (values.length > SECONDS) values.shift();
      surface.invalidate();
    }
    this.second = second;
    this.targets.show(model);
    setText(byId("verdict"), verdict(tiles));
  }
}

/** @param {Tile} tile @param {LiveModel} model @param {number} second */
function pastOf(tile, model, second) {
  return Array.from({ length: SECONDS - 1 }, (_, i) => tile.past(model, (second - SECONDS + 1 + i) * NS_PER_S));
}
