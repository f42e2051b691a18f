// Sends test prompts to this server, all at once, as any client would; for a server that only this machine can reach.

import { counted, duration } from "./format.js";
import { KeyNeeded, events } from "./api.js";
import { byId, setText } from "./dom.js";
import { quantile } from "./gaps.js";

const WORDS = "the bus stops at every corner and whoever has arrived gets off while others who wait get on".split(" ");
const SHORTEST = 0.2;

/** @typedef {{number: number, words: number, tokens: number, vary: boolean}} Wish */
/** @typedef {{firsts_ns: number[], numDone: number, numFailed: number, numTokens: number, error: string}} Outcome */

/** Lengths from the shortest share up to the whole, evenly, in a mixed order. @param {Wish} wish @param {number} i */
function shareOf(wish, i) {
  if (!wish.vary || wish.number === 1) return 1;
  return SHORTEST + ((1 - SHORTEST) * ((i * 5) % wish.number)) / (wish.number - 1);
}

/** Different beginnings, so that prompts are not all one prefix. @param {number} number @param {number} i */
function promptOf(number, i) {
  const words = Array.from({ length: Math.max(number - 2, 1) }, (_, k) => WORDS[(k + i) % WORDS.length]);
  return `Passenger ${i}: ${words.join(" ")}`;
}

/**
 * Send one prompt and count its tokens.
 * @param {string} model @param {Wish} wish @param {number} i @param {Outcome} outcome @param {AbortSignal} signal
 * @param {() => void} changed
 */
async function send(model, wish, i, outcome, signal, changed) {
  const share = shareOf(wish, i);
  const began_ms = performance.now();
  const messages = [{ role: "user", content: promptOf(Math.round(wish.words * share), i) }];
  const body = { model, messages, stream: true, max_tokens: Math.max(1, Math.round(wish.tokens * share)) };
  let isFirst = true;
  for await (const event of events("/v1/chat/completions", signal, body)) {
    if (event === "[DONE]") break;
    const delta = JSON.parse(event).choices?.[0]?.delta?.content;
    if (!delta) continue;
    if (isFirst) outcome.firsts_ns.push((performance.now() - began_ms) * 1e6);
    isFirst = false;
    outcome.numTokens += 1;
    changed();
  }
  outcome.numDone += 1;
}

/** @param {Outcome} outcome @param {number} number @param {boolean} isStopped @returns {string} */
function summary(outcome, number, isStopped) {
  const ttft = outcome.firsts_ns.length > 0 ? `, median time to first token ${duration(quantile(outcome.firsts_ns, 0.5))}` : "";
  const failed = outcome.numFailed > 0 ? `; ${outcome.numFailed} failed: ${outcome.error}` : "";
  const stopped = isStopped ? "Stopped: " : "";
  return `${stopped}${outcome.numDone} of ${counted(number, "prompt")} answered, ${counted(outcome.numTokens, "piece")} of text${ttft}${failed}.`;
}

/** Make the form work. @param {() => string} model the name of the served model */
export function tryOut(model) {
  const form = /** @type {HTMLFormElement} */ (byId("try-form"));
  const stop = /** @type {HTMLButtonElement} */ (byId("try-stop"));
  const result = byId("try-result");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const fields = new FormData(form);
    /** @param {string} name */
    const value = (name) => Number(fields.get(name));
    const wish = { number: value("number"), words: value("words"), tokens: value("tokens"), vary: fields.has("vary") };
    /** @type {Outcome} */
    const outcome = { firsts_ns: [], numDone: 0, numFailed: 0, numTokens: 0, error: "" };
    const ending = new AbortController();
    stop.disabled = false;
    stop.onclick = () => ending.abort();
    const changed = () => setText(result, summary(outcome, wish.number, false));
    setText(result, `Sending ${counted(wish.number, "prompt")}.`);
    const sendings = Array.from({ length: wish.number }, (_, i) =>
      send(model(), wish, i, outcome, ending.signal, changed).catch((error) => {
        if (ending.signal.aborted) return;
        outcome.numFailed += 1;
        outcome.error = error instanceof KeyNeeded ? "the key was not accepted" : String(error.message);
      }),
    );
    await Promise.all(sendings);
    stop.disabled = true;
    setText(result, summary(outcome, wish.number, ending.signal.aborted));
  });
}
