// @ts-check
// Makes the still pictures of a report answer: point at a request, select it, zoom the time axis, play, sort.
// Everything shown comes from the page itself; all text goes in as text, never as markup.

/** @typedef {[index: number, group: string, prompt: number, output: number, times: (number | null)[]]} Sent */
/**
 * Where an axis of durations lies, and what is at its ends.
 * @typedef {[left: number, width: number, low: number, high: number, isLog: boolean]} Scale
 */
/**
 * `scales` are those of the wide picture and of the narrow one.
 * @typedef {{policies: string[], curves: Record<string, number[][][]>, requests: Sent[], scales: Scale[][]}} Data
 */
/** @typedef {{svg: SVGSVGElement, left: number, width: number, end: number}} Timed */

const NS = "http://www.w3.org/2000/svg";
const data = /** @type {Data} */ (JSON.parse(byId("data").textContent || "{}"));
const requests = new Map(data.requests.map((request) => [request[0], request]));
const tip = byId("tip");
/** @type {Timed[]} */
const timed = [...document.querySelectorAll("svg[data-end]")].map((element) => {
  const svg = /** @type {SVGSVGElement} */ (element);
  return { svg, left: Number(svg.dataset.left), width: Number(svg.dataset.width), end: Number(svg.dataset.end) };
});
timed.forEach((each, i) => {
  const clip = draw("clipPath", { id: `beside-${i}` });
  clip.append(draw("rect", { x: each.left - 8, y: 0, width: each.width + 16, height: each.svg.viewBox.baseVal.height }));
  each.svg.prepend(clip);
  for (const frame of each.svg.querySelectorAll(".unclipped")) frame.setAttribute("clip-path", `url(#beside-${i})`);
});
const wholeEnd = Math.max(0.001, ...timed.map((each) => each.end));
const view = { from: 0, to: wholeEnd };
/** @type {number | null} */
let selected = null;

/** @param {string} id */
function byId(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

/** @param {string} name @param {Record<string, string | number>} attributes */
function draw(name, attributes) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  return element;
}

/** @param {number | null} seconds */
function inTime(seconds) {
  if (seconds === null) return "–";
  if (seconds >= 1 || seconds === 0) return `${seconds.toPrecision(3)} s`;
  return seconds >= 1e-3 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${(seconds * 1e6).toPrecision(3)} µs`;
}

/** @param {number} index */
function describe(index) {
  const request = requests.get(index);
  if (!request) return `request ${index}`;
  const [, group, prompt, output, times] = request;
  const lines = [`request ${index} (${group}): ${prompt} prompt tokens, ${output} output tokens`];
  data.policies.forEach((policy, i) => lines.push(`${policy}: ${inTime(times[i])} from sending to the end`));
  return lines.join("\n");
}

// ---- requests: point and select ----------------------------------------------------------------

/** @param {number | null} index */
function light(index) {
  for (const svg of document.querySelectorAll("svg.picture")) {
    const own = index === null ? [] : [...svg.querySelectorAll(`.r[data-r="${index}"]`)];
    for (const element of svg.querySelectorAll(".r.on")) element.classList.remove("on");
    for (const element of own) element.classList.add("on");
    svg.classList.toggle("has-on", own.length > 0);
  }
}

/** @param {number | null} index */
function select(index) {
  selected = index;
  light(index);
  for (const row of document.querySelectorAll("#requests tbody tr")) {
    const isOn = index !== null && /** @type {HTMLElement} */ (row).dataset.r === String(index);
    row.classList.toggle("on", isOn);
    row.querySelector("button")?.setAttribute("aria-pressed", String(isOn));
  }
  byId("says").textContent = index === null ? "" : describe(index).replaceAll("\n", "; ");
  remember();
}

/** @param {EventTarget | null} target */
function requestAt(target) {
  const owner = target instanceof Element ? target.closest(".picture .r") : null;
  return owner instanceof SVGElement ? Number(owner.dataset.r) : null;
}

document.addEventListener("pointermove", (event) => {
  const index = requestAt(event.target);
  tip.hidden = index === null;
  if (index === null) {
    light(selected);
    return;
  }
  tip.textContent = describe(index);
  const right = event.clientX + 14 + tip.offsetWidth > innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - tip.offsetWidth - 10 : event.clientX + 14)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 6)}px`;
  if (selected === null) light(index);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    tip.hidden = true;
    select(null);
  }
});

