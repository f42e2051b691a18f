"""What one policy gains over another, and what it loses: paired ratios of the figures of runs.

A ratio above 1 means better, whichever way the figure goes: 2 is twice as many tokens a second, or half the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from everystop.observe.comparison import Comparison, Run
from everystop.observe.distribution import percentile
from everystop.observe.goodput import is_demanding, num_good
from everystop.observe.ratios import Ratio, paired_ratio

HEADLINE = ("output_throughput", "ttft_p95", "e2e_p95")
"""The three figures that every comparison is summed up by."""
MAX_GROUPS = 8
SINGLE_RUN_NOISE = 0.05
"""What a lone repeat must be worse by to be called a loss: two runs of the same thing differ by that much."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a run, NaN where it has none: seconds, of which fewer are better, or a rate."""

    name: str
    title: str
    of: Callable[[Run], float]
    is_rate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A measure under two policies, run by run of the repeats that have both; `ratio` is None where it has none."""

    measure: Measure
    baseline: tuple[float, ...]
    values: tuple[float, ...]
    ratio: Ratio | None

    @property
    def is_loss(self) -> bool:
        """Worse than the baseline, with the whole interval; where one repeat gives none, by more than 5 %."""
        if self.ratio is None:
            return False
        return self.ratio.is_below_one if self.ratio.high is not None else self.ratio.mean < 1 - SINGLE_RUN_NOISE


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A policy against the baseline: the three figures, and all other measures that got worse, worst first."""

    policy: str
    baseline: str
    figures: tuple[Gain, ...]
    losses: tuple[Gain, ...]


def measures(comparison: Comparison) -> list[Measure]:
    """All that is compared; by group, too, where there are two to eight."""
    found = [
        Measure("output_throughput", "output tokens a second", _throughput, is_rate=True),
        Measure("duration", "time for all requests", _duration_s),
        *_latency("ttft", "TTFT", _ttft_s, (50, 95)),
        *_latency("itl", "ITL", _itl_s, (50, 99)),
        *_latency("tpot", "TPOT", _tpot_s, (95,)),
        *_latency("e2e", "E2E", _e2e_s, (50, 95)),
    ]
    if is_demanding(comparison.settings):
        found.append(Measure("goodput", "good requests a second", partial(_goodput, comparison.settings), is_rate=True))
    groups = comparison.groups
    for group in groups if 1 < len(groups) <= MAX_GROUPS else ():
        found += [
            Measure(f"ttft_mean/{group}", f"TTFT mean of {group}", partial(_mean, _ttft_s, group)),
            Measure(f"decode_mean/{group}", f"decode time of {group}", partial(_mean, _decode_s, group)),
            Measure(f"e2e_mean/{group}", f"E2E mean of {group}", partial(_mean, _e2e_s, group)),
        ]
    return found


def gains(comparison: Comparison, policy: str, baseline: str | None = None) -> list[Gain]:
    """Every measure of a policy against the baseline (default: the first policy)."""
    pairs = list(comparison.pairs(policy, baseline or comparison.policies[0]))
    return [_gain(measure, pairs) for measure in measures(comparison)]


def headline(comparison: Comparison, policy: str, baseline: str | None = None) -> Headline:
    """What is said first."""
    all_gains = gains(comparison, policy, baseline)
    rest = [gain for gain in all_gains if gain.measure.name not in HEADLINE and gain.is_loss]
    return Headline(
        policy=policy,
        baseline=baseline or comparison.policies[0],
        figures=tuple(gain for gain in all_gains if gain.measure.name in HEADLINE),
        losses=tuple(sorted(rest, key=lambda gain: 0.0 if gain.ratio is None else gain.ratio.mean)),
    )


def _gain(measure: Measure, pairs: Sequence[tuple[Run, Run]]) -> Gain:
    values = tuple(measure.of(run) for run, _ in pairs)
    baseline = tuple(measure.of(run) for _, run in pairs)
    ratio = paired_ratio(values, baseline) if measure.is_rate else paired_ratio(baseline, values)
    return Gain(measure=measure, baseline=baseline, values=values, ratio=ratio)


Values = Callable[[Run, str | None], list[float]]


def _latency(name: str, word: str, values: Values, percents: Sequence[int]) -> list[Measure]:
    """The mean and percentiles of a latency over all requests."""
    return [
        Measure(f"{name}_mean", f"{word} mean", partial(_mean, values, None)),
        *(Measure(f"{name}_p{p}", f"{word} p{p}", partial(_percentile, values, p)) for p in percents),
    ]


def _mean(values: Values, group: str | None, run: Run) -> float:
    listed = values(run, group)
    return sum(listed) / len(listed) if listed else float("nan")


def _percentile(values: Values, percent: int, run: Run) -> float:
    return percentile(values(run, None), percent)


def _duration_s(run: Run) -> float:
    """NaN where nothing was served: to fail soon is no gain."""
    return run.duration_s if run.good else float("nan")


def _throughput(run: Run) -> float:
    return run.num_output_tokens / run.duration_s if run.duration_s > 0 else float("nan")


def _goodput(settings: Mapping[str, Any], run: Run) -> float:
    return num_good(run, settings) / run.duration_s if run.duration_s > 0 else float("nan")


def _ttft_s(run: Run, group: str | None) -> list[float]:
    return [line.ttft_s for line in run.good if group in (None, line.group) and line.ttft_s is not None]


def _e2e_s(run: Run, group: str | None) -> list[float]:
    return [line.e2e_s for line in run.good if group in (None, line.group)]


def _tpot_s(run: Run, group: str | None) -> list[float]:
    return [line.tpot_s for line in run.good if group in (None, line.group) and line.tpot_s is not None]


def _decode_s(run: Run, group: str | None) -> list[float]:
    return [line.decode_s for line in run.good if group in (None, line.group) and line.decode_s is not None]


def _itl_s(run: Run, group: str | None) -> list[float]:
    return [gap_s for line in run.good if group in (None, line.group) for gap_s in line.itl_s]
