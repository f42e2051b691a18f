// The live page: takes the stream, and has each panel drawn as often as it is worth.

import { BLOCKS, KINDS } from "./grammar.js";
import { count, counted, dayAndTime, duration, percent } from "./format.js";
import { LiveModel } from "./model.js";
import { View } from "./view.js";
import { Surface, currentTheme } from "./surface.js";
import { drawSlots, slotAt, slotChartHeight } from "./slots.js";
import { drawColumns } from "./columns.js";
import { drawStrip } from "./strips.js";
import { blockAt, drawBlocks, gridOf, numBlocksOf } from "./blockmap.js";
import { MARGIN } from "./plot.js";
import { navigate } from "./navigate.js";
import { VerdictStrip } from "./tiles.js";
import { WaitingRoom } from "./waiting.js";
import { DecisionLog } from "./log.js";
import { RecentRequests } from "./recent.js";
import { Tip } from "./tip.js";
import { tableOf } from "./tables.js";
import { blockWords, blocksSummary, columnsSummary, cursorWords, pinnedWords, slotsSummary } from "./words.js";
import { byId, canvasOf, fillTable, keyOf, make, requestLink, setText } from "./dom.js";
import { chooseTheme } from "./theme.js";
import { tryOut } from "./tryout.js";
import { follow } from "./stream.js";
import { Past } from "./past.js";
import { offer, offerPieces, stepLines } from "./saving.js";
import { traceOf } from "./trace.js";
import { perfettoPieces } from "./perfetto.js";
import { stillPng, stillSvg } from "./still.js";
import { Recording } from "./recording.js";

const PANELS = ["slots", "columns", "blocks", "strips"];
const HINT = "Point at a bar to read it; click it to follow its request through all panels.";
const ENDINGS = "● finished  ✕ failed  ⊘ cancelled";
const CHARTS_MS = 100;
const NUMBERS_MS = 250;
const LISTS_MS = 500;
const WORDS_MS = 2000;
const CALM_MS = 1000;

const model = new LiveModel();
const view = new View(model.timeline);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const tiles = new VerdictStrip(byId("tiles"));
const waitingRoom = new WaitingRoom(byId("waiting"), byId("waiting-note"));
const log = new DecisionLog(byId("log"));
const recent = new RecentRequests(/** @type {HTMLTableElement} */ (byId("recent")), byId("recent-note"));
const tip = new Tip(byId("tip"));

const past = new Past(model, view, byId("past"));
const recording = new Recording(byId("record"), byId("recording"), model, saveTrace);

const slots = new Surface(canvasOf("slots"), (sheet) => drawSlots(sheet, view, teller));
const columns = new Surface(canvasOf("columns"), (sheet) =>
  drawColumns(sheet, view, model.server?.max_num_batched_tokens ?? 0),
);
const blocks = new Surface(canvasOf("blocks"), (sheet) => drawBlocks(sheet, model.blocks, view.pinned));
const strips = Object.entries({
  "strip-tokens": () => stripOf("lines", model.tokensPerSecond.slice(0, -1)),
  "strip-load": () => loadStrip(),
  "strip-ttft": () => stripOf("dots", model.firstTokens),
  "strip-itl": () => stripOf("heat", model.gaps),
}).map(([id, strip]) => new Surface(canvasOf(id), (sheet) => drawStrip(sheet, view, strip(), id === "strip-itl")));

/** @type {import("./slots.js").Teller} */
const teller = {
  label: (id) => (model.requests.get(id)?.name != null ? `r${id}` : ""),
  numCached: (id) => model.requests.get(id)?.num_cached_tokens ?? 0,
  end: (id) => {
    const request = model.requests.get(id);
    return request?.finish_ns == null ? null : { ns: request.finish_ns, reason: request.finish_reason };
  },
};

/** @param {"lines" | "dots" | "heat"} kind @param {import("./strips.js").Point[]} points @returns {import("./strips.js").Strip} */
function stripOf(kind, points) {
  return { kind, lines: [{ name: "", points }] };
}

/** @returns {import("./strips.js").Strip} */
function loadStrip() {
  const lines = [{ name: "running", points: model.running }, { name: "waiting", points: model.queued, isDashed: true }];
  return { kind: "lines", lines };
}

/** Last time each kind of panel was shown. @type {Record<string, number>} */
const shown = { charts: 0, strips: 0, numbers: 0, lists: 0, words: 0 };

/** Whether it is time again. @param {string} what @param {number} every_ms */
function isDue(what, every_ms) {
  const now_ms = performance.now();
  if (now_ms - shown[what] < every_ms - 5) return false;
  shown[what] = now_ms;
  return true;
}