// ---- the time axis: cursor, brush, zoom --------------------------------------------------------

/** @param {Timed} each @param {number} seconds */
function place(each, seconds) {
  return each.left + ((seconds - view.from) / (view.to - view.from)) * each.width;
}

/** @param {Timed} each @param {PointerEvent} event */
function secondsAt(each, event) {
  const box = each.svg.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * each.svg.viewBox.baseVal.width;
  return view.from + ((x - each.left) / each.width) * (view.to - view.from);
}

/** @param {number} from @param {number} to */
function show(from, to) {
  const span = Math.min(Math.max(to - from, wholeEnd / 2000), wholeEnd);
  view.from = Math.min(Math.max(0, from), wholeEnd - span);
  view.to = view.from + span;
  for (const each of timed) stretch(each);
  cursor(null);
  remember();
}

/** Moves what was drawn for [0, end] to where the view has it; words and marks keep their shape. @param {Timed} each */
function stretch(each) {
  const scale = each.end / (view.to - view.from);
  const shift = place(each, 0) - each.left * scale;
  const isWhole = view.from === 0 && view.to === wholeEnd;
  for (const group of each.svg.querySelectorAll(".moves")) {
    group.setAttribute("transform", `matrix(${scale} 0 0 1 ${shift} 0)`);
    for (const part of group.querySelectorAll("text, use")) {
      const x = Number(part.getAttribute("x"));
      const whole = part.localName === "text" ? (part.closest(".move") ?? part) : part;
      whole.setAttribute("transform", `matrix(${1 / scale} 0 0 1 ${x * (1 - 1 / scale)} 0)`);
    }
  }
  for (const old of each.svg.querySelectorAll(".tick")) old.remove();
  for (const axis of each.svg.querySelectorAll(".axis")) ticks(each, axis, isWhole);
}

/** The distance between at most so many round values. @param {number} span @param {number} most @returns {number} */
function niceStep(span, most) {
  const rough = span / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough) ?? rough;
}

/** @param {Timed} each @param {Element} axis @param {boolean} isWhole */
function ticks(each, axis, isWhole) {
  const own = [...axis.querySelectorAll(".tick-x")];
  for (const tick of own) tick.setAttribute("visibility", isWhole ? "visible" : "hidden");
  const y = own[0]?.querySelector("text")?.getAttribute("y");
  if (isWhole || !y) return;
  const most = Math.max(2, Math.floor(each.width / 80));
  const step = niceStep(view.to - view.from, most);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  for (let i = Math.ceil(view.from / step - 1e-9); i * step <= view.to + 1e-9; i++) {
    const label = draw("text", { class: "tick", x: place(each, i * step), y });
    label.textContent = (i * step).toFixed(digits);
    axis.append(label);
  }
}

/** @param {number[][]} curve @param {number} seconds */
function valueAt([xs, ys], seconds) {
  let low = 0;
  let high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= seconds) low = middle + 1;
    else high = middle;
  }
  return low ? ys[low - 1] : 0;
}

/** @param {number | null} seconds */
function cursor(seconds) {
  for (const each of timed) {
    const isSeen = seconds !== null && seconds >= view.from && seconds <= view.to;
    const x = place(each, seconds ?? 0);
    const line = each.svg.querySelector(".cursor") ?? each.svg.appendChild(draw("line", { class: "cursor", y1: 0 }));
    for (const [key, value] of [["x1", x], ["x2", x], ["y2", each.svg.viewBox.baseVal.height]]) {
      line.setAttribute(String(key), String(value));
    }
    line.setAttribute("visibility", isSeen ? "visible" : "hidden");
  }
  if (seconds === null) {
    byId("now").textContent = "";
    return;
  }
  const parts = data.policies.map((policy, i) => {
    const work = data.curves["at work"][i]?.[0]?.length ? `${valueAt(data.curves["at work"][i], seconds)} at work, ` : "";
    return `${policy}: ${work}${valueAt(data.curves.tokens[i] ?? [[], []], seconds)} tokens out`;
  });
  byId("now").textContent = [`at ${seconds.toFixed(3)} s`, ...parts].join(" · ");
}

