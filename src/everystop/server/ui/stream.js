// Follows the live stream, and comes back when it breaks; says in the page how it stands.

import { KeyNeeded, ServerError, askForKey, events } from "./api.js";
import { duration } from "./format.js";
import { setText } from "./dom.js";

const FIRST_WAIT_S = 1;
const LONGEST_WAIT_S = 15;

/** @param {number} seconds */
function pause(seconds) {
  return new Promise((resolve) => setTimeout(resolve, seconds * 1000));
}

/**
 * Hand every message to `take`, for as long as the page is open.
 * @param {(message: any) => void} take @param {HTMLElement} status
 */
export async function follow(take, status) {
  /** @param {string} text @param {string} state */
  const say = (text, state) => {
    setText(status, text);
    status.className = `connection ${state}`;
  };
  const closing = new AbortController();
  addEventListener("pagehide", () => closing.abort());
  for (let wait_s = FIRST_WAIT_S; !closing.signal.aborted; wait_s = Math.min(wait_s * 2, LONGEST_WAIT_S)) {
    let why = "the stream has ended";
    try {
      for await (const event of events("/ui/stream", closing.signal)) {
        const message = JSON.parse(event);
        take(message);
        why = message.end ?? why;
        say("live", "live");
        wait_s = FIRST_WAIT_S / 2;
      }
    } catch (error) {
      if (closing.signal.aborted) return;
      if (error instanceof KeyNeeded) {
        say("a key is needed", "bad");
        await askForKey(error.message);
        wait_s = FIRST_WAIT_S / 2;
        continue;
      }
      why = error instanceof ServerError ? error.message : "the server cannot be reached";
      if (error instanceof ServerError) wait_s = Math.max(wait_s, error.retryAfter_s);
      else if (!(error instanceof TypeError)) console.error(error);
    }
    const next_s = Math.max(wait_s, FIRST_WAIT_S);
    say(`${why}; trying again in ${duration(next_s * 1e9)}`, "bad");
    await pause(next_s);
  }
}
