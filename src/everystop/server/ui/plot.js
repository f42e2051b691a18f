// Parts that charts over a view share: the margin on the left, grid lines with their words, the axis, the cursor.

/** @typedef {import("./surface.js").Sheet} Sheet */
/** @typedef {import("./view.js").Axis} Axis */
/** @typedef {import("./view.js").View} View */

export const MARGIN = { left: 58, right: 10, bottom: 20 };

/** @param {Sheet} sheet @param {View} view @returns {Axis} */
export function axisOf(sheet, view) {
  return view.axis(MARGIN.left, Math.max(sheet.width - MARGIN.left - MARGIN.right, 10));
}

/**
 * Draw only within the plot.
 * @param {Sheet} sheet @param {number} top @param {number} height @param {() => void} draw
 */
export function clipped({ context, width }, top, height, draw) {
  context.save();
  context.beginPath();
  context.rect(MARGIN.left, top, Math.max(width - MARGIN.left - MARGIN.right, 10), height);
  context.clip();
  draw();
  context.restore();
}

/**
 * A horizontal line and its word in the margin.
 * @param {Sheet} sheet @param {number} y @param {string} text @param {{dash?: number[], color?: string}} [options]
 */
export function rule({ context, width, theme }, y, text, { dash = [], color = theme.rule } = {}) {
  context.strokeStyle = color;
  context.lineWidth = 1;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(MARGIN.left, Math.round(y) + 0.5);
  context.lineTo(width - MARGIN.right, Math.round(y) + 0.5);
  context.stroke();
  context.setLineDash([]);
  context.fillStyle = theme.muted;
  context.textAlign = "right";
  context.fillText(text, MARGIN.left - 6, y);
}

/** The words below: times, or step numbers.
 * @param {Sheet} sheet @param {{left: number, width: number, labels: () => {x: number, text: string}[]}} axis
 */
export function drawAxis({ context, width, height, theme }, axis) {
  const top = height - MARGIN.bottom;
  context.strokeStyle = theme.edge;
  context.fillStyle = theme.muted;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(axis.left, top + 0.5);
  context.lineTo(axis.left + axis.width, top + 0.5);
  for (const { x, text } of axis.labels()) {
    if (x < axis.left - 1 || x > axis.left + axis.width + 1) continue;
    context.moveTo(Math.round(x) + 0.5, top);
    context.lineTo(Math.round(x) + 0.5, top + 4);
    const half = context.measureText(text).width / 2;
    context.textAlign = "center";
    context.fillText(text, Math.min(Math.max(x, half + 2), width - half - 2), top + 12);
  }
  context.stroke();
}

/** The line through all charts where somebody points. @param {Sheet} sheet @param {View} view @param {Axis} axis */
export function drawCursor({ context, height, theme }, view, axis) {
  const { cursor } = view;
  const step = cursor === null ? undefined : view.timeline.at(cursor.position);
  if (cursor === null || step === undefined) return;
  const [left, right] = axis.ofStep(cursor.position, step);
  if (right < axis.left || left > axis.left + axis.width) return;
  context.globalAlpha = 0.16;
  context.fillStyle = theme.ink;
  const bottom = height - MARGIN.bottom;
  context.fillRect(left, 0, Math.max(right - left, 1), bottom);
  context.globalAlpha = 1;
  context.fillRect(Math.round(left), 0, 1, bottom);
}
