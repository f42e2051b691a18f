// How long the request would have taken otherwise: asked for by a button, for the server simulates all that it recorded.

import { KeyNeeded, ServerError, askForKey, getJson } from "./api.js";
import { count, duration } from "./format.js";
import { byId, fillTable, make, setText } from "./dom.js";

/** @typedef {import("./life.js").Explanation} Explanation */
/** @typedef {{ttft_ns: number | null, e2e_ns: number | null}} Times */
/** @typedef {Times & {label: string, flag: string}} Estimate */
/**
 * What the server makes of it, in its own words.
 * @typedef {{about: string, remarks: string[], is_far_off: boolean, measured: Times, simulated: Times,
 *   estimates: Estimate[]}} Told
 */

const OFFER =
  "Estimates from a simulation of all that was recorded: alone on the server, under the other policy, with other limits. It takes up to a minute, at the lowest priority.";
const LIVE = "Estimates can be made when the request is over.";

/** Owns the panel; `onTold` hears when there are estimates. */
export class WhatIf {
  /** @param {string} name @param {() => void} onTold */
  constructor(name, onTold) {
    this.path = `/v1/requests/${encodeURIComponent(name)}/explain?what_if=true`;
    this.onTold = onTold;
    /** @type {Told | null} */
    this.told = null;
    this.button = /** @type {HTMLButtonElement} */ (byId("what-if-ask"));
    this.note = byId("what-if-note");
    this.isOffered = false;
    this.button.addEventListener("click", () => this.#ask());
  }

  /** Offer estimates where the server can make them, and say elsewhere how to get them. @param {Explanation} explanation */
  offer({ is_live, why_no_what_if }) {
    if (why_no_what_if === undefined || this.isOffered) return;
    byId("what-if-panel").hidden = false;
    this.isOffered = why_no_what_if === null && !is_live;
    this.button.hidden = !this.isOffered;
    setText(this.note, why_no_what_if !== null ? sentence(why_no_what_if) : is_live ? LIVE : OFFER);
  }

  /** What the estimate for an advised flag says, the last that tries it; null without one. @param {string} flag @returns {string | null} */
  predicted(flag) {
    const estimate = this.told?.estimates.findLast((each) => each.flag === flag.split(" ")[0]);
    if (this.told === null || estimate === undefined || estimate.e2e_ns === null) return null;
    const { simulated } = this.told;
    const first = estimate.ttft_ns === null ? "" : `to first token ${changed(estimate.ttft_ns, simulated.ttft_ns)}, `;
    return `${estimate.label}: ${first}end to end ${changed(estimate.e2e_ns, simulated.e2e_ns)}`;
  }

  async #ask() {
    this.button.disabled = true;
    setText(this.button, "Estimating…");
    setText(this.note, "The server simulates what it has recorded.");
    try {
      this.#show((await getJson(this.path)).what_if);
    } catch (error) {
      if (error instanceof KeyNeeded) await askForKey(error.message);
      else if (!(error instanceof TypeError || error instanceof ServerError)) console.error(error);
      setText(this.note, error instanceof ServerError ? sentence(error.message) : "The server did not answer; try again.");
    }
    this.button.disabled = false;
    setText(this.button, "Estimate");
  }

  /** @param {Told} told */
  #show(told) {
    this.told = told;
    this.button.hidden = true;
    setText(this.note, `${told.about}.`);
    const { measured, simulated, estimates } = told;
    const rows = [
      row("measured", measured, null),
      row("simulated as it was", simulated, null),
      ...estimates.map((each) => row(each.label, each, simulated)),
    ];
    const columns = ["estimate", "to first token", "change", "end to end", "change"];
    fillTable(/** @type {HTMLTableElement} */ (byId("what-if-table")), "Estimates", columns, rows, [1, 2, 3, 4]);
    const remarks = told.remarks.map((text, i) => {
      const isCaution = told.is_far_off && i === told.remarks.length - 1;
      return make("li", "", [isCaution ? make("strong", "", [text]) : text]);
    });
    byId("what-if-remarks").replaceChildren(...remarks);
    for (const id of ["what-if-shown", "what-if-remarks"]) byId(id).hidden = false;
    byId("what-if-shown").focus({ preventScroll: true }); // for the button, which had it, is gone
    this.onTold();
  }
}

/** @param {string} label @param {Times} times @param {Times | null} simulated @returns {string[]} */
function row(label, times, simulated) {
  /** @param {"ttft_ns" | "e2e_ns"} time */
  const cells = (time) => [duration(times[time]), simulated === null ? "" : change(times[time], simulated[time])];
  return [label, ...cells("ttft_ns"), ...cells("e2e_ns")];
}

/** A time and how it has changed: "6.31 s (−30 %)". @param {number} ns @param {number | null} before_ns @returns {string} */
function changed(ns, before_ns) {
  const by = change(ns, before_ns);
  return by === "" ? duration(ns) : `${duration(ns)} (${by})`;
}

/** In whole percents with a sign. @param {number | null} ns @param {number | null} before_ns @returns {string} */
function change(ns, before_ns) {
  if (!ns || !before_ns) return "";
  const percents = Math.round((ns / before_ns - 1) * 100);
  return `${percents < 0 ? "−" : "+"}${count(Math.abs(percents))} %`;
}

/** A message as a sentence of its own. @param {string} message @returns {string} */
function sentence(message) {
  return `${message.charAt(0).toUpperCase()}${message.slice(1)}.`;
}
