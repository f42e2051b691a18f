// The charts of the live page as tables: what a picture shows, in rows and columns.

import { BLOCKS, KINDS } from "./grammar.js";
import { count, duration, percent, requestLabel } from "./format.js";
import { blockCounts, numBlocksOf } from "./blockmap.js";
import { quantile } from "./gaps.js";

/** @typedef {import("./model.js").LiveModel} LiveModel */
/** @typedef {{caption: string, columns: string[], rows: string[][]}} Table */

const MAX_ROWS = 60;
const NS_PER_S = 1e9;

/** @param {LiveModel} model @param {number} id @returns {string} */
export function nameOf(model, id) {
  return requestLabel(id, model.requests.get(id)?.name ?? null);
}

/** What every slot does in one step, by default the last. @param {LiveModel} model @param {number | null} position @returns {Table} */
function slotsTable(model, position) {
  const { timeline } = model;
  const at = position ?? timeline.end - 1;
  const rows = Array.from({ length: timeline.numSlots }, (_, slot) => {
    const cell = timeline.cell(at, slot);
    if (cell === undefined) return [`${slot}`, "idle", "", "", ""];
    const request = model.requests.get(cell.request);
    const tokens = request?.num_output_tokens ?? null;
    return [`${slot}`, KINDS[cell.kind].label, nameOf(model, cell.request), count(cell.tokens), count(tokens)];
  });
  const step = timeline.at(at);
  return {
    caption: step === undefined ? "No step yet" : `Slots in step ${step.id}`,
    columns: ["slot", "doing", "request", "tokens in this step", "output tokens"],
    rows,
  };
}

/** @param {LiveModel} model @returns {Table} */
function stepsTable({ timeline }) {
  const rows = timeline.steps.slice(-MAX_ROWS).reverse().map((step) => [
    `${step.id}`,
    count(step.num_decode),
    count(step.num_prefill),
    count(step.num_padded),
    duration(step.end_ns - step.begin_ns),
    duration(step.execute_ns),
    count(step.num_running),
    count(step.num_waiting),
  ]);
  const columns = ["step", "decode tokens", "prefill tokens", "padding", "took", "computing", "running", "waiting"];
  return { caption: "The last steps, newest first", columns, rows };
}

/** @param {LiveModel} model @returns {Table} */
function blocksTable(model) {
  const counts = blockCounts(model.blocks);
  const total = Math.max(numBlocksOf(model.blocks), 1);
  const kinds = Object.entries(BLOCKS).map(([kind, { label, meaning }]) => [label, count(counts[kind]), percent(counts[kind] / total), meaning]);
  /** @type {Map<number, number>} */
  const owned = new Map();
  for (const [kind, length, owner] of model.blocks) {
    if (kind === "p" && owner >= 0) owned.set(owner, (owned.get(owner) ?? 0) + length);
  }
  const owners = [...owned].map(([owner, number]) => [nameOf(model, owner), count(number), percent(number / total), "private blocks"]);
  return { caption: "Blocks of the KV cache", columns: ["what", "blocks", "share", "meaning"], rows: [...kinds, ...owners] };
}

/** Second by second. @param {LiveModel} model @returns {Table} */
function secondsTable(model) {
  const seconds = model.tokensPerSecond.slice(-MAX_ROWS).reverse();
  const rows = seconds.map(({ ns, value }) => {
    /** @param {import("./strips.js").Point[]} points */
    const within = (points) => points.filter((point) => point.ns >= ns && point.ns < ns + NS_PER_S).map((point) => point.value);
    const [ttft, gaps] = [within(model.firstTokens), within(model.gaps)];
    return [
      `${duration(model.now_ns - ns)} ago`,
      count(value),
      count(ttft.length),
      duration(ttft.length > 0 ? quantile(ttft, 0.5) : null),
      duration(gaps.length > 0 ? quantile(gaps, 0.5) : null),
      duration(gaps.length > 0 ? quantile(gaps, 0.99) : null),
    ];
  });
  const columns = ["second", "output tokens", "first tokens", "TTFT p50", "ITL p50", "ITL p99"];
  return { caption: "The last minute, second by second", columns, rows };
}

/** The table of a panel. @param {string} panel @param {LiveModel} model @param {number | null} position @returns {Table} */
export function tableOf(panel, model, position) {
  if (panel === "slots") return slotsTable(model, position);
  if (panel === "columns") return stepsTable(model);
  return panel === "blocks" ? blocksTable(model) : secondsTable(model);
}