for (const each of timed) {
  /** @type {{from: number, x: number, box: Element} | null} */
  let brush = null;
  each.svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    const box = draw("rect", { class: "brush", y: 0, height: each.svg.viewBox.baseVal.height });
    brush = { from: secondsAt(each, event), x: event.clientX, box: each.svg.appendChild(box) };
    each.svg.setPointerCapture(event.pointerId);
  });
  each.svg.addEventListener("pointermove", (event) => {
    const seconds = secondsAt(each, event);
    cursor(Math.min(Math.max(seconds, view.from), view.to));
    if (!brush) return;
    const [a, b] = [place(each, brush.from), place(each, seconds)];
    brush.box.setAttribute("x", String(Math.min(a, b)));
    brush.box.setAttribute("width", String(Math.abs(a - b)));
  });
  each.svg.addEventListener("pointerup", (event) => {
    if (!brush) return;
    const { from, x, box } = brush;
    brush = null;
    box.remove();
    if (Math.abs(event.clientX - x) > 6) {
      const to = secondsAt(each, event);
      show(Math.min(from, to), Math.max(from, to));
    } else {
      const under = requestAt(document.elementFromPoint(event.clientX, event.clientY));
      select(under === selected ? null : under);
    }
  });
  each.svg.addEventListener("pointercancel", () => {
    brush?.box.remove();
    brush = null;
  });
  each.svg.addEventListener("pointerleave", () => cursor(null));
  each.svg.addEventListener("dblclick", () => show(0, wholeEnd));
}

for (const svg of document.querySelectorAll("svg.picture:not([data-end])")) {
  svg.addEventListener("click", (event) => {
    const index = requestAt(event.target);
    if (index !== null) select(index === selected ? null : index);
  });
}

/** @param {number} factor @param {number} shift */
function move(factor, shift) {
  const span = view.to - view.from;
  const middle = (view.from + view.to) / 2 + shift * span;
  show(middle - (span * factor) / 2, middle + (span * factor) / 2);
}

byId("zoom-in").addEventListener("click", () => move(0.5, 0));
byId("zoom-out").addEventListener("click", () => move(2, 0));
byId("earlier").addEventListener("click", () => move(1, -0.5));
byId("later").addEventListener("click", () => move(1, 0.5));
byId("whole").addEventListener("click", () => show(0, wholeEnd));

// ---- play: the cursor runs through all pictures at once ----------------------------------------

let playing = 0;

/** @param {boolean} isOn */
function play(isOn) {
  cancelAnimationFrame(playing);
  playing = 0;
  byId("play").setAttribute("aria-pressed", String(isOn));
  byId("play").textContent = isOn ? "Stop" : "Play";
  if (!isOn) return;
  let last = performance.now();
  let at = view.from;
  /** @param {number} now */
  const frame = (now) => {
    at += ((now - last) / 1000) * Number(/** @type {HTMLSelectElement} */ (byId("speed")).value);
    last = now;
    cursor(Math.min(at, view.to));
    if (at >= view.to) play(false);
    else playing = requestAnimationFrame(frame);
  };
  playing = requestAnimationFrame(frame);
}

byId("play").addEventListener("click", () => play(!playing));

// ---- tables: sort by any column, select by a button --------------------------------------------

