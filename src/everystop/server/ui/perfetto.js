// A picture in Perfetto's own format, packets of protobuf, as `everystop trace` writes it. The messages and the numbers of
// their fields are those of trace_packet.proto, and of track_event.proto, track_descriptor.proto, debug_annotation.proto
// and interned_data.proto beside it (perfetto.dev, Apache-2.0).

import { ROOT } from "./tracks.js";

/** @typedef {import("./tracks.js").Picture} Picture */
/** @typedef {import("./tracks.js").Track} Track */
/** @typedef {import("./tracks.js").Mark} Mark */
/** Bytes of a message. @typedef {number[]} Bytes */
/** @typedef {Map<string, number>} Names */

const VARINT = 0;
const BYTES = 2;
const SEQUENCE_ID = 1;
const STATE_CLEARED = 1;
const NEEDS_STATE = 2;
const EXPLICIT = 3;
const TYPES = { begin: 1, end: 2, count: 4 };
const PACKETS_A_PIECE = 1000;
const encoder = new TextEncoder();

/** The file in pieces. Times count from the first mark, in nanoseconds. @param {Picture} picture @returns {Uint8Array<ArrayBuffer>[]} */
export function perfettoPieces(picture) {
  const marks = picture.inOrder();
  const slices = numbered(marks.filter(({ name }) => name !== "").map(({ name }) => name));
  const inputs = numbered(marks.flatMap(({ args }) => Object.keys(args)));
  const start_ns = marks[0]?.ns ?? 0;
  const head = [
    packet(message(12, [...interned(2, slices), ...interned(3, inputs)]), STATE_CLEARED),
    packet(message(60, [...number(1, ROOT), ...message(3, [...number(1, 1), ...text(6, "everystop")]), ...number(11, EXPLICIT)])),
    ...picture.tracks.map((track) => packet(message(60, descriptor(track)))),
  ];
  const pieces = [Uint8Array.from(head.flat())];
  for (let i = 0; i < marks.length; i += PACKETS_A_PIECE) {
    const packets = marks.slice(i, i + PACKETS_A_PIECE).map((mark) => {
      const content = [...number(8, mark.ns - start_ns), ...message(11, event(mark, slices, inputs))];
      return packet(content, NEEDS_STATE);
    });
    pieces.push(Uint8Array.from(packets.flat()));
  }
  return pieces;
}

/** Names that stand in the file once, and by number elsewhere. @param {string[]} names @returns {Names} */
function numbered(names) {
  return new Map([...new Set(names)].map((name, i) => [name, i + 1]));
}

/** @param {number} field @param {Names} names @returns {Bytes} */
function interned(field, names) {
  return [...names].flatMap(([name, id]) => message(field, [...number(1, id), ...text(2, name)]));
}

/** A TrackDescriptor under the server's. @param {Track} track @returns {Bytes} */
function descriptor({ number: id, name, rank, isCounter }) {
  const counter = isCounter ? message(8, []) : [];
  return [...number(1, id), ...text(2, name), ...number(5, ROOT), ...counter, ...number(11, EXPLICIT), ...number(12, rank)];
}

/** A TrackEvent. @param {Mark} mark @param {Names} slices @param {Names} inputs @returns {Bytes} */
function event({ kind, track, name, args, value }, slices, inputs) {
  const bytes = [...number(9, TYPES[kind]), ...number(11, track)];
  if (kind === "count") bytes.push(...number(30, value));
  if (name !== "") bytes.push(...number(10, slices.get(name) ?? 0));
  for (const [key, argument] of Object.entries(args)) {
    const content = typeof argument === "string" ? text(6, argument) : number(4, argument);
    bytes.push(...message(4, [...number(1, inputs.get(key) ?? 0), ...content]));
  }
  return bytes;
}

/** A TracePacket of the one sequence, as a field of Trace. @param {Bytes} content @param {number} [flags] @returns {Bytes} */
function packet(content, flags = 0) {
  return message(1, [...content, ...number(10, SEQUENCE_ID), ...(flags === 0 ? [] : number(13, flags))]);
}

/** Seven bits a byte, the lowest first; the highest bit says that more follow. @param {number} value not below 0 @returns {Bytes} */
function varint(value) {
  const bytes = [];
  let rest = value;
  for (; rest >= 0x80; rest = Math.floor(rest / 0x80)) bytes.push((rest % 0x80) | 0x80);
  bytes.push(rest);
  return bytes;
}

/** @param {number} field @param {number} value not below 0 @returns {Bytes} */
function number(field, value) {
  return [...varint(field * 8 + VARINT), ...varint(value)];
}

/** @param {number} field @param {ArrayLike<number> & Iterable<number>} content @returns {Bytes} */
function message(field, content) {
  return [...varint(field * 8 + BYTES), ...varint(content.length), ...content];
}

/** @param {number} field @param {string} value @returns {Bytes} */
function text(field, value) {
  return message(field, encoder.encode(value));
}
