// Fetches what was before the page knows anything, when somebody scrolls there, a stretch at a time.

import { getJson } from "./api.js";
import { setText } from "./dom.js";

/** @typedef {import("./model.js").LiveModel} LiveModel */
/** @typedef {import("./view.js").View} View */

const NOTHING = "Nothing earlier is remembered.";
/** Live charts that show more than the stream tells at first have been zoomed out. */
const TOLD_NS = 60e9;

/** Watches a view; says in `note` how it stands. */
export class Past {
  /** @param {LiveModel} model @param {View} view @param {HTMLElement} note */
  constructor(model, view, note) {
    this.model = model;
    this.view = view;
    this.note = note;
    this.begin();
  }

  /** A stream has begun: what was there before it is not known. */
  begin() {
    /** Who waits for an answer; an answer for another stream is dropped. @type {object | null} */
    this.asking = null;
    this.isAll = false;
    /** How often the view had been moved when it was asked for and failed; one more, and it is asked for again.
     * @type {number | null}
     */
    this.failedAt = null;
    setText(this.note, "");
  }

  /** The view has moved: ask for what it lacks, unless that is being done. */
  look() {
    if (this.asking !== null || this.model.server === null) return;
    const { from } = this.view.domain;
    if (!this.#isWanted(from)) setText(this.note, "");
    else if (this.isAll) setText(this.note, NOTHING);
    else if (!this.model.hasRoom) setText(this.note, "This page remembers no more.");
    else if (this.view.numMoves !== this.failedAt) this.#ask();
  }

  /** @param {number} from */
  #isWanted(from) {
    const { view, model } = this;
    const { timeline } = model;
    if (!view.isPaused && (view.mode === "steps" || view.span.time <= TOLD_NS)) return false;
    return from < view.oldest || (view.isPaused && view.cursor?.position === timeline.start);
  }

  async #ask() {
    const { model, view } = this;
    const { numMoves } = view;
    const asking = (this.asking = {});
    const before_ns = model.timeline.steps[0]?.end_ns ?? model.now_ns;
    setText(this.note, "Loading what was before …");
    let word = "";
    try {
      const message = await getJson(`/ui/past?before_ns=${before_ns}`);
      if (this.asking !== asking) return;
      model.takePast(message);
      this.isAll = !message.more;
      this.failedAt = null;
    } catch (error) {
      if (this.asking !== asking) return;
      this.failedAt = numMoves;
      word = `What was before could not be loaded: ${error instanceof Error ? error.message : error}.`;
    }
    this.asking = null;
    setText(this.note, word);
    if (word === "") view.changed();
  }
}
