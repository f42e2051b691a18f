// A trace of what happens from one press of a button to the next. It ends by itself before the page forgets how it began.

import { setText } from "./dom.js";
import { count } from "./format.js";

/** @typedef {import("./model.js").LiveModel} LiveModel */
/** @typedef {import("./timeline.js").Step} Step */

/** Owns the button; hands the recorded steps to `save` when it ends. */
export class Recording {
  /** @param {HTMLElement} button @param {HTMLElement} note @param {LiveModel} model @param {(steps: Step[]) => void} save */
  constructor(button, note, model, save) {
    this.button = button;
    this.note = note;
    this.model = model;
    this.save = save;
    /** Position of the first step that belongs to it. @type {number | null} */
    this.begin = null;
    button.addEventListener("click", () => this.#press());
  }

  /** A message is about to be taken: one that tells all anew ends the recording, for the page then forgets what it knew.
   * @param {boolean} isFull
   */
  before(isFull) {
    if (isFull) this.#end("The connection was made anew, so the recording ended there.");
  }

  /** A message was taken. */
  after() {
    if (this.begin === null) return;
    const numSteps = this.model.timeline.end - this.begin;
    if (numSteps >= this.model.timeline.maxSteps) this.#end("This page remembers no more steps, so the recording ended.");
    else setText(this.note, `Recording: ${count(numSteps)} steps.`);
  }

  #press() {
    if (this.begin === null) {
      this.begin = this.model.timeline.end;
      this.after();
    } else this.#end("");
    this.#show();
  }

  /** @param {string} why */
  #end(why) {
    if (this.begin === null) return;
    const { timeline } = this.model;
    const steps = timeline.steps.slice(this.begin - timeline.start);
    this.begin = null;
    const done = steps.length === 0 ? "No step was taken meanwhile: nothing was recorded." : `Recorded ${count(steps.length)} steps.`;
    setText(this.note, `${why} ${done}`.trim());
    this.#show();
    if (steps.length > 0) this.save(steps);
  }

  #show() {
    const isOn = this.begin !== null;
    this.button.setAttribute("aria-pressed", String(isOn));
    setText(this.button, isOn ? "Stop and save" : "Record");
  }
}