/** @param {HTMLTableElement} table @param {number} column @param {number} sign */
function sortRows(table, column, sign) {
  const body = table.tBodies[0];
  /** @param {HTMLTableRowElement} row */
  const key = (row) => {
    const text = row.cells[column].textContent?.trim() ?? "";
    return text === "–" ? NaN : Number.isNaN(Number(text)) ? text : Number(text);
  };
  const rows = [...body.rows].map((row) => ({ row, key: key(row) }));
  rows.sort((a, b) => {
    if (typeof a.key === "string" || typeof b.key === "string") return sign * String(a.key).localeCompare(String(b.key));
    if (Number.isNaN(a.key) || Number.isNaN(b.key)) return Number(Number.isNaN(a.key)) - Number(Number.isNaN(b.key));
    return sign * (a.key - b.key);
  });
  body.append(...rows.map((each) => each.row));
}

const table = /** @type {HTMLTableElement} */ (byId("requests"));
[...(table.tHead?.rows[0].cells ?? [])].forEach((head, column) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = head.textContent;
  head.replaceChildren(button);
  button.addEventListener("click", () => {
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of table.tHead?.rows[0].cells ?? []) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    sortRows(table, column, sign);
  });
});
for (const row of table.tBodies[0].rows) {
  const head = row.cells[0];
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = head.textContent;
  button.title = "show this request in all pictures";
  button.setAttribute("aria-pressed", "false");
  head.replaceChildren(button);
  button.addEventListener("click", () => select(selected === Number(row.dataset.r) ? null : Number(row.dataset.r)));
}

// ---- how durations are spread: a tick at p99, too near to that at p95 for still pictures -------

const WORDS_APART = 4;

for (const axis of document.querySelectorAll("#durations .axis")) {
  const all = [...axis.querySelectorAll(".tick-y")];
  const [middle, upper] = ["p50", "p95"].map((name) => all.find((each) => each.textContent?.trim() === name));
  if (!middle || !upper) continue;
  const [y50, y95] = [middle, upper].map((each) => Number(each.querySelector("use")?.getAttribute("y")));
  const tick = /** @type {Element} */ (upper.cloneNode(true));
  tick.setAttribute("transform", `translate(0 ${((y95 - y50) * (0.99 - 0.95)) / (0.95 - 0.5)})`);
  const [above, below] = [tick, upper].map((each) => /** @type {Element} */ (each.querySelector("text")));
  const y = Number(below.getAttribute("y"));
  above.textContent = "p99";
  above.setAttribute("y", String(y - WORDS_APART));
  below.setAttribute("y", String(y + WORDS_APART));
  upper.after(tick);
}

// ---- how durations are spread: on a log axis or a linear one, as the reader likes --------------

const LEAST_SHARE = 1e-3; // of the greatest duration: nothing shorter is told apart in these pictures
const WORDS_PX = 7; // about the width of a letter

/** Values of an axis by place, and places by value. @param {Scale} scale */
function mapping([left, width, low, high, isLog]) {
  return {
    /** @param {number} x */
    value: (x) => (isLog ? low * (high / low) ** ((x - left) / width) : low + ((x - left) / width) * (high - low)),
    /** @param {number} value */
    x: (value) => {
      const share = isLog ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low);
      return left + width * share;
    },
  };
}

/** The axis of the other kind for values at these places. @param {Scale} scale @param {number[]} xs @returns {Scale} */
function otherKind(scale, xs) {
  const [left, width, , high, isLog] = scale;
  if (isLog) return [left, width, 0, high, false];
  const values = xs.map(mapping(scale).value).filter((value) => value > high * LEAST_SHARE);
  return [left, width, Math.min(high / 10, ...values) / 1.15, high, true];
}

/** Round values of an axis. @param {Scale} scale @returns {number[]} */
function roundValues([, width, low, high, isLog]) {
  const most = Math.max(2, Math.floor(width / 80));
  if (!isLog) {
    const step = niceStep(high - low, most);
    return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, i) => i * step);
  }
  const decades = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) decades.push(10 ** power);
  const inside = decades.filter((value) => value >= low);
  if (inside.length > 1) return inside;
  return decades.flatMap((value) => [value, 2 * value, 5 * value]).filter((value) => value >= low && value <= high);
}

