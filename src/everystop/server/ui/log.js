// The decision log: one sentence for each act of the scheduler, newest first. Only the lines in sight are in the page.

import { make, setText } from "./dom.js";

/** @typedef {[number, number, string]} Act */

const LINE = 50;
const SPARE = 6;
const WORD_ENDS = /[^A-Za-z0-9]+/;

/** Owns a scrolling list of lines of equal height. */
export class DecisionLog {
  /** @param {HTMLElement} scroller */
  constructor(scroller) {
    this.scroller = scroller;
    this.list = make("ol");
    this.spacer = make("div", "log-spacer", [this.list]);
    /** @type {Act[]} */
    this.acts = [];
    this.numSeen = 0;
    /** @type {string | null} */
    this.mark = null;
    scroller.replaceChildren(this.spacer);
    scroller.addEventListener("scroll", () => this.#draw(), { passive: true });
    new ResizeObserver(() => this.#draw()).observe(scroller);
  }

  /** Show these acts, of which `numEver` have been, and mark those of the pinned request; a reader who has scrolled
   * down keeps the place.
   * @param {Act[]} acts @param {number} numEver @param {number | null} pinned
   */
  show(acts, numEver, pinned) {
    const numNew = numEver - this.numSeen;
    const mark = pinned === null ? null : `r${pinned}`;
    if (numNew === 0 && acts.length === this.acts.length && mark === this.mark) return;
    this.mark = mark;
    this.acts = acts;
    this.numSeen = numEver;
    this.spacer.style.height = `${acts.length * LINE}px`;
    if (this.scroller.scrollTop > 0 && numNew > 0) this.scroller.scrollTop += numNew * LINE;
    this.#draw();
  }

  #draw() {
    const { scroller, acts } = this;
    const first = Math.max(0, Math.floor(scroller.scrollTop / LINE) - SPARE);
    const number = Math.min(acts.length - first, Math.ceil(scroller.clientHeight / LINE) + 2 * SPARE);
    while (this.list.children.length < number) this.list.append(make("li", "", [make("span")]));
    while (this.list.children.length > Math.max(number, 0)) this.list.lastElementChild?.remove();
    this.list.style.transform = `translateY(${first * LINE}px)`;
    for (let i = 0; i < number; i += 1) {
      const line = /** @type {HTMLElement} */ (this.list.children[i]);
      const sentence = acts[acts.length - 1 - first - i][2];
      setText(/** @type {Element} */ (line.firstElementChild), sentence);
      if (line.title !== sentence) line.title = sentence;
      line.classList.toggle("pinned", this.mark !== null && sentence.split(WORD_ENDS).includes(this.mark));
    }
  }
}
