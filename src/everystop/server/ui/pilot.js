// Keys, pointer and wheel of the charts over a request's life.

import { MARGIN } from "./plot.js";

/** @typedef {import("./span.js").Span} Span */

const ZOOM = 1.5;
const PAN = 0.15;

/** Make a chart answer; `times` are the moments that the arrow keys stop at, in order.
 * @param {HTMLCanvasElement} canvas @param {Span} span @param {() => number[]} times
 */
export function pilot(canvas, span, times) {
  /** @param {number} by */
  const jump = (by) => {
    const now = span.cursor_ns ?? -1;
    const next = by > 0 ? times().find((ns) => ns > now) : times().findLast((ns) => ns < now);
    if (next !== undefined) span.point(next);
  };
  /** @type {Record<string, () => void>} */
  const known = {
    ArrowLeft: () => jump(-1),
    ArrowRight: () => jump(1),
    w: () => span.zoom(1 / ZOOM),
    s: () => span.zoom(ZOOM),
    a: () => span.pan(-PAN),
    d: () => span.pan(PAN),
    Escape: () => span.showWhole(),
  };
  canvas.addEventListener("keydown", (event) => {
    const act = known[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  drag(canvas, span);
}

/** @param {HTMLCanvasElement} canvas @param {Span} span */
function drag(canvas, span) {
  const width = () => Math.max(canvas.clientWidth - MARGIN.left - MARGIN.right, 10);
  /** @type {number | null} */
  let from = null;
  canvas.addEventListener("pointerdown", (event) => {
    from = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (from !== null && event.buttons !== 0) {
      span.pan((from - event.offsetX) / width());
      from = event.offsetX;
    }
    const ns = span.axis(MARGIN.left, width()).time(event.offsetX);
    span.point(Math.min(Math.max(ns, span.from), span.to));
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, () => {
      from = null;
    });
  }
  canvas.addEventListener("pointerleave", () => span.point(null));
  /** @param {WheelEvent} event */
  const wheel = (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    span.zoom(Math.exp(event.deltaY / 300), (event.offsetX - MARGIN.left) / width());
  };
  canvas.addEventListener("wheel", wheel, { passive: false });
}
