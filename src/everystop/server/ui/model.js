// What the live stream has told so far, as a timeline and as series; it draws nothing.

import { Timeline, firstAbove } from "./timeline.js";
import { RequestGaps } from "./gaps.js";
import { StepPace } from "./pace.js";

/** @typedef {import("./timeline.js").Step} Step */
/** @typedef {import("./timeline.js").Cell} Cell */
/** @typedef {import("./strips.js").Point} Point */
/**
 * @typedef {{model: string, version: string, policy: string, max_num_seqs: number, max_num_batched_tokens: number,
 *   num_blocks: number, block_size: number, sees: "all" | "own", can_send_test: boolean}} Server
 */
/**
 * A request as the stream describes it; `name` is null for somebody else's.
 * @typedef {{id: number, name: string | null, state: string, slot: number | null, num_prompt_tokens: number | null,
 *   num_cached_tokens: number | null, num_output_tokens: number | null, arrival_ns: number | null,
 *   admit_ns: number | null, first_token_ns: number | null, finish_ns: number | null, finish_reason: string | null,
 *   num_preemptions: number | null, max_gap_ns: number | null, blame: string | null}} Req
 */
/**
 * Who waits; of somebody else's request all is null but `id` and `sentence`.
 * @typedef {{id: number, name: string | null, num_prompt_tokens: number | null, since_ns: number | null,
 *   reason: string | null, sentence: string, need: number | null, have: number | null, behind: number | null}} Waiter
 */
/**
 * @typedef {{slots_busy: number, slots: number, num_waiting: number, oldest_wait_ns: number | null,
 *   kv_used_share: number, output_tokens_per_s: number, ttft_p50_ns: number | null, ttft_p95_ns: number | null,
 *   itl_p50_ns: number | null, itl_p99_ns: number | null}} Tiles
 */

const NS_PER_S = 1e9;
const MAX_ACTS = 5_000;
const MAX_REQUESTS = 5_000;
const MAX_PAST = 20_000;
const MAX_SECONDS = 600;
const NUMBERS_A_ROW = 4;

/** Owns all that the page knows. `take` folds one message in. */
export class LiveModel {
  constructor() {
    /** @type {Server | null} */
    this.server = null;
    this.timeline = new Timeline(0);
    /** @type {Map<number, Req>} */
    this.requests = new Map();
    /** @type {Waiter[]} */
    this.waiting = [];
    this.numWaiting = 0;
    /** @type {Tiles | null} */
    this.tiles = null;
    /** @type {import("./blockmap.js").BlockRun[]} */
    this.blocks = [];
    /** @type {[number, number, string][]} */
    this.acts = [];
    this.numActs = 0;
    this.now_ns = 0;
    this.uptime_s = 0;
    this.cpuShare = 0;
    this.numDropped = 0;
    /** @type {Point[]} */
    this.firstTokens = [];
    /** @type {Point[]} */
    this.gaps = [];
    /** @type {Point[]} */
    this.running = [];
    /** @type {Point[]} */
    this.queued = [];
    /** @type {Point[]} */
    this.tokensPerSecond = [];
    /** When each request's last token came. @type {Map<number, number>} */
    this.lastToken = new Map();
    this.requestGaps = new RequestGaps();
    /** Who had a slot last. @type {(number | undefined)[]} */
    this.slotHolders = [];
    this.pace = new StepPace();
    /** How many requests or acts were told of the past; so many more are remembered. */
    this.numPast = 0;
  }

  /** There is room for more of the past. */
  get hasRoom() {
    return this.timeline.steps.length < this.timeline.maxSteps && this.numPast < MAX_PAST;
  }

  /** Put what `/ui/past` tells before all that is known. @param {any} message */
  takePast(message) {
    const { timeline } = this;
    const firstId = timeline.steps[0]?.id ?? Infinity;
    const older = new LiveModel();
    const steps = message.steps.filter((/** @type {any[]} */ step) => step[0] < firstId);
    older.take({ ...message, steps, full: true, server: this.server });
    timeline.prepend(older.timeline);
    this.#takePastSeries(older);
    const { requests, lastToken } = this;
    for (const [mine, theirs] of /** @type {[Map<number, any>, Map<number, any>][]} */ ([
      [requests, older.requests],
      [lastToken, older.lastToken],
    ])) {
      const known = [...mine];
      mine.clear();
      for (const [id, value] of [...theirs, ...known]) mine.set(id, value);
    }
    this.requestGaps.addPast(older.requestGaps);
    this.acts.unshift(...older.acts);
    this.numPast += Math.max(older.requests.size, older.acts.length);
  }

