// The visual grammar of all pictures: a colour, a texture and a word for everything a slot or a request can be doing.
// It knows no data and no page.

/** @typedef {"solid"|"hollow"|"hatch"|"cross"|"dots"|"stripes"|"rows"|"notch"} Texture */
/** @typedef {{fill: string, mark: string, texture: Texture, label: string, meaning: string}} Style */
/** @typedef {"queued"|"prefill"|"decode"|"slow"|"recompute"|"waste"|"skipped"} Kind */
/**
 * @typedef {{page: string, panel: string, ink: string, muted: string, rule: string, edge: string, outline: string,
 *   cellEdge: string, link: string, bad: string}} Theme
 */

// Every pair of these fills keeps a CIE76 distance of at least 24.8 in normal, protan, deutan and tritan vision.
const GREY = "#D9D9D9";
const ORANGE = "#E69F00";
const BLUE = "#0072B2";
const SKY = "#56B4E9";
const RUST = "#B33C00";
const CHAR = "#3B3B3B";
const DARK_MARK = "#333333";
const LIGHT_MARK = "#FFFFFFB0";

/** @type {Record<Kind, Style>} */
export const KINDS = {
  queued: { fill: GREY, mark: DARK_MARK, texture: "hollow", label: "queued", meaning: "waits, holds no slot" },
  prefill: { fill: ORANGE, mark: DARK_MARK, texture: "solid", label: "prefill", meaning: "reads its prompt" },
  decode: { fill: BLUE, mark: LIGHT_MARK, texture: "solid", label: "decode", meaning: "writes one token a step" },
  slow: {
    fill: SKY,
    mark: DARK_MARK,
    texture: "notch",
    label: "decode, slow step",
    meaning: "a step that took more than twice the median of decode steps with about as many rows",
  },
  recompute: {
    fill: RUST,
    mark: LIGHT_MARK,
    texture: "hatch",
    label: "recompute",
    meaning: "computes again what a preemption threw away",
  },
  waste: {
    fill: CHAR,
    mark: "#A8A8A8",
    texture: "cross",
    label: "held or padding",
    meaning: "a finished request keeps its slot, or a finished row is computed",
  },
  skipped: { fill: GREY, mark: "#6B6B6B", texture: "rows", label: "no token", meaning: "on board, dealt no token" },
};

/** Where a request's time went; the words beside them come from the server. @type {Record<string, Style>} */
const CAUSES = {
  receive: style(GREY, "#6B6B6B", "dots"),
  queue: style(GREY, DARK_MARK, "hollow"),
  prefill: style(ORANGE, DARK_MARK, "solid"),
  decode: style(BLUE, LIGHT_MARK, "solid"),
  others_prefill: style(ORANGE, DARK_MARK, "hatch"),
  skipped: style(GREY, "#6B6B6B", "rows"),
  preempted: style(RUST, LIGHT_MARK, "hatch"),
  host: style(CHAR, "#A8A8A8", "stripes"),
  sampling: style(BLUE, LIGHT_MARK, "dots"),
  delivery: style(SKY, DARK_MARK, "dots"),
  unattributed: style(CHAR, "#A8A8A8", "cross"),
};

/** What a block of the KV cache is, by the letter the stream uses. @type {Record<string, Style>} */
export const BLOCKS = {
  p: { ...style(BLUE, LIGHT_MARK, "solid"), label: "private", meaning: "one running request uses it" },
  s: { ...style(ORANGE, DARK_MARK, "notch"), label: "shared", meaning: "several requests use it as a common prefix" },
  e: { ...style(GREY, "#6B6B6B", "rows"), label: "evictable", meaning: "cached, used by nobody now" },
  f: { ...style(GREY, DARK_MARK, "hollow"), label: "free", meaning: "holds nothing" },
};

/** The mark at a request's end, by its finish reason. @type {Record<string, [string, string]>} */
const ENDS = { abort: ["⊘", "cancelled"], error: ["✕", "failed"] };

/**
 * @param {string} fill @param {string} mark @param {Texture} texture
 * @returns {Style}
 */
function style(fill, mark, texture) {
  return { fill, mark, texture, label: "", meaning: "" };
}

/**
 * The style of a cause; all reasons to be queued share one.
 * @param {string} cause @returns {Style}
 */
export function causeStyle(cause) {
  return CAUSES[cause] ?? CAUSES[cause.split(".")[0]] ?? CAUSES.unattributed;
}

/**
 * Glyph and word of how a request ended.
 * @param {string | null} reason @returns {[string, string]}
 */
export function ending(reason) {
  return ENDS[reason ?? ""] ?? ["●", "finished"];
}

