// Files made in the page from what it knows; nothing is asked of the server for them.

import { make } from "./dom.js";

/** @typedef {import("./timeline.js").Step} Step */

const KEPT_MS = 60_000;

/** The name of a file made now, in UTC: "everystop-trace-2026-03-01T120507Z.pftrace". @param {string} what @param {string} ending */
function fileName(what, ending) {
  return `everystop-${what}-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}Z.${ending}`;
}

/** Hand a file to whoever reads the page. @param {string} href @param {string} what @param {string} ending */
export function offer(href, what, ending) {
  const link = /** @type {HTMLAnchorElement} */ (make("a"));
  link.download = fileName(what, ending);
  link.href = href;
  link.click();
}

/** The same with its content. @param {BlobPart[]} pieces @param {string} type @param {string} what @param {string} ending */
export function offerPieces(pieces, type, what, ending) {
  const href = URL.createObjectURL(new Blob(pieces, { type }));
  offer(href, what, ending);
  setTimeout(() => URL.revokeObjectURL(href), KEPT_MS);
}

/** A line of JSON for each step, under the names of the stream; rows are [slot, request, tokens, tokens brought out].
 * @param {Step[]} steps @returns {string[]}
 */
export function stepLines(steps) {
  return steps.map((step) => {
    const record = {
      step_id: step.id,
      scheduled_ns: step.scheduled_ns,
      now_ns: step.end_ns,
      execute_ns: step.execute_ns,
      num_decode: step.num_decode,
      num_prefill_tokens: step.num_prefill,
      num_padded: step.num_padded,
      num_running: step.num_running,
      num_waiting: step.num_waiting,
      num_held: step.num_held,
      num_free_blocks: step.num_free,
      num_cached_blocks: step.num_cached,
      num_evicted_blocks: step.num_evicted,
      rows: step.cells
        .filter(({ tokens }) => tokens > 0)
        .map(({ slot, request, tokens, outputs }) => [slot, request, tokens, outputs]),
    };
    return `${JSON.stringify(record)}\n`;
  });
}
