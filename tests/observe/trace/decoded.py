"""A trace in Perfetto's format, read back with Perfetto's own schema."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackDescriptor, TrackEvent


class Slice(NamedTuple):
    """One slice of a decoded trace, with the names of those around it."""

    track: str
    start_ns: int
    end_ns: int
    name: str
    arguments: dict[str, Any]
    flows: tuple[int, ...]
    ends_flow: bool
    around: tuple[str, ...]


class Decoded:
    """A trace, read back with Perfetto's own schema."""

    def __init__(self, data: bytes) -> None:
        trace = Trace.FromString(data)
        self.packets = trace.packet
        self.tracks: dict[int, TrackDescriptor] = {}
        self.slices: list[Slice] = []
        self.counts: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.instants: list[tuple[str, int, str]] = []
        self._names: dict[int, str] = {}
        self._arguments: dict[int, str] = {}
        open_slices: dict[int, list[tuple[int, str, dict[str, Any], TrackEvent]]] = defaultdict(list)
        last_ns = 0
        for packet in trace.packet:
            assert packet.trusted_packet_sequence_id == 1
            self._names |= {entry.iid: entry.name for entry in packet.interned_data.event_names}
            self._arguments |= {entry.iid: entry.name for entry in packet.interned_data.debug_annotation_names}
            if packet.HasField("track_descriptor"):
                assert packet.track_descriptor.parent_uuid in {0, *self.tracks}
                self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
            if packet.HasField("track_event"):
                assert packet.timestamp >= last_ns
                last_ns = packet.timestamp
                self._take(packet.timestamp, packet.track_event, open_slices[packet.track_event.track_uuid])
        assert not any(open_slices.values()), "a slice is never closed"

    def _take(self, now_ns: int, event: TrackEvent, stack: list[tuple[int, str, dict[str, Any], TrackEvent]]) -> None:
        track = self.tracks[event.track_uuid].name
        arguments = {
            self._arguments[each.name_iid]: each.string_value if each.HasField("string_value") else each.int_value
            for each in event.debug_annotations
        }
        name = event.name or self._names.get(event.name_iid, "")
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            stack.append((now_ns, name, arguments, event))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            start_ns, name, first, begin = stack.pop()
            flows = (*begin.flow_ids, *begin.terminating_flow_ids)
            around = tuple(entry[1] for entry in stack)
            ends = bool(begin.terminating_flow_ids)
            self.slices.append(Slice(track, start_ns, now_ns, name, first | arguments, flows, ends, around))
        elif event.type == TrackEvent.TYPE_COUNTER:
            assert self.tracks[event.track_uuid].HasField("counter")
            self.counts[track].append((now_ns, event.counter_value))
        else:
            assert event.type == TrackEvent.TYPE_INSTANT
            self.instants.append((track, now_ns, name))

    def on(self, track: str, depth: int) -> list[Slice]:
        """The slices at a depth on the tracks of a name, in the order of their starts."""
        return sorted((s for s in self.slices if s.track == track and len(s.around) == depth), key=lambda s: s.start_ns)
