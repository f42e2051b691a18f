// What the live page says about a step, a slot, a request: for tips, for readouts, and for those who do not see charts.

import { BLOCKS, KINDS } from "./grammar.js";
import { count, counted, duration, percent } from "./format.js";
import { nameOf } from "./tables.js";
import { blockCounts, numBlocksOf } from "./blockmap.js";

/** @typedef {import("./model.js").LiveModel} LiveModel */
/** @typedef {import("./timeline.js").Step} Step */
/** @typedef {import("./view.js").Cursor} Cursor */

/** @param {Step} step @returns {string} */
function stepWords(step) {
  const parts = [counted(step.num_decode, "decode token"), counted(step.num_prefill, "prefill token")];
  if (step.num_padded > 0) parts.push(counted(step.num_padded, "padding row"));
  return `step ${count(step.id)}: ${parts.join(", ")}, ${duration(step.end_ns - step.begin_ns)}`;
}

/** @param {LiveModel} model @param {number} id @returns {string[]} */
function requestWords(model, id) {
  const request = model.requests.get(id);
  if (request === undefined || request.name === null) return [];
  const cached = request.num_cached_tokens ?? 0;
  const prompt = counted(request.num_prompt_tokens ?? 0, "prompt token") + (cached > 0 ? ` (${count(cached)} cached)` : "");
  const words = [prompt, counted(request.num_output_tokens ?? 0, "output token")];
  const { arrival_ns, admit_ns } = request;
  if (arrival_ns !== null && admit_ns !== null) words.push(`queued ${duration(admit_ns - arrival_ns)}`);
  if ((request.num_preemptions ?? 0) > 0) words.push(counted(request.num_preemptions ?? 0, "preemption"));
  return words;
}

/** Where the cursor is, in lines. @param {LiveModel} model @param {Cursor} cursor @returns {string[]} */
export function cursorWords(model, cursor) {
  const step = model.timeline.at(cursor.position);
  if (step === undefined) return [];
  if (cursor.slot === null) return [stepWords(step)];
  const cell = model.timeline.cell(cursor.position, cursor.slot);
  if (cell === undefined) return [`slot ${cursor.slot}: idle`, stepWords(step)];
  const doing = `slot ${cursor.slot}: ${nameOf(model, cell.request)}, ${KINDS[cell.kind].label}`;
  const tokens = cell.tokens > 0 ? `, ${counted(cell.tokens, "token")}` : "";
  return [doing + tokens, ...requestWords(model, cell.request), stepWords(step)];
}

/** The pinned request in one line. @param {LiveModel} model @param {number} id @returns {string} */
export function pinnedWords(model, id) {
  return `${nameOf(model, id)} is pinned: ${requestWords(model, id).join(", ") || "its numbers are not yours to see"}.`;
}

/** The slot chart for somebody who does not see it. @param {LiveModel} model @returns {string} */
export function slotsSummary(model) {
  const { timeline } = model;
  const step = timeline.last;
  if (step === undefined) return "Slot chart: no step yet.";
  /** @type {Map<string, number>} */
  const numbers = new Map();
  for (const { kind } of step.cells) numbers.set(KINDS[kind].label, (numbers.get(KINDS[kind].label) ?? 0) + 1);
  const parts = [...numbers].map(([label, number]) => `${number} ${label}`);
  parts.push(`${timeline.numSlots - step.cells.length} idle`);
  return `Slot chart, ${counted(timeline.numSlots, "slot")}; in the last step ${step.id}: ${parts.join(", ")}.`;
}

/** @param {LiveModel} model @returns {string} */
export function columnsSummary(model) {
  const step = model.timeline.last;
  const budget = model.server?.max_num_batched_tokens ?? 0;
  return step === undefined ? "Step composition: no step yet." : `Step composition, budget ${counted(budget, "token")}; last ${stepWords(step)}.`;
}

/**
 * A block of the map and who has it: "block 12: shared by 8: r4, r7, r9 and 5 others". Who may not be seen is counted only.
 * @param {LiveModel} model @param {import("./blockmap.js").FoundBlock} found @returns {string}
 */
export function blockWords(model, found) {
  const { block, kind, owners, numOwners } = found;
  const words = `block ${count(block)}: ${BLOCKS[kind].label}`;
  if (numOwners < 2) return owners.length === 0 ? words : `${words}, ${nameOf(model, owners[0])}`;
  const names = owners.filter((id) => id >= 0).map((id) => nameOf(model, id));
  if (names.length === 0) return `${words} by ${numOwners} requests`;
  const rest = numOwners - names.length;
  if (rest > 0) names.push(counted(rest, "other"));
  return `${words} by ${numOwners}: ${names.slice(0, -1).join(", ")} and ${names[names.length - 1]}`;
}

/** @param {LiveModel} model @returns {string} */
export function blocksSummary(model) {
  const counts = blockCounts(model.blocks);
  const total = Math.max(numBlocksOf(model.blocks), 1);
  const parts = Object.entries(BLOCKS).map(([kind, { label }]) => `${label} ${percent(counts[kind] / total)}`);
  return `Map of ${counted(total, "block")} of the KV cache: ${parts.join(", ")}.`;
}
