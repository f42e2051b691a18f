// Small building blocks of a page: elements, tables, legends.

import { paint } from "./grammar.js";

/** The element with that id. @param {string} id @returns {HTMLElement} */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`no element #${id}`);
  return found;
}

/** @param {string} id @returns {HTMLCanvasElement} */
export function canvasOf(id) {
  return /** @type {HTMLCanvasElement} */ (byId(id));
}

/**
 * An element with a class and children; texts are never read as markup.
 * @param {string} tag @param {string} [className] @param {(Node | string)[]} [children] @returns {HTMLElement}
 */
export function make(tag, className = "", children = []) {
  const made = document.createElement(tag);
  if (className !== "") made.className = className;
  made.append(...children);
  return made;
}

/** Set a text only if it is another one, which spares the browser work. @param {Element} element @param {string} text */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A coloured sample and its words. @param {import("./grammar.js").Style} what @param {string} text @returns {HTMLElement} */
export function keyOf(what, text) {
  const swatch = make("span", "swatch");
  paint(swatch, what);
  const entry = make("span", "key", [swatch, text]);
  if (what.meaning !== "") entry.title = what.meaning;
  return entry;
}

/** The link to a request's own page. @param {string} name @param {string} text @returns {HTMLElement} */
export function requestLink(name, text) {
  const link = /** @type {HTMLAnchorElement} */ (make("a", "", [text]));
  link.href = `/ui/r/${encodeURIComponent(name)}`;
  link.title = name;
  return link;
}

/** The page of one request with another put beside it. @param {string} name @param {string} other @returns {string} */
export function besideAddress(name, other) {
  return `/ui/r/${encodeURIComponent(name)}?beside=${encodeURIComponent(other)}`;
}

/** The link that puts another request beside that of the page. @param {string} other @returns {HTMLElement} */
export function besideLink(other) {
  const link = /** @type {HTMLAnchorElement} */ (make("a", "", ["side by side"]));
  link.href = `?beside=${encodeURIComponent(other)}`;
  link.title = `this request and ${other}`;
  return link;
}

const IDS = /((?:chat)?cmpl-[0-9A-Za-z]{6,})/;

/**
 * A text in which the ids of other requests are links.
 * @param {string} text @param {string} own the id of the page's own request @returns {(Node | string)[]}
 */
export function linked(text, own) {
  return text.split(IDS).map((part, i) => (i % 2 === 1 && part !== own ? requestLink(part, part) : part));
}

/**
 * Fill a table: words of the columns, and rows of texts or elements.
 * @param {HTMLTableElement} table @param {string} caption @param {string[]} columns @param {(Node | string)[][]} rows
 * @param {number[]} [numbers] columns that hold numbers
 */
export function fillTable(table, caption, columns, rows, numbers = []) {
  /** @param {number} column */
  const kind = (column) => (numbers.includes(column) ? "number" : "");
  const heads = columns.map((column, i) => {
    const head = /** @type {HTMLTableCellElement} */ (make(column === "" ? "td" : "th", kind(i), [column]));
    if (column !== "") head.scope = "col";
    return head;
  });
  const lines = rows.map((row) => make("tr", "", row.map((cell, i) => make("td", kind(i), [cell]))));
  table.replaceChildren(
    make("caption", "visually-hidden", [caption]),
    make("thead", "", [make("tr", "", heads)]),
    make("tbody", "", lines),
  );
}
