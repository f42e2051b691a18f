// Keys, pointer and wheel of the charts over a view. Keys work only while a chart has the focus.

import { MARGIN, axisOf } from "./plot.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./surface.js").Surface} Surface */

const ZOOM = 1.25;
const PAN = 0.15;

/**
 * What a key does; everything else is left to the browser.
 * @param {View} view @param {(request: number | null) => void} pin
 * @returns {Record<string, () => void>}
 */
function actions(view, pin) {
  /** @param {number} by */
  const step = (by) => {
    if (!view.isPaused) view.pause(true);
    view.point((view.cursor?.position ?? view.timeline.end) + by, view.cursor?.slot ?? null);
  };
  /** @param {number} by */
  const slot = (by) => {
    const { numShown: numSlots } = view.timeline;
    const now = view.cursor?.slot ?? (by > 0 ? -1 : numSlots);
    view.point(view.cursor?.position ?? view.timeline.end - 1, Math.min(Math.max(now + by, 0), numSlots - 1));
  };
  return {
    " ": () => view.pause(!view.isPaused),
    ArrowLeft: () => step(-1),
    ArrowRight: () => step(1),
    ArrowUp: () => slot(-1),
    ArrowDown: () => slot(1),
    w: () => view.zoom(1 / ZOOM, shareOf(view)),
    s: () => view.zoom(ZOOM, shareOf(view)),
    a: () => view.pan(-PAN),
    d: () => view.pan(PAN),
    Home: () => step(-Infinity),
    End: () => view.pause(false),
    Enter: () => pin(underCursor(view)),
    Escape: () => {
      view.cursor = null;
      pin(null);
    },
  };
}

/** Where zooming holds the picture: at the cursor if it is in sight, else at the right edge. @param {View} view */
function shareOf(view) {
  const step = view.cursor === null ? undefined : view.timeline.at(view.cursor.position);
  if (step === undefined || view.cursor === null) return 1;
  const { from, to } = view.domain;
  const value = view.mode === "time" ? step.begin_ns : view.cursor.position;
  const share = (value - from) / (to - from);
  return share >= 0 && share <= 1 ? share : 1;
}

/** The request under the cursor. @param {View} view @returns {number | null} */
export function underCursor(view) {
  const { cursor } = view;
  if (cursor === null || cursor.slot === null) return null;
  return view.timeline.cell(cursor.position, cursor.slot)?.request ?? null;
}

/**
 * Make a chart answer to keys and pointer. `slotAt` says which slot lies at a point of the canvas, `pin` is called with
 * the request that was chosen, or null.
 * @param {Surface} surface @param {View} view
 * @param {{slotAt?: (x: number, y: number) => number | null, pin?: (request: number | null) => void}} [options]
 */
export function navigate(surface, view, { slotAt = () => null, pin = () => undefined } = {}) {
  const { canvas } = surface;
  const known = actions(view, pin);
  canvas.addEventListener("keydown", (event) => {
    const act = known[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  point(canvas, view, slotAt);
  drag(canvas, view, pin);
  canvas.addEventListener("wheel", (event) => wheel(event, canvas, view), { passive: false });
}

/** The cursor follows the mouse. @param {HTMLCanvasElement} canvas @param {View} view @param {(x: number, y: number) => number | null} slotAt */
function point(canvas, view, slotAt) {
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons !== 0 && event.pointerType === "mouse") return;
    const axis = axisOf(/** @type {any} */ ({ width: canvas.clientWidth }), view);
    const position = axis.positionAt(event.offsetX);
    const isInside = event.offsetX >= MARGIN.left && !Number.isNaN(position);
    view.cursor = isInside ? { position, slot: slotAt(event.offsetX, event.offsetY) } : null;
    view.changed();
  });
  canvas.addEventListener("pointerleave", (event) => {
    if (view.isPaused || event.pointerType !== "mouse") return;
    view.cursor = null;
    view.changed();
  });
}

/** Dragging moves in time, a click chooses. @param {HTMLCanvasElement} canvas @param {View} view @param {(request: number | null) => void} pin */
function drag(canvas, view, pin) {
  /** @type {{x: number, moved: boolean} | null} */
  let from = null;
  canvas.addEventListener("pointerdown", (event) => {
    from = { x: event.offsetX, moved: false };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (from === null || event.buttons === 0) return;
    const by = event.offsetX - from.x;
    if (!from.moved && Math.abs(by) < 4) return;
    if (!from.moved) canvas.setPointerCapture(event.pointerId);
    view.pan(-by / Math.max(canvas.clientWidth - MARGIN.left - MARGIN.right, 1));
    from = { x: event.offsetX, moved: true };
  });
  canvas.addEventListener("pointerup", () => {
    if (from !== null && !from.moved) {
      const request = underCursor(view);
      pin(request === view.pinned ? null : request);
    }
    from = null;
  });
  canvas.addEventListener("pointercancel", () => {
    from = null;
  });
}

/** With Ctrl (or a pinch) the wheel zooms, sideways it moves; else it scrolls the page, as everywhere.
 * @param {WheelEvent} event @param {HTMLCanvasElement} canvas @param {View} view
 */
function wheel(event, canvas, view) {
  const width = Math.max(canvas.clientWidth - MARGIN.left - MARGIN.right, 1);
  const sideways = event.shiftKey ? event.deltaY : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
  if (event.ctrlKey) {
    event.preventDefault();
    const share = Math.min(Math.max((event.offsetX - MARGIN.left) / width, 0), 1);
    view.zoom(Math.exp(event.deltaY / 300), view.isPaused ? share : 1);
  } else if (sideways !== 0) {
    event.preventDefault();
    view.pan(sideways / width);
  }
}
