"""Draws an explanation on a terminal: the sentence, a bar of causes, when each cause was, late tokens, advice.

It reads the JSON of an explanation, whoever made it, and knows nothing else. Each cause has a colour and a character of
its own, so that colour is never needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from everystop.cli.what_if import lines_of
from everystop.observe.wording import counted
from everystop.words import duration

if TYPE_CHECKING:
    from rich.console import Console

MAX_LATE_TOKENS = 5
LEAST_COLUMNS, MOST_COLUMNS = 20, 72
LABEL_COLUMNS = 42
NUMBER_COLUMNS = 20
MODELLED = " (modelled)"


class Look(NamedTuple):
    """How a cause is drawn: colour, character, and what stands for that where only ASCII can be written."""

    colour: str
    glyph: str
    letter: str


QUEUED, ELSEWHERE = Look("#8a8a8a", "░", "q"), Look("#8a8a8a", "·", ".")
LOOKS = {
    "prefill": Look("#e69f00", "▓", "P"),
    "decode": Look("#0072b2", "█", "D"),
    "others_prefill": Look("#56b4e9", "▒", "o"),
    "sampling": Look("#0072b2", "▪", "s"),
    "preempted": Look("#b33c00", "▚", "X"),
    "skipped": Look("#b33c00", "▗", "-"),
}


def look_of(cause: str) -> Look:
    """Its own look, the one of all waiting, or that of the time in which nothing of the request was computed."""
    return LOOKS.get(cause, QUEUED if cause.startswith("queue.") else ELSEWHERE)


def show(data: Mapping[str, Any], console: Console) -> None:
    """Print an explanation, and after it those of its choices in a sentence each."""
    sheet = _Sheet(console)
    sheet.say(f"{data['id']}  ({data['state']})", style="bold")
    sheet.say(data["sentence"])
    sheet.say()
    if data["e2e_ns"]:
        sheet.draw_bar(data["causes"])
        for cause in data["causes"]:
            sheet.draw_lane(cause, data)
    for line in late_tokens(data):
        sheet.say(line)
    if data["advice"]:
        sheet.say()
    for advice in data["advice"]:
        sheet.say(f"{advice['flag']}: {advice['text']}")
    if data["choices"]:
        sheet.say()
        sheet.say(f"the last {len(data['choices'])} of {counted(data['num_choices'], 'choice')} to end:")
    for choice in data["choices"]:
        sheet.say(f"  {choice['state']}: {choice['sentence']}")
    if "what_if" in data:
        sheet.say()
        for line in lines_of(data["what_if"]):
            sheet.say(line)


class _Sheet:
    """What is printed, as wide as the terminal is, in the characters that it can show."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_ascii = not console.encoding.lower().startswith("utf")
        self._num_columns = max(LEAST_COLUMNS, min(MOST_COLUMNS, console.width - LABEL_COLUMNS - NUMBER_COLUMNS))

    def say(self, text: str = "", style: str = "") -> None:
        """A paragraph."""
        from rich.text import Text

        self._console.print(Text(self._shown(text), style=style))

    def draw_bar(self, causes: Sequence[Mapping[str, Any]]) -> None:
        """All causes in one bar; its cells are dealt by cumulated shares, so that there are exactly as many as fit."""
        from rich.text import Text

        width = min(self._console.width, LABEL_COLUMNS + self._num_columns)
        bar, told_ns, num_drawn = Text(), 0, 0
        whole_ns = sum(cause["ns"] for cause in causes)
        for cause in causes:
            told_ns += cause["ns"]
            end = round(width * told_ns / whole_ns)
            bar.append(self._glyph(cause["cause"]) * (end - num_drawn), style=look_of(cause["cause"]).colour)
            num_drawn = end
        self._console.print(bar, soft_wrap=True)

    def draw_lane(self, cause: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        """One cause: its label, when it was, how long in all, and its share."""
        from rich.text import Text

        name = cause["cause"]
        label = cause["label"] + (MODELLED if cause["is_modelled"] else "")
        line = Text(f"{label:<{LABEL_COLUMNS}.{LABEL_COLUMNS}}")
        cells = cells_of(name, data["segments"], data["e2e_ns"], self._num_columns)
        line.append("".join(self._glyph(name) if cell else " " for cell in cells), style=look_of(name).colour)
        line.append(self._shown(f" {duration(cause['ns']):>11} {cause['share']:>6.1%}"))
        self._console.print(line, soft_wrap=True)

    def _glyph(self, cause: str) -> str:
        return look_of(cause).letter if self._is_ascii else look_of(cause).glyph

    def _shown(self, text: str) -> str:
        return text.replace("µ", "u").encode("ascii", "replace").decode() if self._is_ascii else text


def cells_of(cause: str, segments: Sequence[Mapping[str, Any]], e2e_ns: int, width: int) -> list[bool]:
    """In which of `width` equal parts of the time a cause was: where it took half of the part, and at least once."""
    part = e2e_ns / width
    taken = [0.0] * width
    for segment in segments:
        if segment["cause"] == cause:
            first, last = segment["start_ns"] / part, segment["end_ns"] / part
            for i in range(int(first), min(width, int(last) + 1)):
                taken[i] += max(0.0, min(last, i + 1) - max(first, i))
    most = max(taken, default=0.0)
    return [share >= min(0.5, most) and share > 0 for share in taken]


def late_tokens(data: Mapping[str, Any]) -> list[str]:
    """The tokens that came latest, in order of time, and why."""
    late = sorted((token for token in data["tokens"] if token["is_outlier"]), key=lambda token: -token["gap_ns"])
    if not late:
        return []
    shown = sorted(late[:MAX_LATE_TOKENS], key=lambda token: int(token["at_ns"]))
    which = "" if len(shown) == len(late) else f"; the {len(shown)} latest"
    lines = [f"  at {duration(token['at_ns'])}, after {duration(token['gap_ns'])}: {token['why']}" for token in shown]
    return ["", f"{counted(len(late), 'token')} came late{which}:", *lines]