/** One of the pictures of how durations are spread, whose axis can be turned into one of the other kind, and back. */
class Spread {
  /** @param {Element} svg @param {Scale} scale @param {Element} across @param {Element} up the axes */
  constructor(svg, scale, across, up) {
    this.scale = scale;
    this.across = across;
    const clip = up.querySelector(".tick-y path")?.getAttribute("clip-path");
    const inside = [...svg.querySelectorAll(`[clip-path="${clip}"]`)].filter((part) => !part.closest(".axis"));
    this.paths = inside.filter((part) => part.localName === "path");
    this.marks = inside.flatMap((part) => [...part.querySelectorAll("use")]);
    const heights = [...up.querySelectorAll("use")].map((use) => Number(use.getAttribute("y")));
    this.words = [...svg.querySelectorAll("text")].filter((text) => {
      const [x, y] = [Number(text.getAttribute("x")), Number(text.getAttribute("y"))];
      const isHere = x >= scale[0] && x <= scale[0] + scale[1] && y >= Math.min(...heights) && y <= Math.max(...heights);
      return isHere && text.textContent?.startsWith("SLO ");
    });
    /** @type {(() => void)[]} */
    this.undo = [];
  }

  /** As it was drawn. */
  reset() {
    for (const undo of this.undo.splice(0)) undo();
  }

  /** @param {Element} element @param {string} name @param {string} value */
  #set(element, name, value) {
    const old = element.getAttribute(name);
    this.undo.push(() => (old === null ? element.removeAttribute(name) : element.setAttribute(name, old)));
    element.setAttribute(name, value);
  }

  turn() {
    const points = this.paths.map((path) => [...(path.getAttribute("d") ?? "").matchAll(/[ML](-?[\d.]+)/g)]);
    const scale = otherKind(this.scale, points.flat().map((found) => Number(found[1])));
    const [from, to] = [mapping(this.scale), mapping(scale)];
    /** @param {string} x */
    const moved = (x) => to.x(from.value(Number(x))).toFixed(1);
    for (const path of this.paths) {
      const d = (path.getAttribute("d") ?? "").replace(/([ML])(-?[\d.]+)/g, (_, act, x) => act + moved(x));
      this.#set(path, "d", d);
    }
    for (const mark of this.marks) this.#set(mark, "x", moved(mark.getAttribute("x") ?? "0"));
    for (const text of this.words) this.#moveWords(text, scale, from, to);
    this.#axis(scale, to);
  }

  /** The name of a line goes with it, on the side that has room. @param {Element} text @param {Scale} scale
   * @param {ReturnType<typeof mapping>} from @param {ReturnType<typeof mapping>} to
   */
  #moveWords(text, [left, width], from, to) {
    const old = Number(text.getAttribute("x"));
    const isBefore = text.getAttribute("style")?.includes("text-anchor:end") ?? false;
    const line = old + (isBefore ? 5 : -5);
    const long = WORDS_PX * (text.textContent ?? "").length + 10;
    const place = to.x(from.value(line));
    const side = isBefore && place - long < left ? long : !isBefore && place + long > left + width ? -long : 0;
    const transform = `translate(${(place - line + side).toFixed(1)} 0)`;
    this.#set(text, "transform", transform);
    const box = text.previousElementSibling;
    if (box?.localName === "path" && !box.hasAttribute("clip-path")) this.#set(box, "transform", transform);
  }

  /** @param {Scale} scale @param {ReturnType<typeof mapping>} to */
  #axis(scale, to) {
    const own = [...this.across.querySelectorAll(".tick-x")];
    const y = own[0]?.querySelector("text")?.getAttribute("y") ?? "0";
    for (const tick of own) this.#set(tick, "visibility", "hidden");
    for (const value of roundValues(scale)) {
      const label = draw("text", { class: "tick", x: to.x(value), y });
      label.textContent = String(Number(value.toPrecision(3)));
      this.across.append(label);
      this.undo.push(() => label.remove());
    }
    const title = [...this.across.children].find((each) => each.localName === "text" && !each.classList.contains("tick"));
    const words = title?.textContent ?? "";
    if (!title) return;
    title.textContent = scale[4] ? `${words} (log scale)` : words.replace(" (log scale)", "");
    this.undo.push(() => {
      title.textContent = words;
    });
  }
}

