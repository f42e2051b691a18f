"""What a claim found: figures with intervals and sources, conditions on them, and the verdict that follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from everystop.observe.ratios import mean_ratio
from everystop.words import in_time, significant


class Verdict(StrEnum):
    """`UNDECIDED`: the interval crosses the threshold, or there is none because there was one repeat."""

    HELD = "held"
    DID_NOT_HOLD = "did not hold"
    UNDECIDED = "undecided"


class Source(StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    COUNTED = "counted"
    SIMULATED = "simulated"
    COMPUTED = "computed"


NUM_LOOKS = 3  # at a claim's figures, each with twice the repeats of the one before
CONFIDENCE = 1 - 0.05 / NUM_LOOKS  # of each, so that all together are wrong in one of twenty (Bonferroni)
INTERVAL_METHOD = (
    "the geometric mean over the repeats, and Student's interval of the mean logarithm; a ratio is taken within each "
    "repeat first"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number with its interval; `low` and `high` are None where one repeat gives no interval, and equal `value`
    where it is exact. `unit` is "s", "%" (the value is a share), "×", or a word that follows the number.
    """

    name: str
    value: float
    unit: str
    low: float | None
    high: float | None
    source: Source
    num_repeats: int = 1

    @property
    def is_exact(self) -> bool:
        """The interval is a point."""
        return self.low == self.value == self.high

    def text(self) -> str:
        """The number with its unit. Example: 2.45 ×."""
        return in_words(self.value, self.unit)

    def range_text(self) -> str:
        """Its interval, empty where there is none. Example: 2.31–2.60 ×."""
        if self.is_exact or self.low is None or self.high is None:
            return ""
        return f"{in_words(self.low, self.unit)} to {in_words(self.high, self.unit)}"


def in_words(value: float, unit: str) -> str:
    """A number with its unit; a word of several loses its s where there is one of it.

    Example: 0.0811 and "%" give 8.11 %; 1,004 and "steps" give 1,004 steps, 1 and "steps" give 1 step.
    """
    if unit == "s":
        return in_time(value)
    if unit == "%":
        return f"{significant(value * 100)} %"
    number = f"{value:,.0f}" if float(value).is_integer() else significant(value)
    return f"{number} {unit.removesuffix('s') if value == 1 else unit}".rstrip()


def measured(name: str, values: Sequence[float], unit: str) -> Figure:
    """A figure above 0 that was measured once a repeat."""
    mean = mean_ratio(values, CONFIDENCE)
    return Figure(
        name=name,
        value=mean.mean,
        unit=unit,
        low=mean.low,
        high=mean.high,
        source=Source.MEASURED,
        num_repeats=len(values),
    )


def counted(name: str, values: Sequence[float], unit: str = "") -> Figure:
    """A figure counted in events once a repeat: the middle one, and from the least to the most."""
    ranked = sorted(values)
    return Figure(
        name=name,
        value=ranked[len(ranked) // 2],
        unit=unit,
        low=ranked[0],
        high=ranked[-1],
        source=Source.COUNTED,
        num_repeats=len(values),
    )


def exact(name: str, value: float, unit: str, source: Source) -> Figure:
    """A figure that every repeat would give again: simulated, or computed from others."""
    return Figure(name=name, value=value, unit=unit, low=value, high=value, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What a figure must be for the claim to hold: its whole interval within the bounds."""

    figure: Figure
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        assert self.at_least is not None or self.at_most is not None, "a condition without a bound cannot fail"

    @property
    def verdict(self) -> Verdict:
        """Held where the whole interval is within the bounds, failed where none of it is."""
        low, high = self.figure.low, self.figure.high
        if low is None or high is None:
            return Verdict.UNDECIDED
        least = float("-inf") if self.at_least is None else self.at_least
        most = float("inf") if self.at_most is None else self.at_most
        if least <= low and high <= most:
            return Verdict.HELD
        return Verdict.DID_NOT_HOLD if high < least or low > most else Verdict.UNDECIDED

    def bound_text(self) -> str:
        """The bounds. Example: at least 2 ×."""
        unit = self.figure.unit
        least = None if self.at_least is None else in_words(self.at_least, unit)
        most = None if self.at_most is None else in_words(self.at_most, unit)
        if least is not None and most is not None:
            return least if least == most else f"{least} to {most}"
        return f"at least {least}" if most is None else f"at most {most}"


def verdict_of(conditions: Iterable[Condition]) -> Verdict:
    """A claim holds if all its conditions do, and does not if one fails."""
    verdicts = [condition.verdict for condition in conditions]
    assert verdicts, "a claim without a condition cannot fail"
    if Verdict.DID_NOT_HOLD in verdicts:
        return Verdict.DID_NOT_HOLD
    return Verdict.UNDECIDED if Verdict.UNDECIDED in verdicts else Verdict.HELD


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What measuring a claim gave. `headline` is one sentence with the main figures, `how` says what was run,
    `conditions` decide, `figures` are shown beside them; `data` is plain data, all that the picture is drawn from, and
    `caption` says how to read it. `remarks` are sentences that a reader must know, limits above all.
    """

    headline: str
    how: str
    conditions: tuple[Condition, ...]
    figures: tuple[Figure, ...] = ()
    caption: str = ""
    remarks: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """What follows."""
        return verdict_of(self.conditions)

    @property
    def may_be_decided(self) -> bool:
        """It is undecided, and more repeats would narrow the intervals for which it is."""
        undecided = [each.figure for each in self.conditions if each.verdict is Verdict.UNDECIDED]
        can_narrow = all(each.source is Source.MEASURED and each.num_repeats > 1 for each in undecided)
        return self.verdict is Verdict.UNDECIDED and can_narrow

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "data": dict(self.data)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Findings:
        """The inverse of `as_data`, also after JSON."""
        return cls(
            headline=data["headline"],
            how=data["how"],
            conditions=tuple(Condition(**each | {"figure": _figure(each["figure"])}) for each in data["conditions"]),
            figures=tuple(map(_figure, data["figures"])),
            caption=data["caption"],
            remarks=tuple(data["remarks"]),
            data=data["data"],
        )


def _figure(data: Mapping[str, Any]) -> Figure:
    return Figure(**{**data, "source": Source(data["source"])})
