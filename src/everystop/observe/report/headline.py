"""What a report says first: one sentence, the three figures, and every loss beside them in the same size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from everystop.observe.comparison import Comparison
from everystop.observe.gains import Gain, Headline, headline
from everystop.observe.ratios import Ratio
from everystop.observe.report.use_picture import wasted_share
from everystop.words import in_time, listed, percent, significant

BETTER, WORSE, UNDECIDED = "better", "worse", "undecided"
MAX_LOSSES = 6


@dataclass(frozen=True, slots=True)
class Card:
    """One figure: what it is, how many times better or worse with its interval, and the medians behind it."""

    title: str
    verdict: str
    times: str
    interval: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that is said of one policy against the baseline."""

    policy: str
    baseline: str
    sentence: str
    cards: tuple[Card, ...]
    num_more_losses: int


def verdict(comparison: Comparison, policy: str) -> Verdict:
    """What a policy gains and loses against the first one; both must have served something."""
    said = headline(comparison, policy)
    losses = _distinct(said)
    figures = (*said.figures, *losses[:MAX_LOSSES])
    return Verdict(
        policy,
        said.baseline,
        " ".join(_sentences(comparison, said, losses)),
        tuple(_card(gain) for gain in figures if gain.ratio is not None),
        max(0, len(losses) - MAX_LOSSES),
    )


def _distinct(said: Headline) -> list[Gain]:
    """Losses, worst first, without those of figures that have no ratio."""
    return [gain for gain in said.losses if gain.ratio is not None]


def _card(gain: Gain) -> Card:
    ratio = gain.ratio
    assert ratio is not None
    word, mean, low, high = _size(ratio)
    times = f"{mean:.2f} × {word}"
    interval = f"95 % interval {low:.2f} to {high:.2f}" if low is not None else "one repeat: no interval"
    if low is not None and not ratio.is_decided:
        word, times, interval = UNDECIDED, UNDECIDED, f"{times} on average, {interval}: either way round"
    return Card(
        gain.measure.title, word, _whole(times), interval, _middle(gain.baseline, gain), _middle(gain.values, gain)
    )


def _size(ratio: Ratio) -> tuple[str, float, float | None, float | None]:
    """Whether it is better or worse, how many times, and the interval, turned so that it is of times above 1."""
    if ratio.mean >= 1:
        return BETTER, ratio.mean, ratio.low, ratio.high
    if ratio.low is None or ratio.high is None:
        return WORSE, 1 / ratio.mean, None, None
    return WORSE, 1 / ratio.mean, 1 / ratio.high, 1 / ratio.low


def _times(gain: Gain) -> str:
    """How many times better or worse, without the interval."""
    assert gain.ratio is not None
    word, mean, _, _ = _size(gain.ratio)
    return _whole(f"{mean:.2f} × {word}")


def _with_interval(ratio: Ratio) -> str:
    """How many times better or worse, and within what."""
    word, mean, low, high = _size(ratio)
    times = _whole(f"{mean:.2f} × {word}")
    if low is None:
        return f"{times}, one repeat"
    return f"{times}, 95 % interval {_whole(f'{low:.2f} to {high:.2f}')}{'' if ratio.is_decided else ': undecided'}"


def _whole(words: str) -> str:
    """Words that no line break tears apart."""
    return words.replace(" ", "\u00a0")


def _middle(values: Sequence[float], gain: Gain) -> str:
    """The median over repeats, in the measure's unit."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "–"
    return f"{significant(median(known))} a second" if gain.measure.is_rate else in_time(median(known))


def _sentences(comparison: Comparison, said: Headline, losses: Sequence[Gain]) -> list[str]:
    by_name = {gain.measure.name: gain for gain in said.figures}
    num = len(comparison.runs[0].requests)
    durations = {
        policy: median(run.duration_s for run in comparison.runs_of(policy) if run.good)
        for policy in (said.baseline, said.policy)
    }
    first = (
        f"Same {num:,} request{'s' if num != 1 else ''}: {said.policy} finished in {in_time(durations[said.policy])} "
        f"against {in_time(durations[said.baseline])} under {said.baseline}"
    )
    if (rate := by_name.get("output_throughput")) is not None and rate.ratio is not None:
        first += f" (throughput {_with_interval(rate.ratio)})"
    parts = [first]
    if (ttft := by_name.get("ttft_p95")) is not None and ttft.ratio is not None:
        parts.append(f"p95 TTFT was {_middle(ttft.values, ttft)} against {_middle(ttft.baseline, ttft)}")
    wasted = wasted_share(comparison.runs_of(said.baseline))
    if wasted >= 0.005:
        parts.append(f"{percent(wasted)} of {said.baseline}'s slot time was held or padded")
    sentences = ["; ".join(parts) + "."]
    if losses:
        named = [f"{gain.measure.title} ({_times(gain)})" for gain in losses[:3]]
        sentences.append(f"Worse under {said.policy}: {listed(named)}.")
    return sentences
