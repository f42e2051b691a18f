// Numbers as people read them. Times come in nanoseconds.

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/**
 * A duration with three significant figures: "0 ms", "850 µs", "18.2 ms", "1.24 s", "2 min 05 s", "3 h 12 min".
 * @param {number | null | undefined} ns @returns {string}
 */
export function duration(ns) {
  if (ns === null || ns === undefined || !Number.isFinite(ns)) return "–";
  if (ns < 0) return `−${duration(-ns)}`;
  if (ns === 0) return "0 ms";
  if (ns < 999.5e3) return `${significant(ns / 1e3)} µs`;
  if (ns < 999.5e6) return `${significant(ns / 1e6)} ms`;
  if (ns < 59.95e9) return `${significant(ns / 1e9)} s`;
  const seconds = Math.round(ns / 1e9);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${String(seconds % 60).padStart(2, "0")} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} days ${Math.floor((minutes % 1440) / 60)} h`;
}

/**
 * A duration for an axis, short and without needless zeros: "100 s", "2.5 s", "200 ms".
 * @param {number} ns @returns {string}
 */
export function tick(ns) {
  if (Math.abs(ns) >= 59.95e9) return `${count(ns / 1e9).replace("-", "−")} s`;
  return duration(ns).replace(/(\.\d*?)0+(?= )/, "$1").replace(/\.(?= )/, "");
}

/** @param {number} value @param {number} [digits] */
function padded(value, digits = 2) {
  return String(value).padStart(digits, "0");
}

/**
 * The time of day by this machine's clock, "14:02:40"; for times that lie less than a second apart, "14:02:40.025".
 * @param {Date} date @param {number} [apart_ns] @returns {string}
 */
export function timeOfDay(date, apart_ns = 1e9) {
  const time = [date.getHours(), date.getMinutes(), date.getSeconds()].map((value) => padded(value)).join(":");
  return apart_ns < 1e9 ? `${time}.${padded(date.getMilliseconds(), 3)}` : time;
}

/**
 * Day and time by this machine's clock, and how far that is ahead of UTC: "2026-12-01 14:02:40 UTC+01:00".
 * @param {Date} date @returns {string}
 */
export function dayAndTime(date) {
  const day = [date.getFullYear(), date.getMonth() + 1, date.getDate()].map((value) => padded(value)).join("-");
  const ahead = -date.getTimezoneOffset();
  const [hours, minutes] = [Math.floor(Math.abs(ahead) / 60), Math.abs(ahead) % 60];
  const zone = ahead === 0 ? "" : `${ahead < 0 ? "−" : "+"}${padded(hours)}:${padded(minutes)}`;
  return `${day} ${timeOfDay(date)} UTC${zone}`;
}

/** @param {number} value @returns {string} */
function significant(value) {
  if (value >= 99.95) return value.toFixed(0);
  if (value >= 9.995) return value.toFixed(1);
  return value.toFixed(2);
}

/**
 * A whole number with separators.
 * @param {number | null | undefined} value @returns {string}
 */
export function count(value) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : COUNT.format(value);
}

/**
 * "1 token", "2,000 tokens".
 * @param {number} value @param {string} noun @param {string} [plural] @returns {string}
 */
export function counted(value, noun, plural = `${noun}s`) {
  return `${count(value)} ${value === 1 ? noun : plural}`;
}

/**
 * A share of one as percents: "71 %", "0.4 %".
 * @param {number | null | undefined} share @returns {string}
 */
export function percent(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  const value = share * 100;
  if (value > 0 && value < 0.05) return "< 0.1 %";
  return `${value >= 9.95 || value === 0 ? value.toFixed(0) : value.toFixed(1)} %`;
}

/**
 * A rate: "8.4", "143".
 * @param {number | null | undefined} value @returns {string}
 */
export function rate(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value >= 9.95 || value === 0 ? count(value) : value.toFixed(1);
}

/**
 * Round values between two ends, about `wanted` of them.
 * @param {number} from @param {number} to @param {number} wanted @returns {number[]}
 */
export function ticks(from, to, wanted) {
  const span = to - from;
  if (!(span > 0) || wanted < 1) return [];
  const power = 10 ** Math.floor(Math.log10(span / wanted));
  const unit = [1, 2, 5, 10].find((factor) => Math.floor(span / (factor * power)) <= wanted) ?? 10;
  const step = unit * power;
  const values = [];
  for (let i = Math.ceil(from / step); i * step <= to + step * 1e-9; i += 1) values.push(i * step);
  return values;
}

/**
 * What a page calls a request: short, and the same in all panels.
 * @param {number} id @param {string | null} name @returns {string}
 */
export function requestLabel(id, name) {
  return name === null ? "another request" : `r${id}`;
}