/** Have everything shown that is due. @param {any} message */
function take(message) {
  recording.before(message.full);
  model.take(message);
  recording.after();
  if (message.full) begin();
  if (document.hidden || message.more) return;
  if (!view.isPaused && isDue("charts", calm.matches ? CALM_MS : CHARTS_MS)) drawCharts([slots, columns]);
  if (!view.isPaused && isDue("strips", calm.matches ? CALM_MS : LISTS_MS)) drawCharts(strips);
  if (isDue("numbers", calm.matches ? CALM_MS : NUMBERS_MS)) showNumbers();
  if (isDue("lists", calm.matches ? CALM_MS : LISTS_MS)) showLists();
  if (isDue("words", WORDS_MS)) showWords();
}

/** The first message of a stream has come: the page fits itself to the server. */
function begin() {
  const { server } = model;
  if (server === null) return;
  setText(byId("policy"), server.policy);
  byId("try").hidden = !server.can_send_test;
  document.title = `Everystop: ${server.model}`;
  for (const what of Object.keys(shown)) shown[what] = -Infinity;
  view.pinned = null;
  view.cursor = null;
  past.begin();
  view.changed();
}

/** @param {Surface[]} surfaces */
function drawCharts(surfaces) {
  for (const surface of surfaces) surface.invalidate();
}

/** The chart grows with the number of slots that have been in use. */
function fitSlots() {
  const { numShown, numSlots } = model.timeline;
  const height = `${slotChartHeight(numShown)}px`;
  if (slots.canvas.style.height === height) return;
  slots.canvas.style.height = height;
  const idle = numSlots - numShown;
  setText(byId("slots-idle"), idle > 0 ? `${counted(idle, "more slot")} not used yet` : "");
}

function showNumbers() {
  tiles.show(model);
  fitSlots();
}

function showLists() {
  const { server, numWaiting, timeline } = model;
  if (server === null) return;
  const sees = server.sees === "own" ? ", your requests only" : "";
  setText(byId("server"), `${server.model} · version ${server.version} · up ${duration(model.uptime_s * 1e9)}${sees}`);
  setText(byId("waiting-count"), counted(numWaiting, "request"));
  waitingRoom.show(model.waiting, numWaiting, model.now_ns, view.pinned);
  log.show(model.acts, model.numActs, view.pinned);
  recent.show(model, view.pinned);
  blocks.invalidate();
  setText(byId("blocks-evicted"), `${count(timeline.last?.num_evicted ?? 0)} evicted`);
  const dropped = model.numDropped > 0 ? ` ${counted(model.numDropped, "step")} left out, because this tab was slow.` : "";
  setText(byId("cost"), `This stream takes ${percent(model.cpuShare)} of the server's CPU time.${dropped}`);
}

function showWords() {
  slots.canvas.setAttribute("aria-label", slotsSummary(model));
  columns.canvas.setAttribute("aria-label", columnsSummary(model));
  blocks.canvas.setAttribute("aria-label", blocksSummary(model));
  for (const panel of PANELS) if (!byId(`${panel}-table`).hidden && !view.isPaused) showTable(panel);
  showPinned();
}

/** @param {string} panel */
function showTable(panel) {
  const table = /** @type {HTMLTableElement} */ (byId(`${panel}-table`).firstElementChild);
  const { caption, columns: heads, rows } = tableOf(panel, model, view.cursor?.position ?? null);
  fillTable(table, caption, heads, rows);
}

/** Somebody has moved the view or the cursor. */
function viewChanged() {
  drawCharts([slots, columns, ...strips]);
  byId("pause").setAttribute("aria-pressed", String(view.isPaused));
  setText(byId("pause"), view.isPaused ? "Go on" : "Pause");
  byId("steps").setAttribute("aria-pressed", String(view.mode === "steps"));
  const words = view.cursor === null ? [] : cursorWords(model, view.cursor);
  tip.show(words, tipPlace());
  if (view.isPaused && view.pinned === null) setText(byId("readout"), words.join("; "));
  else if (view.pinned === null) setText(byId("readout"), HINT);
  if (view.isPaused && !byId("slots-table").hidden) showTable("slots");
  past.look();
}

/** Where the tip belongs: beside the cursor. @returns {{x: number, y: number} | null} */
function tipPlace() {
  const { cursor } = view;
  const step = cursor === null ? undefined : model.timeline.at(cursor.position);
  if (cursor === null || cursor.slot === null || step === undefined) return null;
  const { clientWidth, clientHeight } = slots.canvas;
  const x = view.axis(MARGIN.left, clientWidth - MARGIN.left - MARGIN.right).ofStep(cursor.position, step)[1];
  return { x, y: ((cursor.slot + 1) / model.timeline.numShown) * (clientHeight - MARGIN.bottom) };
}

/** Follow one request through all panels. @param {number | null} id */
function pin(id) {
  view.pinned = id;
  view.changed();
  blocks.invalidate();
  showPinned();
  showLists();
}

function showPinned() {
  const readout = byId("readout");
  if (view.pinned === null) {
    if (readout.querySelector("button") !== null) readout.replaceChildren(HINT);
    return;
  }
  const words = pinnedWords(model, view.pinned);
  if (readout.querySelector("button") === null || readout.dataset.id !== `${view.pinned}`) pinnedParts(readout, view.pinned);
  setText(/** @type {Element} */ (readout.firstElementChild), words);
}

