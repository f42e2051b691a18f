// Asks the server where a request's time went, and again as long as the request is not over.

import { KeyNeeded, ServerError, askForKey, getJson } from "./api.js";

/** @typedef {import("./life.js").Explanation} Explanation */
/**
 * Who is told: what there is to show, how the asking goes, or that there is nothing to be had.
 * @typedef {{show: (explanation: Explanation) => void, say: (text: string, state: string) => void,
 *   refuse: (error: ServerError) => void}} Listener
 */

const LIVE_MS = 1000;
const RETRY_MS = 4000;
const PASSING = [429, 503]; // says something of the server at this moment, and nothing of the request

/**
 * Ask until the request is over, is refused, or `signal` says stop.
 * @param {string} name @param {Listener} listener @param {AbortSignal} [signal] @returns {Promise<void>}
 */
export async function inquire(name, { show, say, refuse }, signal) {
  const path = `/v1/requests/${encodeURIComponent(name)}/explain`;
  while (!signal?.aborted) {
    let wait_ms = LIVE_MS;
    try {
      const explanation = await getJson(path);
      if (signal?.aborted) return;
      show(explanation);
      say(explanation.is_live ? "live" : "complete", explanation.is_live ? "live" : "");
      if (!explanation.is_live) return;
    } catch (error) {
      if (signal?.aborted) return;
      if (error instanceof KeyNeeded) {
        await askForKey(error.message);
        continue;
      }
      if (error instanceof ServerError && !PASSING.includes(error.status)) {
        refuse(error);
        return;
      }
      if (!(error instanceof TypeError || error instanceof ServerError)) console.error(error);
      const why = error instanceof ServerError ? error.message : "the server cannot be reached";
      say(`${why}; trying again`, "bad");
      wait_ms = RETRY_MS;
    }
    await pause(wait_ms);
  }
}

/** Wait, and while nobody looks wait on. @param {number} ms @returns {Promise<void>} */
async function pause(ms) {
  await new Promise((resolve) => setTimeout(resolve, ms));
  while (document.hidden) {
    await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
}

/** Which of a request's sequences took longest. @param {Explanation[]} choices @returns {number} */
export function slowest(choices) {
  return choices.reduce((so_far, { e2e_ns }, i) => (e2e_ns > choices[so_far].e2e_ns ? i : so_far), 0);
}
