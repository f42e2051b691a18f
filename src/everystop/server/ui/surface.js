// A canvas that is sharp, follows its size and the theme, and is drawn only while somebody can see it, or prints it.

import { readTheme } from "./grammar.js";

/**
 * What a drawing gets: a cleared context in CSS pixels.
 * @typedef {{context: CanvasRenderingContext2D, width: number, height: number, ratio: number,
 *   theme: import("./grammar.js").Theme}} Sheet
 */

/** @type {Set<Surface>} */
const surfaces = new Set();
/** @type {Set<Surface>} */
const stale = new Set();
let isScheduled = false;

function drawStale() {
  isScheduled = false;
  const due = [...stale];
  stale.clear();
  for (const surface of due) surface.drawNow();
}

const NEARBY = { rootMargin: "100px" };

export const FONT = "12px system-ui, sans-serif";

/** Owns one canvas; `invalidate` has it drawn again in the next frame, if it is in sight. */
export class Surface {
  /** @param {HTMLCanvasElement} canvas @param {(sheet: Sheet) => void} draw */
  constructor(canvas, draw) {
    this.canvas = canvas;
    this.draw = draw;
    this.isInSight = false;
    this.isStale = true;
    surfaces.add(this);
    new ResizeObserver(() => this.invalidate()).observe(canvas);
    new IntersectionObserver((entries) => {
      this.isInSight = entries[entries.length - 1].isIntersecting;
      if (this.isInSight && this.isStale) this.invalidate();
    }, NEARBY).observe(canvas);
    onTheme(() => this.invalidate());
  }

  /** What is drawn is no longer true. */
  invalidate() {
    this.isStale = true;
    if (!this.isInSight || document.hidden) return;
    stale.add(this);
    if (isScheduled) return;
    isScheduled = true;
    requestAnimationFrame(drawStale);
  }

  /** Draw at once. */
  drawNow() {
    const { canvas } = this;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (width === 0 || height === 0) return;
    this.isStale = false;
    const ratio = Math.min(window.devicePixelRatio || 1, 3);
    const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== pixelWidth) canvas.width = pixelWidth;
    if (canvas.height !== pixelHeight) canvas.height = pixelHeight;
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    this.draw({ context, width, height, ratio, theme: currentTheme() });
  }
}

/** @type {import("./grammar.js").Theme | null} */
let theme = null;
/** @type {(() => void)[]} */
const themeListeners = [];

/** The theme that holds now. */
export function currentTheme() {
  theme ??= readTheme(document.documentElement);
  return theme;
}

/** Call back when the colours have changed. @param {() => void} listener */
export function onTheme(listener) {
  themeListeners.push(listener);
}

/** Read the colours again, and draw everything with them. */
export function themeChanged() {
  theme = null;
  for (const listener of themeListeners) listener();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) themeChanged();
});
window.addEventListener("beforeprint", () => {
  document.documentElement.dataset.printing = "";
  theme = null;
  for (const surface of surfaces) surface.drawNow();
});
window.addEventListener("afterprint", () => {
  delete document.documentElement.dataset.printing;
  themeChanged();
});
