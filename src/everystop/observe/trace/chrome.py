"""A picture in Chrome's JSON format of trace events, which many viewers read; Perfetto's own format says more.

Each track is a thread of one process, counters are the process's own. Fields are those of the Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from everystop.core.durations import NS_PER_US
from everystop.observe.trace.tracks import Kind, Mark, Picture, Track

PID = 1
PHASES = {Kind.BEGIN: "B", Kind.END: "E", Kind.INSTANT: "i", Kind.COUNT: "C"}


def chrome_chunks(picture: Picture) -> Iterator[bytes]:
    """The file in pieces: an object with the list `traceEvents`, one event a line. Times count from the first mark, in
    microseconds with three places.
    """
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    comma = b""
    for event in _events(picture):
        yield comma + json.dumps(event, separators=(",", ":")).encode()
        comma = b",\n"
    yield b"\n]}\n"


def _events(picture: Picture) -> Iterator[dict[str, Any]]:
    names = {track.number: track.name for track in picture.tracks}
    for track in picture.tracks:
        yield from _descriptions(track)
    started: set[int] = set()
    for mark in picture.marks:
        event = _event(mark, names[mark.track], picture.start_ns)
        yield event
        if mark.flow:
            phase = "f" if mark.ends_flow else "t" if mark.flow in started else "s"
            started.add(mark.flow)
            place = {key: event[key] for key in ("pid", "tid", "ts")}
            yield {"ph": phase, "bp": "e", "cat": "request", "name": "request", "id": mark.flow, **place}


def _descriptions(track: Track) -> Iterator[dict[str, Any]]:
    if not track.parent:
        yield {"ph": "M", "pid": PID, "name": "process_name", "args": {"name": track.name}}
    elif track.unit is None:
        place = {"ph": "M", "pid": PID, "tid": track.number}
        yield place | {"name": "thread_name", "args": {"name": track.name}}
        yield place | {"name": "thread_sort_index", "args": {"sort_index": track.rank}}


def _event(mark: Mark, track_name: str, start_ns: int) -> dict[str, Any]:
    now_us = (mark.now_ns - start_ns) / NS_PER_US
    event: dict[str, Any] = {"ph": PHASES[mark.kind], "pid": PID, "tid": mark.track, "ts": round(now_us, 3)}
    if mark.kind is Kind.COUNT:
        return event | {"name": track_name, "args": {track_name: mark.value}}
    if mark.name:
        event["name"] = mark.name
    if mark.kind is Kind.INSTANT:
        event["s"] = "t"  # of this thread
    if mark.arguments:
        event["args"] = dict(mark.arguments)
    return event
