// The tip beside the cursor of a chart.

import { setText } from "./dom.js";

const GAP = 12;

/** Owns one floating element inside the chart's box. */
export class Tip {
  /** @param {HTMLElement} element */
  constructor(element) {
    this.element = element;
  }

  /** Say these lines at a place of the chart, or nothing. @param {string[]} lines @param {{x: number, y: number} | null} place */
  show(lines, place) {
    const { element } = this;
    element.hidden = lines.length === 0 || place === null;
    if (element.hidden || place === null) return;
    setText(element, lines.join("\n"));
    const room = /** @type {HTMLElement} */ (element.parentElement).clientWidth;
    const width = element.offsetWidth;
    const left = place.x + GAP + width > room ? place.x - GAP - width : place.x + GAP;
    element.style.left = `${Math.max(0, left)}px`;
    element.style.top = `${place.y + GAP}px`;
  }
}