/**
 * Give an element the colour and texture of a style.
 * @param {HTMLElement} element @param {Style} what
 */
export function paint(element, what) {
  element.style.setProperty("--fill", what.fill);
  element.style.setProperty("--mark", what.mark);
  element.classList.add(`tx-${what.texture}`);
}

/**
 * The colours of the theme that holds at an element.
 * @param {Element} element @returns {Theme}
 */
export function readTheme(element) {
  const computed = getComputedStyle(element);
  /** @param {string} name */
  const read = (name) => computed.getPropertyValue(name).trim();
  return {
    page: read("--page"),
    panel: read("--panel"),
    ink: read("--ink"),
    muted: read("--muted"),
    rule: read("--rule"),
    edge: read("--edge"),
    outline: read("--outline"),
    cellEdge: read("--cell-edge"),
    link: read("--link"),
    bad: read("--bad"),
  };
}

/** @type {Map<string, CanvasPattern>} */
const patterns = new Map();

/** How each texture is drawn on a tile of 8 by 8. @type {Partial<Record<Texture, (c: CanvasRenderingContext2D) => void>>} */
const TILES = {
  hatch: (c) => lines(c, [[-2, 10, 10, -2], [-2, 2, 2, -2], [6, 10, 10, 6]]),
  cross: (c) => lines(c, [[-2, 10, 10, -2], [-2, -2, 10, 10]]),
  stripes: (c) => lines(c, [[2, 0, 2, 8], [6, 0, 6, 8]]),
  rows: (c) => lines(c, [[0, 2, 8, 2], [0, 6, 8, 6]]),
  dots: (c) => {
    for (const [x, y] of [[2, 2], [6, 6]]) c.fillRect(x - 0.8, y - 0.8, 1.6, 1.6);
  },
};

/** @param {CanvasRenderingContext2D} context @param {number[][]} segments */
function lines(context, segments) {
  context.beginPath();
  for (const [x0, y0, x1, y1] of segments) {
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
  }
  context.stroke();
}

/**
 * A context that has textures of its own: SVG's are written down, not drawn.
 * @typedef {CanvasRenderingContext2D & {texture: (key: string, fill: string, draw: (c: CanvasRenderingContext2D) => void) => string}} Writer
 */

/** @param {CanvasRenderingContext2D} context @returns {context is Writer} */
function writesTextures(context) {
  return "texture" in context;
}

/**
 * A fill for a canvas of that pixel ratio.
 * @param {CanvasRenderingContext2D} context @param {Style} what @param {number} ratio device pixels a CSS pixel
 * @returns {string | CanvasPattern}
 */
export function inkOf(context, what, ratio) {
  const fill = TILES[what.texture];
  if (fill === undefined) return what.fill;
  /** @param {CanvasRenderingContext2D} c */
  const draw = (c) => {
    c.fillStyle = c.strokeStyle = what.mark;
    c.lineWidth = 1.2;
    fill(c);
  };
  const key = `${what.texture} ${what.fill} ${what.mark} ${ratio}`;
  if (writesTextures(context)) return context.texture(key, what.fill, draw);
  const known = patterns.get(key);
  if (known !== undefined) return known;
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(8 * ratio);
  const c = /** @type {CanvasRenderingContext2D} */ (tile.getContext("2d"));
  c.fillStyle = what.fill;
  c.fillRect(0, 0, tile.width, tile.height);
  c.scale(tile.width / 8, tile.width / 8);
  draw(c);
  const pattern = /** @type {CanvasPattern} */ (context.createPattern(tile, "repeat"));
  pattern.setTransform(new DOMMatrix().scale(8 / tile.width));
  patterns.set(key, pattern);
  return pattern;
}

/**
 * Fill one cell: colour, texture, and an outline where the theme needs one and there is room for it.
 * @param {CanvasRenderingContext2D} context @param {Style} what @param {Theme} theme @param {number} ratio
 * @param {number} x @param {number} y @param {number} width @param {number} height
 */
export function fillCell(context, what, theme, ratio, x, y, width, height) {
  if (what.texture === "hollow") {
    context.strokeStyle = theme.edge;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, Math.max(width - 1, 0.5), Math.max(height - 1, 0.5));
    return;
  }
  context.fillStyle = inkOf(context, what, ratio);
  context.fillRect(x, y, width, height);
  if (what.texture === "notch" && height >= 6) {
    context.fillStyle = what.mark;
    context.fillRect(x, y, width, 2.5);
  }
  const edge = what.fill === CHAR ? theme.outline : theme.cellEdge;
  if (width < 4 || height < 6 || what.fill === BLUE || what.fill === RUST) return;
  context.strokeStyle = edge;
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
}
