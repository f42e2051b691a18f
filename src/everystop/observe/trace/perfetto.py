"""A picture in Perfetto's own format: protobuf packets of tracks and track events, for ui.perfetto.dev.

The messages and their field numbers are those of Perfetto's `protos/perfetto/trace/trace_packet.proto` and of
`track_event.proto`, `track_descriptor.proto`, `counter_descriptor.proto`, `process_descriptor.proto`,
`debug_annotation.proto` and `interned_data.proto` in `track_event/` beside it (https://perfetto.dev, Apache-2.0). A
trace is a sequence of packets, each a field 1 of the message `Trace`, so it can be written one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from everystop.observe.trace.tracks import Arguments, Kind, Mark, Picture, Track

VARINT, FIXED64, BYTES = 0, 1, 2  # wire types
SEQUENCE_ID = 1
STATE_CLEARED, NEEDS_STATE = 1, 2  # TracePacket.SequenceFlags
TYPES = {Kind.BEGIN: 1, Kind.END: 2, Kind.INSTANT: 3, Kind.COUNT: 4}  # TrackEvent.Type
EXPLICIT = 3  # TrackDescriptor.ChildTracksOrdering
MIN_USES = 3  # of a name, for which a number is shorter than the name


def perfetto_chunks(picture: Picture) -> Iterator[bytes]:
    """The file in pieces. Times count from the picture's first mark, in nanoseconds."""
    names = _Names(picture.marks)
    yield names.packet()
    for track in picture.tracks:
        yield _packet(_message(60, _descriptor(track)))
    start_ns = picture.start_ns
    for mark in picture.marks:
        yield _packet(_number(8, mark.now_ns - start_ns) + _message(11, _event(mark, names)), NEEDS_STATE)


class _Names:
    """Names of slices and arguments that stand in the file once, and by number elsewhere."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        uses = Counter(mark.name for mark in marks if mark.name)
        self.of_slices = {name: i + 1 for i, name in enumerate(n for n, num in uses.items() if num >= MIN_USES)}
        arguments = dict.fromkeys(name for mark in marks for name, _ in mark.arguments)
        self.of_arguments = {name: i + 1 for i, name in enumerate(arguments)}

    def packet(self) -> bytes:
        """What the numbers mean: InternedData.event_names (2) and debug_annotation_names (3)."""
        data = b"".join(
            _message(field, _number(1, number) + _text(2, name))
            for field, numbers in ((2, self.of_slices), (3, self.of_arguments))
            for name, number in numbers.items()
        )
        return _packet(_message(12, data), STATE_CLEARED)


def _descriptor(track: Track) -> bytes:
    """A TrackDescriptor; the outermost track is a process, which viewers show as the head of the others."""
    if not track.parent:
        kind = _message(3, _number(1, 1) + _text(6, track.name))  # ProcessDescriptor: pid, process_name
        return _number(1, track.number) + kind + _number(11, EXPLICIT)
    counter = b"" if track.unit is None else _message(8, _text(6, track.unit))  # CounterDescriptor.unit_name
    order = _number(11, EXPLICIT) + _number(12, track.rank)
    return _number(1, track.number) + _text(2, track.name) + _number(5, track.parent) + counter + order


def _event(mark: Mark, names: _Names) -> bytes:
    """A TrackEvent."""
    event = _number(9, TYPES[mark.kind]) + _number(11, mark.track)
    if mark.kind is Kind.COUNT:
        return event + _number(30, mark.value)
    if mark.name:
        number = names.of_slices.get(mark.name)
        event += _text(23, mark.name) if number is None else _number(10, number)
    if mark.arguments:
        event += _annotations(mark.arguments, names)
    if mark.flow:
        event += _key(48 if mark.ends_flow else 47, FIXED64) + mark.flow.to_bytes(8, "little")
    return event


def _annotations(arguments: Arguments, names: _Names) -> bytes:
    """DebugAnnotations: name_iid, and int_value or string_value."""
    return b"".join(
        _message(
            4, _number(1, names.of_arguments[name]) + (_text(6, value) if isinstance(value, str) else _number(4, value))
        )
        for name, value in arguments
    )


def _packet(content: bytes, sequence_flags: int = 0) -> bytes:
    """A TracePacket of our one sequence, as a field of Trace."""
    flags = _number(13, sequence_flags) if sequence_flags else b""
    return _message(1, content + _number(10, SEQUENCE_ID) + flags)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow. 300 is AC 02."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _number(field: int, value: int) -> bytes:
    """An integer field; a negative one takes ten bytes, as an int64."""
    return _key(field, VARINT) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def _message(field: int, content: bytes) -> bytes:
    return _key(field, BYTES) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode("utf-8", "replace"))
