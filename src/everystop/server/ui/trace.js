// The steps that the page remembers as a picture on tracks, those of `everystop trace`: steps, slots, who waits, counters.

import { Picture } from "./tracks.js";

/** @typedef {import("./model.js").LiveModel} LiveModel */
/** @typedef {import("./timeline.js").Step} Step */
/** @typedef {import("./timeline.js").Cell} Cell */
/** @typedef {import("./tracks.js").Arguments} Arguments */

const NS_PER_US = 1000;
/** What a slice in a slot is called; in a step without a token there is none. @type {Partial<Record<import("./grammar.js").Kind, string>>} */
const STRETCHES = { prefill: "prefill", recompute: "recompute", decode: "decode", slow: "decode" };
/** Slices that go on over consecutive steps. */
const RUNS = ["decode", "padding"];

/** Arguments without those that say nothing. @param {Record<string, string | number | null | undefined>} all @returns {Arguments} */
function present(all) {
  return /** @type {Arguments} */ (Object.fromEntries(Object.entries(all).filter(([, value]) => Boolean(value))));
}

/** What a trace calls a request. @param {LiveModel} model @param {number} id @returns {string} */
function nameOf({ requests }, id) {
  return id < 0 || requests.get(id)?.name === null ? "another request" : `r${id}`;
}

/** Draws one slot: who was in it, and what each step did for him. */
class SlotPen {
  /** @param {Picture} picture @param {number} slot @param {LiveModel} model */
  constructor(picture, slot, model) {
    this.picture = picture;
    this.model = model;
    this.track = picture.track(`slot ${slot}`);
    /** Who is in it. @type {{request: number, isHeld: boolean, end_ns: number} | null} */
    this.stay = null;
    /** @type {{kind: string, begin_ns: number, end_ns: number, tokens: number, step: number, steps: number} | null} */
    this.stretch = null;
    this.position = -1;
  }

  /** What the step at a position did in the slot. @param {number} position @param {Step} step @param {Cell} cell */
  take(position, step, { request, tokens, kind }) {
    const isHeld = kind === "waste";
    if (this.stay?.request !== request || this.stay.isHeld !== isHeld) {
      this.leave(step.end_ns);
      this.#board(step, request, isHeld);
    }
    this.position = position;
    if (this.stay !== null) this.stay.end_ns = step.end_ns;
    const what = isHeld ? (tokens > 0 ? "padding" : "") : (STRETCHES[kind] ?? "");
    if (this.stretch !== null && this.stretch.kind === what && RUNS.includes(what)) {
      this.stretch.end_ns = step.end_ns;
      this.stretch.tokens += tokens;
      this.stretch.steps += 1;
      return;
    }
    this.#close();
    if (what === "") return;
    this.stretch = { kind: what, begin_ns: step.begin_ns, end_ns: step.end_ns, tokens, step: step.id, steps: 1 };
  }

  /** @param {Step} step @param {number} id @param {boolean} isHeld */
  #board(step, id, isHeld) {
    const request = this.model.requests.get(id);
    const boarding = {
      id: request?.name,
      prompt_tokens: request?.num_prompt_tokens,
      cached_tokens: request?.num_cached_tokens,
    };
    const args = isHeld ? { request: nameOf(this.model, id) } : present(boarding);
    this.picture.begin(this.track, step.begin_ns, isHeld ? "held" : nameOf(this.model, id), args);
    this.stay = { request: id, isHeld, end_ns: step.end_ns };
  }

  #close() {
    if (this.stretch === null) return;
    const { kind, begin_ns, end_ns, tokens, step, steps } = this.stretch;
    this.picture.begin(this.track, begin_ns, kind, steps > 1 ? { tokens, step, steps } : { tokens, step });
    this.picture.end(this.track, end_ns);
    this.stretch = null;
  }

  /** The slot is nobody's any more; whoever was in it had ended by then, or was preempted. @param {number} by_ns */
  leave(by_ns) {
    this.#close();
    if (this.stay === null) return;
    const { request: id, isHeld, end_ns } = this.stay;
    const request = this.model.requests.get(id);
    const isOver = !isHeld && request !== undefined && request.finish_ns !== null && request.finish_ns <= by_ns;
    const ending = { end: request?.finish_reason, output_tokens: request?.num_output_tokens };
    this.picture.end(this.track, end_ns, isOver ? present(ending) : undefined);
    this.stay = null;
  }
}

