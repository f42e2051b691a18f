// Sends test prompts to this server, all at once; for a server that only this machine can reach.
//
// A browser opens six connections to a server, and the stream has one of them. So prompts do not go one by one, of which
// most would wait in the browser, but as lists, one for each number of tokens wanted.

import { counted, duration } from "./format.js";
import { KeyNeeded, events } from "./api.js";
import { byId, setText } from "./dom.js";
import { quantile } from "./gaps.js";

const WORDS = "the bus stops at every corner and whoever has arrived gets off while others who wait get on".split(" ");
const SHORTEST = 0.2;
const MAX_LISTS = 4;

/** @typedef {{number: number, words: number, tokens: number, vary: boolean}} Wish */
/** @typedef {{firsts_ns: number[], numDone: number, numFailed: number, numTokens: number, error: string}} Outcome */

/** @typedef {{prompt: string[], max_tokens: number}} List */

/** From the shortest share up to the whole, evenly. @param {number} i @param {number} number */
function shareOf(i, number) {
  return number === 1 ? 1 : SHORTEST + ((1 - SHORTEST) * i) / (number - 1);
}

/** Different beginnings, so that prompts are not all one prefix. @param {number} number @param {number} i */
function promptOf(number, i) {
  const words = Array.from({ length: Math.max(number - 2, 1) }, (_, k) => WORDS[(k + i) % WORDS.length]);
  return `Passenger ${i}: ${words.join(" ")}`;
}

/**
 * The prompts by how many tokens they want; within a list they vary in length, in a mixed order.
 * @param {Wish} wish @returns {List[]}
 */
function listsOf({ number, words, tokens, vary }) {
  const numLists = vary ? Math.min(number, MAX_LISTS) : 1;
  const lists = Array.from({ length: numLists }, (_, k) => ({
    prompt: /** @type {string[]} */ ([]),
    max_tokens: Math.max(1, Math.round(tokens * shareOf(k, numLists))),
  }));
  for (let i = 0; i < number; i += 1) {
    const share = vary ? shareOf((i * 5) % number, number) : 1;
    lists[i % numLists].prompt.push(promptOf(Math.round(words * share), i));
  }
  return lists;
}

/**
 * Send one list, and count what comes of each prompt, and those that fail.
 * @param {string} model @param {List} list @param {Outcome} outcome @param {AbortSignal} signal @param {() => void} changed
 */
async function send(model, list, outcome, signal, changed) {
  const began_ms = performance.now();
  /** @type {Set<number>} */
  const begun = new Set();
  let numDone = 0;
  try {
    for await (const event of events("/v1/completions", signal, { model, ...list, stream: true })) {
      if (event === "[DONE]") break;
      const { choices = [], error } = JSON.parse(event);
      if (error) throw new Error(error.message);
      for (const { index, text, finish_reason } of choices) {
        if (!begun.has(index)) outcome.firsts_ns.push((performance.now() - began_ms) * 1e6);
        begun.add(index);
        if (text) outcome.numTokens += 1;
        if (!finish_reason) continue;
        numDone += 1;
        outcome.numDone += 1;
      }
      changed();
    }
    if (numDone < list.prompt.length) throw new Error("the answer ended early");
  } catch (error) {
    if (signal.aborted) return;
    outcome.numFailed += list.prompt.length - numDone;
    outcome.error = error instanceof KeyNeeded ? "the key was not accepted" : String(/** @type {Error} */ (error).message);
  }
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
    const sendings = listsOf(wish).map((list) => send(model(), list, outcome, ending.signal, changed));
    await Promise.all(sendings);
    stop.disabled = true;
    setText(result, summary(outcome, wish.number, ending.signal.aborted));
  });
}
