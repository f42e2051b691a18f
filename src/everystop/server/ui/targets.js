// The tile for targets of latency: whoever looks types them in, this browser keeps them, and the server knows nothing of
// them. A request is judged as `everystop compare` does: by its first token, and by its longest gap.

import { percent } from "./format.js";
import { make, setText } from "./dom.js";
import { drawSpark } from "./strips.js";
import { Surface } from "./surface.js";

/** @typedef {import("./model.js").Req} Req */
/** @typedef {import("./model.js").LiveModel} LiveModel */
/** In milliseconds; null where nothing is wanted. @typedef {{ttft_ms: number | null, itl_ms: number | null}} Targets */
/** @typedef {{kept: number, judged: number}} Score */

const KEY = "everystop-targets";
const SECONDS = 60;
const NS_PER_S = 1e9;
const NS_PER_MS = 1e6;
const WHOLE = ["stop", "length"];
const DEFINITION =
  "Of the requests that ended in the last 60 s, the share that kept the targets typed in here: time to first token, from " +
  "arrival, and the longest gap between two tokens. Failed ones have not kept them, cancelled ones do not count. The " +
  "targets stay in this browser.";

/** Whether a request that is over kept the targets; null if it does not count, or that is not known.
 * @param {Req} request @param {Targets} targets @returns {boolean | null}
 */
function keeps({ name, arrival_ns, first_token_ns, finish_reason, max_gap_ns, num_output_tokens }, { ttft_ms, itl_ms }) {
  if (name === null || arrival_ns === null || finish_reason === "abort") return null;
  if (!WHOLE.includes(finish_reason ?? "")) return false;
  if (first_token_ns === null) return (num_output_tokens ?? 0) > 0 ? null : false;
  if (ttft_ms !== null && first_token_ns - arrival_ns > ttft_ms * NS_PER_MS) return false;
  return itl_ms === null || (max_gap_ns ?? 0) <= itl_ms * NS_PER_MS;
}

/** How many requests that ended in the minute before kept them. @param {Iterable<Req>} requests @param {Targets} targets
 * @param {number} now_ns @returns {Score}
 */
export function scoreOf(requests, targets, now_ns) {
  const score = { kept: 0, judged: 0 };
  for (const request of requests) {
    const { finish_ns } = request;
    if (finish_ns === null || finish_ns > now_ns || finish_ns <= now_ns - SECONDS * NS_PER_S) continue;
    const isKept = keeps(request, targets);
    if (isKept === null) continue;
    score.judged += 1;
    if (isKept) score.kept += 1;
  }
  return score;
}

/** @param {Score} score @returns {string} */
export function scoreText({ kept, judged }) {
  if (judged === 0) return "–";
  return kept < judged && kept / judged >= 0.995 ? "> 99 %" : percent(kept / judged);
}

/** What was typed in before; whatever else lies there is nothing. @returns {Targets} */
function storedTargets() {
  /** @param {unknown} value */
  const positive = (value) => (typeof value === "number" && value > 0 && Number.isFinite(value) ? value : null);
  try {
    const { ttft_ms, itl_ms } = JSON.parse(localStorage.getItem(KEY) ?? "{}");
    return { ttft_ms: positive(ttft_ms), itl_ms: positive(itl_ms) };
  } catch {
    return { ttft_ms: null, itl_ms: null };
  }
}

/** @param {string} id @param {number | null} value @returns {HTMLInputElement} */
function fieldFor(id, value) {
  const field = /** @type {HTMLInputElement} */ (make("input"));
  field.id = id;
  field.type = "number";
  field.min = "1";
  field.step = "any";
  field.placeholder = "none";
  field.value = value === null ? "" : `${value}`;
  return field;
}

/** Owns the tile. */
export class TargetsTile {
  /** @param {HTMLElement} list */
  constructor(list) {
    this.targets = storedTargets();
    this.second = -1;
    /** @type {number[]} */
    this.values = [];
    /** @type {LiveModel | null} */
    this.model = null;
    this.value = make("span", "value", ["–"]);
    this.detail = make("span", "detail");
    const canvas = /** @type {HTMLCanvasElement} */ (make("canvas", "spark"));
    canvas.setAttribute("aria-hidden", "true");
    this.surface = new Surface(canvas, (sheet) => drawSpark(sheet, this.values));
    this.fields = {
      ttft_ms: fieldFor("target-ttft", this.targets.ttft_ms),
      itl_ms: fieldFor("target-itl", this.targets.itl_ms),
    };
    for (const field of Object.values(this.fields)) field.addEventListener("input", () => this.#typed());
    const item = make("li", "tile", [
      make("span", "name", ["SLO"]),
      this.value,
      this.detail,
      canvas,
      make("span", "targets", [
        make("label", "", ["TTFT, ms", this.fields.ttft_ms]),
        make("label", "", ["ITL, ms", this.fields.itl_ms]),
      ]),
      make("span", "definition", [DEFINITION]),
    ]);
    item.title = DEFINITION;
    list.append(item);
    this.#showParts();
  }

  get isSet() {
    return this.targets.ttft_ms !== null || this.targets.itl_ms !== null;
  }

  /** Only where there are targets is there a figure. */
  #showParts() {
    this.value.hidden = this.surface.canvas.hidden = !this.isSet;
    if (!this.isSet) setText(this.detail, "no targets yet");
  }

  /** Other targets hold from now on, for what was before as well. */
  #typed() {
    /** @param {HTMLInputElement} field */
    const target = (field) => (field.value !== "" && field.validity.valid ? field.valueAsNumber : null);
    this.targets = { ttft_ms: target(this.fields.ttft_ms), itl_ms: target(this.fields.itl_ms) };
    if (this.isSet) localStorage.setItem(KEY, JSON.stringify(this.targets));
    else localStorage.removeItem(KEY);
    this.values.length = 0;
    this.second = -1;
    this.#showParts();
    if (this.model !== null) this.show(this.model);
  }

  /** Show how things stand; once a second the sparkline grows. @param {LiveModel} model */
  show(model) {
    this.model = model;
    if (!this.isSet) return;
    const requests = [...model.requests.values()];
    const score = scoreOf(requests, this.targets, model.now_ns);
    setText(this.value, scoreText(score));
    setText(this.detail, score.judged === 0 ? "none has ended" : `${score.kept} of ${score.judged}`);
    const second = Math.floor(model.now_ns / NS_PER_S);
    if (second === this.second) return;
    this.second = second;
    /** @param {number} ns */
    const share = (ns) => {
      const { kept, judged } = scoreOf(requests, this.targets, ns);
      return judged === 0 ? NaN : kept / judged;
    };
    if (this.values.length <= 1) {
      const past = Array.from({ length: SECONDS - 1 }, (_, i) => share((second - SECONDS + 1 + i) * NS_PER_S));
      this.values.splice(0, this.values.length, ...past);
    }
    this.values.push(share(model.now_ns));
    if (this.values.length > SECONDS) this.values.shift();
    this.surface.invalidate();
  }
}