/** @param {Step} step @returns {string} */
function stepName({ num_decode, num_prefill, num_padded }) {
  if (num_prefill === 0) return num_decode + num_padded > 0 ? "decode" : "bookkeeping";
  return num_decode + num_padded > 0 ? "mixed" : "prefill";
}

/** @param {Picture} picture @param {Step[]} steps */
function drawSteps(picture, steps) {
  const track = picture.track("steps");
  for (const step of steps) {
    const { begin_ns, end_ns, id, execute_ns, num_prefill, num_padded } = step;
    const args = present({
      rows: step.cells.filter(({ tokens }) => tokens > 0).length,
      tokens: step.num_decode + num_prefill + num_padded,
      prefill_tokens: num_prefill,
      padded_rows: num_padded,
      execute_us: Math.floor(execute_ns / NS_PER_US),
    });
    picture.begin(track, begin_ns, stepName(step), { step: id, ...args });
    picture.end(track, end_ns);
  }
}

/** Who waited while the steps went by, as far as the page knows: until the first boarding, or until now.
 * @param {Picture} picture @param {LiveModel} model @param {Step[]} steps
 */
function drawWaits(picture, model, steps) {
  const { requests, waiting, now_ns } = model;
  /** @type {{id: number, from_ns: number, to_ns: number, args: Arguments}[]} */
  const waits = [];
  for (const { id, arrival_ns, admit_ns, finish_ns, num_prompt_tokens: prompt_tokens } of requests.values()) {
    const to_ns = admit_ns ?? finish_ns;
    if (arrival_ns !== null && to_ns !== null) waits.push({ id, from_ns: arrival_ns, to_ns, args: present({ prompt_tokens }) });
  }
  for (const { id, since_ns, reason, num_prompt_tokens: prompt_tokens } of waiting) {
    if (since_ns !== null) waits.push({ id, from_ns: since_ns, to_ns: now_ns, args: present({ prompt_tokens, reason }) });
  }
  const oldest_ns = steps[0]?.begin_ns ?? now_ns;
  const inSight = waits.filter((wait) => wait.to_ns > oldest_ns).sort((one, other) => one.from_ns - other.from_ns);
  /** @type {{track: number, end_ns: number}[]} */
  const lanes = [];
  for (const { id, from_ns, to_ns, args } of inSight) {
    const free = lanes.find(({ end_ns }) => end_ns <= from_ns);
    const lane = free ?? { track: picture.track("waiting", lanes[0]?.track), end_ns: 0 };
    if (free === undefined) lanes.push(lane);
    lane.end_ns = to_ns;
    picture.begin(lane.track, from_ns, nameOf(model, id), args);
    picture.end(lane.track, to_ns);
  }
}

/** @param {Picture} picture @param {LiveModel} model @param {Step[]} steps */
function drawSlots(picture, model, steps) {
  const numUsed = 1 + steps.reduce((last, { cells }) => Math.max(last, ...cells.map(({ slot }) => slot)), -1);
  const pens = Array.from({ length: numUsed }, (_, slot) => new SlotPen(picture, slot, model));
  for (const [position, step] of steps.entries()) {
    for (const cell of step.cells) pens[cell.slot]?.take(position, step, cell);
    for (const pen of pens) if (pen.position < position) pen.leave(step.end_ns);
  }
  for (const pen of pens) pen.leave(Infinity);
}

/** Counts after each step; the tokens of a step fall to 0 where nothing follows it for longer than it took.
 * @param {Picture} picture @param {Step[]} steps
 */
function drawCounters(picture, steps) {
  const tokens = picture.counter("tokens in the step");
  const running = picture.counter("running");
  const waiting = picture.counter("waiting");
  const free = picture.counter("free blocks");
  const held = picture.counter("held slots");
  for (const [i, step] of steps.entries()) {
    const { begin_ns, end_ns } = step;
    tokens(begin_ns, step.num_decode + step.num_prefill + step.num_padded);
    if ((steps[i + 1]?.begin_ns ?? Infinity) - end_ns > end_ns - begin_ns) tokens(end_ns, 0);
    running(end_ns, step.num_running);
    waiting(end_ns, step.num_waiting);
    free(end_ns, step.num_free);
    held(end_ns, step.num_held);
  }
}

/** Steps that the page remembers, as a picture. @param {LiveModel} model @param {Step[]} steps @returns {Picture} */
export function traceOf(model, steps) {
  const picture = new Picture();
  drawSteps(picture, steps);
  drawWaits(picture, model, steps);
  drawSlots(picture, model, steps);
  drawCounters(picture, steps);
  return picture;
}