const spreads = data.scales.flatMap((scales, i) => {
  const svg = document.querySelectorAll("#durations svg.picture")[i];
  const axes = svg ? [...svg.querySelectorAll(".axis")] : [];
  return scales.flatMap((scale, k) => (axes.length === 2 * scales.length ? [new Spread(svg, scale, axes[2 * k], axes[2 * k + 1])] : []));
});

if (spreads.length) {
  const label = document.createElement("label");
  const choice = document.createElement("select");
  label.className = "small";
  label.textContent = "axes of durations ";
  for (const name of ["as they fit", "log", "linear"]) choice.add(new Option(name));
  label.append(choice);
  document.querySelector("#durations .frame")?.before(label);
  choice.addEventListener("change", () => {
    for (const spread of spreads) {
      spread.reset();
      if (choice.value !== "as they fit" && spread.scale[4] !== (choice.value === "log")) spread.turn();
    }
  });
}

// ---- dumbbells: in another order ---------------------------------------------------------------

/** @type {Record<string, (request: Sent) => number>} */
const ORDERS = {
  "the greatest gain first": () => 0,
  "order of arrival": (request) => request[0],
  "prompt tokens": (request) => request[2],
  "output tokens": (request) => request[3],
};

/** @param {SVGSVGElement} svg @param {(request: Sent) => number} by */
function reorder(svg, by) {
  const parts = /** @type {SVGElement[]} */ ([...svg.querySelectorAll(".r")]);
  const old = [...new Set(parts.map((part) => Number(part.dataset.r)))];
  const rank = new Map(old.map((index, row) => [index, row]));
  /** @param {number} index */
  const key = (index) => by(requests.get(index) ?? [index, "", 0, 0, []]);
  const order = [...old].sort((a, b) => key(a) - key(b) || (rank.get(a) ?? 0) - (rank.get(b) ?? 0));
  const ys = old.map((index) => Number(svg.querySelector(`.r[data-r="${index}"] use`)?.getAttribute("y")));
  const target = new Map(order.map((index, row) => [index, row]));
  for (const part of parts) {
    const index = Number(part.dataset.r);
    part.setAttribute("transform", `translate(0 ${ys[target.get(index) ?? 0] - ys[rank.get(index) ?? 0]})`);
  }
  for (const label of svg.querySelectorAll(".tick-y text")) {
    const y = Number(label.getAttribute("y"));
    const row = ys.reduce((best, each, i) => (Math.abs(each - y) < Math.abs(ys[best] - y) ? i : best), 0);
    label.textContent = String(order[row]);
  }
}

for (const figure of document.querySelectorAll("figure[id^=winners]")) {
  const label = document.createElement("label");
  const choice = document.createElement("select");
  label.className = "small";
  label.textContent = "sorted by ";
  for (const name of Object.keys(ORDERS)) choice.add(new Option(name));
  label.append(choice);
  figure.querySelector(".frame")?.before(label);
  choice.addEventListener("change", () => {
    for (const svg of figure.querySelectorAll("svg")) reorder(svg, ORDERS[choice.value]);
  });
}

// ---- the address remembers what is shown -------------------------------------------------------

function remember() {
  const parts = [];
  if (selected !== null) parts.push(`r=${selected}`);
  if (view.from > 0 || view.to < wholeEnd) parts.push(`t=${view.from.toFixed(4)}-${view.to.toFixed(4)}`);
  const address = parts.length ? `#${parts.join("&")}` : location.pathname + location.search;
  if (parts.length || location.hash.match(/[#&][rt]=/)) history.replaceState(null, "", address);
}

const shown = location.hash.match(/[#&]t=([\d.]+)-([\d.]+)/);
const chosen = location.hash.match(/[#&]r=(\d+)/);
if (shown && Number(shown[2]) > Number(shown[1])) show(Number(shown[1]), Number(shown[2]));
if (chosen && requests.has(Number(chosen[1]))) select(Number(chosen[1]));
byId("bar").hidden = timed.length === 0;
export {};
