"""A history as plain data and back, small enough to lie in a report: what it knows of steps and acts, not of clients.

Numbers are kept in packed columns: the differences between neighbours as little-endian 64-bit integers, compressed by
zlib, in base64. Of step times only the last known model is kept.
"""

from __future__ import annotations

import base64
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

from everystop.core.events import (
    AdmitEvent,
    ArrivalEvent,
    FinishEvent,
    PreemptEvent,
    RefuseEvent,
    WaitEvent,
    WaitReason,
)
from everystop.core.request import FinishReason
from everystop.core.step_time import StepTimeModel
from everystop.observe.history import Act, History, StepRecord

ACTS: Mapping[str, type[Act]] = {
    act.__name__: act for act in (ArrivalEvent, RefuseEvent, AdmitEvent, PreemptEvent, WaitEvent, FinishEvent)
}
ROWS = ("request_ids", "starts", "nums", "num_outputs")
SCALARS = tuple(name for name in StepRecord._fields if name not in (*ROWS, "step_times"))


def pack(values: Iterable[int]) -> str:
    """A column of 64-bit integers as text."""
    listed = [0, *values]
    column = array("q", [b - a for a, b in pairwise(listed)])
    if sys.byteorder == "big":
        column.byteswap()
    return base64.b64encode(zlib.compress(column.tobytes(), 9)).decode("ascii")


def unpack(text: str) -> list[int]:
    """The inverse of `pack`."""
    column = array("q", zlib.decompress(base64.b64decode(text)))
    if sys.byteorder == "big":
        column.byteswap()
    return list(accumulate(column))


def history_as_data(history: History) -> dict[str, Any]:
    """Steps as columns, acts as lists that begin with the event's name."""
    steps = history.steps.since(history.steps.start)
    columns = {name: pack(getattr(step, name) for step in steps) for name in SCALARS}
    columns["num_rows"] = pack(step.num_rows for step in steps)
    columns |= {name: pack(value for step in steps for value in getattr(step, name)) for name in ROWS}
    acts = [[type(act).__name__, *act] for act in history.acts.since(history.acts.start)]
    return {"steps": columns, "acts": acts, "step_times": asdict(history.step_times)}


def history_from_data(data: Mapping[str, Any]) -> History:
    """The inverse of `history_as_data`; raises KeyError, ValueError or TypeError for what is none."""
    acts = [_act(*act) for act in data["acts"]]
    history = History(num_finished=len(acts) + 1, max_bytes=sys.maxsize, step_times=StepTimeModel(**data["step_times"]))
    for record in _steps(data["steps"], history.step_times):
        history.steps.append(record)
        history.last_ns = record.now_ns
    history.receive(acts)
    history.catch_up()
    return history


def _steps(columns: Mapping[str, str], step_times: StepTimeModel) -> Iterable[StepRecord]:
    scalars = {name: unpack(columns[name]) for name in SCALARS}
    request_ids, starts, nums, num_outputs = (unpack(columns[name]) for name in ROWS)
    first = 0
    for i, num_rows in enumerate(unpack(columns["num_rows"])):
        rows = slice(first, first + num_rows)
        yield StepRecord(
            request_ids=array("q", request_ids[rows]),
            starts=array("q", starts[rows]),
            nums=array("q", nums[rows]),
            num_outputs=bytes(num_outputs[rows]),
            step_times=step_times,
            **{name: column[i] for name, column in scalars.items()},
        )
        first += num_rows


def _act(name: str, *fields: Any) -> Act:
    act = ACTS[name](*fields)
    if isinstance(act, WaitEvent):
        return act._replace(reason=WaitReason(act.reason))
    if isinstance(act, FinishEvent):
        return act._replace(reason=FinishReason(act.reason))
    return act