/** @param {HTMLElement} readout @param {number} id */
function pinnedParts(readout, id) {
  const name = model.requests.get(id)?.name ?? null;
  const unpin = make("button", "", ["Unpin"]);
  unpin.addEventListener("click", () => pin(null));
  readout.dataset.id = `${id}`;
  readout.replaceChildren(make("span"), " ", name === null ? "" : requestLink(name, "Why was it slow?"), unpin);
}

/** What lies under the pointer in the map of blocks. @param {PointerEvent} event */
function readBlock(event) {
  const { clientWidth, clientHeight } = blocks.canvas;
  const grid = gridOf(numBlocksOf(model.blocks), clientWidth, clientHeight);
  const found = blockAt(model.blocks, grid, event.offsetX, event.offsetY);
  setText(byId("blocks-readout"), found === null ? "" : blockWords(model, found));
}

/** @param {string} panel @param {HTMLElement} button */
function toggleTable(panel, button) {
  const table = byId(`${panel}-table`);
  table.hidden = !table.hidden;
  byId(`${panel}-chart`).hidden = !table.hidden;
  button.setAttribute("aria-pressed", String(!table.hidden));
  if (!table.hidden) showTable(panel);
}

/** When it was at the right edge of the charts, by this machine's clock. */
function edgeDate() {
  return view.dateOf(Math.min(view.axis(0, 1).times[1], model.now_ns));
}

/** What the slot chart shows, as a picture to keep; in its place there may be its table. @returns {import("./still.js").Chart} */
function slotChart() {
  const { server } = model;
  const width = slots.canvas.clientWidth || byId("slots-table").clientWidth;
  const height = slotChartHeight(model.timeline.numShown);
  const about = server === null ? [] : [server.model, server.policy, `Everystop ${server.version}`];
  const caption = [ENDINGS, ...about, `until ${dayAndTime(edgeDate())}`];
  const key = Object.values(KINDS).slice(1);
  return { draw: (sheet) => drawSlots(sheet, view, teller), width, height, theme: currentTheme(), key, caption };
}

/** @param {import("./timeline.js").Step[]} steps */
function saveTrace(steps) {
  offerPieces(perfettoPieces(traceOf(model, steps)), "application/octet-stream", "trace", "pftrace");
}

function wireButtons() {
  byId("pause").addEventListener("click", () => view.pause(!view.isPaused));
  byId("steps").addEventListener("click", () => view.show(view.mode === "time" ? "steps" : "time"));
  byId("zoom-in").addEventListener("click", () => view.zoom(1 / 1.5));
  byId("zoom-out").addEventListener("click", () => view.zoom(1.5));
  byId("save-png").addEventListener("click", () => offer(stillPng(slotChart()), "slots", "png"));
  byId("save-svg").addEventListener("click", () => offerPieces([stillSvg(slotChart())], "image/svg+xml", "slots", "svg"));
  byId("save-trace").addEventListener("click", () => saveTrace(model.timeline.steps));
  byId("save-steps").addEventListener("click", () => {
    offerPieces(stepLines(model.timeline.steps), "application/jsonl", "steps", "jsonl");
  });
  byId("definitions").addEventListener("click", () => {
    const isDefined = byId("tiles").classList.toggle("defined");
    byId("definitions").setAttribute("aria-pressed", String(isDefined));
  });
  for (const button of document.querySelectorAll("[data-table]")) {
    const element = /** @type {HTMLElement} */ (button);
    element.setAttribute("aria-pressed", "false");
    element.addEventListener("click", () => toggleTable(element.dataset.table ?? "", element));
  }
}

function start() {
  const idle = make("span", "muted");
  idle.id = "slots-idle";
  chooseTheme(/** @type {HTMLSelectElement} */ (byId("theme")));
  byId("slots-legend").append(...Object.values(KINDS).slice(1).map((what) => keyOf(what, what.label)), ENDINGS, idle);
  byId("columns-legend").append(
    keyOf(KINDS.decode, "decode"),
    keyOf(KINDS.prefill, "prefill"),
    keyOf(KINDS.waste, "padding"),
    make("span", "muted", ["tokens on a square-root scale; dashed: the budget; line below: how long the step took"]),
  );
  byId("blocks-legend").append(...Object.values(BLOCKS).map((what) => keyOf(what, what.label)));
  view.listeners.push(viewChanged);
  /** @param {number} _x @param {number} y */
  const slot = (_x, y) => slotAt(y, slots.canvas.clientHeight, model.timeline.numShown);
  navigate(slots, view, { slotAt: slot, pin });
  navigate(columns, view, { pin });
  for (const strip of strips) navigate(strip, view, { pin });
  blocks.canvas.addEventListener("pointermove", readBlock);
  wireButtons();
  setText(byId("readout"), HINT);
  tryOut(() => model.server?.model ?? "");
  follow(take, byId("connection"));
}

start();
