"""Says in words what the simulator makes of a request under other circumstances.

It reads the JSON of `everystop explain --what-if` and knows nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everystop.observe.wording import counted
from everystop.words import duration

COLUMN = 10
FAR_OFF = 0.25
"""A share by which the model is so far off that its estimates tell little."""
NAMES = {"ttft_error": "TTFT", "e2e_error": "E2E"}
FLAGS = {"alone": "", "num_blocks": "--kv-cache-memory"}
WHY_NOT = {
    "below_slots": "not tried: --max-num-batched-tokens must not be below --max-num-seqs",
    "not_served": "the request would not have been served",
}


def in_words(what_if: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with all that has to be said of the figures, for whoever draws them: `about` and `remarks`, whether
    the model `is_far_off`, and of each estimate a `label` and the `flag` that it tries, if it is one.
    """
    estimates = [each | {"label": label_of(each), "flag": flag_of(each)} for each in what_if["estimates"]]
    remarks, is_far_off = remarks_of(what_if), _is_far_off(what_if["simulated"])
    return {
        **what_if,
        "about": _about(what_if),
        "remarks": remarks,
        "is_far_off": is_far_off,
        "estimates": estimates,
    }


def lines_of(what_if: Mapping[str, Any]) -> list[str]:
    """The estimates as paragraphs: a table beside what was measured, remarks, and how far the model is off."""
    simulated, estimates = what_if["simulated"], what_if["estimates"]
    labels = ["measured", "simulated as it was", *(label_of(estimate) for estimate in estimates)]
    width = max(map(len, labels)) + 1
    rows = [
        _cells(what_if["measured"], None),
        _cells(simulated, None),
        *(_cells(estimate, simulated) for estimate in estimates),
    ]
    return [
        f"what if? {_about(what_if)}:",
        _row("", ("TTFT", "change", "E2E", "change"), width),
        *(_row(label, cells, width) for label, cells in zip(labels, rows, strict=True)),
        *remarks_of(what_if),
    ]


def _about(what_if: Mapping[str, Any]) -> str:
    num = counted(what_if["num_steps"], "step")
    return f"Estimates, from the recorded arrivals in virtual time with step times fitted to {num} of this record"


def label_of(estimate: Mapping[str, Any]) -> str:
    """What is different, as a user would set it, with what was recorded."""
    what, recorded, tried = estimate["what"], estimate["recorded"], estimate["tried"]
    mark = " *" if estimate["is_beyond"] else ""
    if what == "alone":
        return f"alone on the server{mark}"
    blocks = ": {} blocks" if what == "num_blocks" else " {}"
    return f"{flag_of(estimate)}{blocks.format(tried)} (was {recorded}){mark}"


def flag_of(estimate: Mapping[str, Any]) -> str:
    """The flag that it tries; none where the request is alone."""
    what = estimate["what"]
    return FLAGS.get(what, f"--{what.replace('_', '-')}")


def _row(label: str, cells: Sequence[str], width: int) -> str:
    return (f"{label:<{width}}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)).rstrip()


def _cells(times: Mapping[str, Any], simulated: Mapping[str, Any] | None) -> list[str]:
    """Each time and its change against the simulation of what happened."""
    cells = []
    for name in ("ttft_ns", "e2e_ns"):
        ns, before_ns = times[name], None if simulated is None else simulated[name]
        cells += ["-" if ns is None else duration(ns), f"{ns / before_ns - 1:+,.0%}" if ns and before_ns else ""]
    return cells


def remarks_of(what_if: Mapping[str, Any]) -> list[str]:
    """What a reader must know of single estimates, and in the end what all of them are worth."""
    estimates = what_if["estimates"]
    remarks = [f"{label_of(each)}: {WHY_NOT[each['why_not']]}." for each in estimates if each["why_not"]]
    if what_if["num_cached_tokens"]:
        num = counted(what_if["num_cached_tokens"], "token")
        remarks.append(f"Alone it still finds {num} of its prompt in the prefix cache.")
    if any(each["is_beyond"] for each in estimates):
        remarks.append(
            "* some of its steps have more or fewer rows or tokens than any in the record, so their time is guessed."
        )
    return [*remarks, _caution(what_if["simulated"])]


def _caution(simulated: Mapping[str, Any]) -> str:
    """How far the model is off for this request, and so what its estimates are worth."""
    errors = {name: simulated[key] for key, name in NAMES.items() if simulated[key] is not None}
    told = " and ".join(f"{error:+.1%} ({name})" for name, error in errors.items())
    worth = "an estimate may be as far off"
    if _is_far_off(simulated):
        worth = "that is far off, so take a change for a direction at best"
    return f"Changes are against the simulation as it was, whose error for this request is {told}; {worth}."


def _is_far_off(simulated: Mapping[str, Any]) -> bool:
    return any(abs(simulated[key] or 0) > FAR_OFF for key in NAMES)