  /** @param {LiveModel} older */
  #takePastSeries(older) {
    for (const name of /** @type {const} */ (["gaps", "running", "queued"])) this[name] = older[name].concat(this[name]);
    const known = new Set(this.firstTokens.map(({ ns, value }) => `${ns} ${value}`));
    const firsts = older.firstTokens.filter(({ ns, value }) => !known.has(`${ns} ${value}`));
    this.firstTokens = firsts.concat(this.firstTokens).sort((one, other) => one.ns - other.ns);
    const tokens = new Map(this.tokensPerSecond.map((point) => [point.ns, point.value]));
    for (const { ns, value } of older.tokensPerSecond) tokens.set(ns, (tokens.get(ns) ?? 0) + value);
    const seconds = [...tokens.keys()].sort((one, other) => one - other);
    const [first, last] = [seconds[0], seconds[seconds.length - 1]];
    this.tokensPerSecond = [];
    for (let ns = Math.max(first, last - MAX_SECONDS * NS_PER_S); ns <= last; ns += NS_PER_S) {
      this.tokensPerSecond.push({ ns, value: tokens.get(ns) ?? 0 });
    }
  }

  #clear() {
    this.numPast = 0;
    for (const list of [this.firstTokens, this.gaps, this.running, this.queued, this.tokensPerSecond, this.acts]) {
      list.length = 0;
    }
    for (const map of [this.requests, this.lastToken, this.requestGaps]) map.clear();
    this.pace.clear();
    this.slotHolders = [];
  }

  /** Fold a message in. @param {any} message */
  take(message) {
    if (message.full) this.#begin(message.server);
    this.now_ns = message.now_ns;
    this.uptime_s = message.uptime_s;
    for (const request of message.requests ?? []) this.#takeRequest(request);
    for (const step of message.steps ?? []) this.#takeStep(step);
    for (const request of message.requests ?? []) if (request.finish_ns !== null) this.itlP99(request);
    this.timeline.now_ns = message.now_ns;
    this.timeline.offset_ms = Date.now() - message.now_ns / 1e6;
    this.#addTokens(Math.floor(message.now_ns / NS_PER_S), 0);
    if (message.waiting !== undefined) this.waiting = message.waiting;
    this.numWaiting = message.num_waiting ?? this.waiting.length;
    if (message.kv !== undefined && message.kv !== null) this.blocks = message.kv.runs;
    this.tiles = message.tiles ?? this.tiles;
    this.cpuShare = message.cost?.cpu_share ?? this.cpuShare;
    this.numDropped = message.dropped ?? this.numDropped;
    for (const act of message.acts ?? []) this.acts.push(act);
    this.numActs += message.acts?.length ?? 0;
    this.#forget();
  }

  /** @param {Server} server */
  #begin(server) {
    this.server = server;
    this.timeline.clear(server.max_num_seqs);
    this.#clear();
  }

  /** @param {Req} request */
  #takeRequest(request) {
    const before = this.requests.get(request.id);
    this.requests.delete(request.id);
    this.requests.set(request.id, request);
    const { first_token_ns, arrival_ns } = request;
    if (first_token_ns !== null && arrival_ns !== null && (before?.first_token_ns ?? null) === null) {
      this.firstTokens.push({ ns: first_token_ns, value: first_token_ns - arrival_ns });
    }
  }

  /** @param {any[]} message */
  #takeStep(message) {
    const [id, scheduled_ns, end_ns, execute_ns, num_decode, num_prefill, num_padded] = message;
    const [num_running, num_waiting, num_held, num_free, num_cached, num_evicted, rows] = message.slice(7);
    const begin_ns = Math.max(this.timeline.last?.end_ns ?? 0, scheduled_ns);
    const numRows = rows.length / NUMBERS_A_ROW;
    const is_slow = this.pace.isSlow(numRows, end_ns - begin_ns);
    const counts = { num_decode, num_prefill, num_padded, num_running, num_waiting, num_held, num_free, num_cached };
    /** @type {Step} */
    const step = { id, scheduled_ns, begin_ns, end_ns, execute_ns, num_evicted, is_slow, ...counts, cells: [] };
    this.#addRows(step, rows);
    this.#addOthers(step);
    this.timeline.add(step);
    if (numRows > 0 && num_prefill === 0) this.pace.addDecode(numRows, end_ns - begin_ns);
    push(this.running, end_ns, num_running);
    push(this.queued, end_ns, num_waiting);
  }

  /** @param {Step} step @param {number[]} rows */
  #addRows(step, rows) {
    const firstPadded = rows.length - step.num_padded * NUMBERS_A_ROW;
    for (let i = 0; i < rows.length; i += NUMBERS_A_ROW) {
      const [slot, request, tokens, outputs] = rows.slice(i, i + NUMBERS_A_ROW);
      const kind = i >= firstPadded ? "waste" : this.#kindOf(step, request, tokens, outputs);
      step.cells.push({ slot, request, tokens, outputs, kind });
      if (slot >= 0) this.slotHolders[slot] = request;
      if (outputs > 0 && kind !== "waste") this.#countOutputs(step, request, outputs);
    }
  }

  /**
   * @param {Step} step @param {number} id @param {number} tokens @param {number} outputs
   * @returns {import("./timeline.js").Kind}
   */
  #kindOf(step, id, tokens, outputs) {
    const first_ns = this.lastToken.has(id) ? 0 : (this.requests.get(id)?.first_token_ns ?? Infinity);
    const finish_ns = this.requests.get(id)?.finish_ns ?? Infinity;
    if (finish_ns < step.end_ns) return "waste"; // it was on its way when its request ended
    const hasBegun = first_ns < step.end_ns;
    if (hasBegun && outputs > 0 && tokens <= outputs) return step.is_slow ? "slow" : "decode";
    if (hasBegun) return "recompute";
    const isKnown = this.requests.get(id)?.first_token_ns !== undefined;
    if (!isKnown && tokens === 1 && outputs === 1) return step.is_slow ? "slow" : "decode";
    return "prefill";
  }

  /** @param {Step} step @param {number} request @param {number} outputs */
  #countOutputs(step, request, outputs) {
    const last_ns = this.lastToken.get(request);
    this.lastToken.set(request, step.end_ns);
    this.#addTokens(Math.floor(step.end_ns / NS_PER_S), outputs);
    this.requestGaps.add(request, outputs, last_ns === undefined ? null : step.end_ns - last_ns);
    if (last_ns === undefined) return;
    this.gaps.push({ ns: step.end_ns, value: step.end_ns - last_ns });
  }

  /** Count tokens for a second; the series has a point for every second, also for those without a step.
   * @param {number} second @param {number} tokens
   */
  #addTokens(second, tokens) {
    const series = this.tokensPerSecond;
    const last = series.length === 0 ? second - 1 : series[series.length - 1].ns / NS_PER_S;
    for (let next = Math.max(last + 1, second - MAX_SECONDS); next <= second; next += 1) {
      series.push({ ns: next * NS_PER_S, value: 0 });
    }
    const point = series[series.length - 1 - Math.max(0, last - second)];
    if (point !== undefined) point.value += tokens;
  }

  /** Slots without a row: held by a finished request, or on board without a token. @param {Step} step */
  #addOthers(step) {
    const withRow = new Set(step.cells.map((cell) => cell.slot));
    for (const [slot, request] of this.slotHolders.entries()) {
      if (request === undefined || withRow.has(slot)) continue;
      const known = this.requests.get(request);
      const isOver = known === undefined || (known.finish_ns !== null && known.finish_ns <= step.begin_ns + 1);
      if (isOver && step.num_held > 0) this.#addCell(step, slot, request, "waste");
      else if (isOver || known?.slot !== slot || known.state !== "running") delete this.slotHolders[slot];
      else this.#addCell(step, slot, request, "skipped");
    }
  }

  /** @param {Step} step @param {number} slot @param {number} request @param {import("./timeline.js").Kind} kind */
  #addCell(step, slot, request, kind) {
    step.cells.push({ slot, request, tokens: 0, outputs: 0, kind });
  }

  /** What 99 of 100 of a request's gaps between tokens stay below; null if that is not known. @param {Req} request */
  itlP99(request) {
    return this.requestGaps.p99(request);
  }

  /** The longest of its gaps between tokens; null before there is one, or if it is somebody else's. @param {Req} request */
  longestGap(request) {
    return this.requestGaps.longest(request);
  }

  #forget() {
    const oldest = this.timeline.steps[0]?.begin_ns ?? 0;
    for (const series of [this.firstTokens, this.gaps, this.running, this.queued, this.tokensPerSecond]) {
      const gone = firstAbove(series, oldest, (point) => point.ns) - 1;
      if (gone > series.length / 4) series.splice(0, gone);
    }
    const maxActs = MAX_ACTS + this.numPast;
    if (this.acts.length > maxActs * 1.2) this.acts.splice(0, this.acts.length - maxActs);
    for (const [id, request] of this.requests) {
      if (this.requests.size <= MAX_REQUESTS + this.numPast) break;
      if (request.finish_ns === null) continue;
      for (const map of [this.requests, this.lastToken]) map.delete(id);
      this.requestGaps.forget(id);
    }
  }
}

/** Add a point where the value has changed. @param {Point[]} series @param {number} ns @param {number} value */
function push(series, ns, value) {
  if (series.length === 0 || series[series.length - 1].value !== value) series.push({ ns, value });
}
