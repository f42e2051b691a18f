// The map of the KV cache: one cell for each block, by what it is and whose.

import { BLOCKS, inkOf } from "./grammar.js";

/** @typedef {import("./surface.js").Sheet} Sheet */
/**
 * Consecutive blocks of one kind and the same owners: kind, number, the first owner (-1: nobody), and where several
 * share them, how many and the next two.
 * @typedef {[string, number, number, ...number[]]} BlockRun
 */
/** @typedef {{block: number, kind: string, owners: number[], numOwners: number}} FoundBlock */
/** @typedef {{size: number, columns: number, numBlocks: number}} Grid */

/**
 * The largest cells with which all blocks fit.
 * @param {number} numBlocks @param {number} width @param {number} height @returns {Grid}
 */
export function gridOf(numBlocks, width, height) {
  for (let size = 26; size > 1; size -= size > 4 ? 1 : 0.5) {
    const columns = Math.max(1, Math.floor(width / size));
    if (Math.ceil(numBlocks / columns) * size <= height) return { size, columns, numBlocks };
  }
  return { size: 1, columns: Math.max(1, Math.floor(width)), numBlocks };
}

/**
 * Draw the map; blocks of the pinned request get a rim.
 * @param {Sheet} sheet @param {BlockRun[]} runs @param {number | null} pinned
 */
export function drawBlocks(sheet, runs, pinned) {
  const { context, theme, ratio, width, height } = sheet;
  const grid = gridOf(numBlocksOf(runs), width, height);
  const side = grid.size - (grid.size >= 4 ? 1 : 0);
  let block = 0;
  for (const [kind, length, owner, , ...others] of runs) {
    const what = BLOCKS[kind] ?? BLOCKS.f;
    const isPinned = pinned !== null && (owner === pinned || others.includes(pinned));
    context.fillStyle = what.texture === "hollow" ? theme.rule : inkOf(context, what, ratio);
    for (const end = block + length; block < end; block += 1) {
      const x = (block % grid.columns) * grid.size;
      const y = Math.floor(block / grid.columns) * grid.size;
      if (what.texture === "hollow") hollow(context, theme, x, y, side);
      else context.fillRect(x, y, side, side);
      if (what.texture === "notch") notch(context, what, ratio, x, y, side);
      if (isPinned) rim(context, theme, x, y, side);
    }
  }
}

/** @param {CanvasRenderingContext2D} context @param {import("./grammar.js").Theme} theme @param {number} x @param {number} y @param {number} side */
function hollow(context, theme, x, y, side) {
  context.strokeStyle = theme.edge;
  context.lineWidth = 1;
  if (side >= 4) context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
  else context.fillRect(x, y, side, side);
}

/** @param {CanvasRenderingContext2D} context @param {import("./grammar.js").Style} what @param {number} ratio @param {number} x @param {number} y @param {number} side */
function notch(context, what, ratio, x, y, side) {
  if (side < 5) return;
  context.fillStyle = what.mark;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + side * 0.6, y);
  context.lineTo(x, y + side * 0.6);
  context.fill();
  context.fillStyle = inkOf(context, what, ratio);
}

/** @param {CanvasRenderingContext2D} context @param {import("./grammar.js").Theme} theme @param {number} x @param {number} y @param {number} side */
function rim(context, theme, x, y, side) {
  context.strokeStyle = theme.ink;
  context.lineWidth = 2;
  context.strokeRect(x, y, side, side);
}

/** @param {BlockRun[]} runs @returns {number} */
export function numBlocksOf(runs) {
  return runs.reduce((sum, run) => sum + run[1], 0);
}

/** How many blocks there are of each kind. @param {BlockRun[]} runs @returns {Record<string, number>} */
export function blockCounts(runs) {
  /** @type {Record<string, number>} */
  const counts = { p: 0, s: 0, e: 0, f: 0 };
  for (const [kind, length] of runs) counts[kind] = (counts[kind] ?? 0) + length;
  return counts;
}

/**
 * The block under a point; of those that share it at most three are in `owners`.
 * @param {BlockRun[]} runs @param {Grid} grid @param {number} x @param {number} y @returns {FoundBlock | null}
 */
export function blockAt(runs, grid, x, y) {
  const column = Math.floor(x / grid.size);
  if (column >= grid.columns || column < 0) return null;
  const block = Math.floor(y / grid.size) * grid.columns + column;
  let end = 0;
  for (const [kind, length, owner, numOwners, ...others] of runs) {
    end += length;
    const owners = owner === -1 ? [] : [owner, ...others];
    if (block < end) return { block, kind, owners, numOwners: numOwners ?? owners.length };
  }
  return null;
}
