"""Claim 3: a larger static batch does not cure it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from everystop.claims.claim import Claim
from everystop.claims.findings import Condition, Figure, Findings, Source, counted, exact, in_words, measured
from everystop.claims.lab import Lab, Trial
from everystop.claims.plots import (
    draw_line,
    draw_marks,
    frame,
    legend_line,
    legend_mark,
    log_ticks,
    two_panels,
    without_marks,
)
from everystop.claims.refill import mixed_answers
from everystop.claims.steps import fit_cost, useful_share
from everystop.observe.comparison import Run
from everystop.observe.report.grammar import KNOWN_STROKES, Theme
from everystop.observe.report.sheets import Sheet
from everystop.words import listed

SIZES, MEASURED_SIZES = (4, 8, 16, 32, 64), (4, 16, 64)
SMALLEST, LARGEST = SIZES[0], SIZES[-1]
NUM_SIMULATED, NUM_MEASURED = 2048, 192
STEP_TOKENS = 1024  # so that a batch of 64 boards in one step
POLICIES = ("static", "continuous")
MOST_SHARE, LEAST_GAIN = 0.75, 1.1

Key = tuple[str, int]


def trial(policy: str, size: int, num_jobs: int) -> Trial:
    """So many of the requests at a batch size."""
    return Trial(mixed_answers(num_jobs), policy, {"max_num_seqs": size, "max_num_batched_tokens": STEP_TOKENS})


def measure(lab: Lab) -> Findings:
    """The first of the requests on the server, all of them in virtual time with the step times of these runs."""
    keys = [(p, n) for n in MEASURED_SIZES for p in POLICIES]  # what is compared runs one after the other
    named = lab.runs({f"{p}, {n} slots": trial(p, n, NUM_MEASURED) for p, n in keys})
    runs = dict(zip(keys, named.values(), strict=True))
    fitted = fit_cost(run for each in runs.values() for run in each)
    virtual = {
        key: lab.simulate(trial(*key, NUM_SIMULATED), fitted.model) for key in itertools.product(POLICIES, SIZES)
    }
    again = {key: lab.simulate(trial(*key, NUM_MEASURED), fitted.model) for key in keys}
    shares = {n: useful_share(virtual["static", n]) for n in SIZES}
    falls = exact(
        f"slot-steps at work at {LARGEST} slots, times those at {SMALLEST}; {NUM_SIMULATED:,} requests",
        shares[LARGEST] / shares[SMALLEST],
        "×",
        Source.SIMULATED,
    )
    steepest = exact(
        "the same from any size to twice that, at most",
        max(b / a for a, b in itertools.pairwise(shares.values())),
        "×",
        Source.SIMULATED,
    )
    counts = [a / b for a, b in per_repeat(runs, ("static", LARGEST), ("static", SMALLEST), useful_share)]
    counted_fall = counted(f"the first, {NUM_MEASURED} requests", counts, "×")
    rises = measured(
        f"tokens/s at {LARGEST} slots, times those at {SMALLEST}, static",
        [a / b for a, b in per_repeat(runs, ("static", LARGEST), ("static", SMALLEST), tokens_per_s)],
        "×",
    )
    gains = {n: measured(f"tokens/s of continuous over static, {n} slots", gain(runs, n), "×") for n in MEASURED_SIZES}
    off = max(abs(tokens_per_s(again[key]) / mean(map(tokens_per_s, runs[key])) - 1) for key in keys)
    at = {n: in_words(shares[n], "%") for n in (SMALLEST, LARGEST)}
    return Findings(
        headline=f"With {LARGEST} slots in place of {SMALLEST}, static batching brings {rises.text()} the tokens a "
        f"second, and the slot-steps that do work go from {at[SMALLEST]} to {at[LARGEST]}; continuous batching brings "
        f"{listed([gains[n].text() for n in gains if n != LARGEST])} the tokens a second of static at "
        f"{listed([str(n) for n in gains if n != LARGEST])} slots, and at {LARGEST}, on which no verdict rests, "
        f"{in_doubt(gains[LARGEST])}.",
        how=f"Log-normal answers of 8 to 128 tokens. Measured: the first {NUM_MEASURED} requests at "
        f"{listed([str(size) for size in MEASURED_SIZES])} slots, {len(next(iter(runs.values())))} times. Simulated, "
        f"with step times fitted to these runs: all {NUM_SIMULATED:,} at {listed([str(size) for size in SIZES])} "
        "slots. Both policies each, all requests there from the start.",
        conditions=(
            Condition(figure=falls, at_most=MOST_SHARE),
            Condition(figure=steepest, at_most=1.0),
            Condition(figure=counted_fall, at_most=MOST_SHARE),
            Condition(figure=rises, at_least=1.0),
            *(Condition(figure=gains[n], at_least=LEAST_GAIN) for n in gains if n != LARGEST),
        ),
        figures=(
            gains[LARGEST],
            *(share_figure(runs[key], key) for key in keys),
            *(rate_figure(runs[key], key) for key in keys),
            exact(f"tokens/s simulated for the {NUM_MEASURED}, off the measured, at most", off, "%", Source.COMPUTED),
            exact("step times as fitted, off those held out, median", fitted.median_error, "%", Source.COMPUTED),
        ),
        caption=f"Lines: {NUM_SIMULATED:,} requests in virtual time; marks: the first {NUM_MEASURED} on the server, "
        "where the end of the run, when nobody is left to board, weighs more.",
        remarks=(
            "This is the best case of static batching: finished rows cost nothing but their slot. Where they are "
            "computed on, as padded generation does, what the slots lose is lost in tokens a second too.",
        ),
        data={
            "sizes": list(SIZES),
            "measured_sizes": list(MEASURED_SIZES),
            "share": {p: [useful_share(virtual[p, n]) for n in SIZES] for p in POLICIES},
            "rate": {p: [tokens_per_s(virtual[p, n]) for n in SIZES] for p in POLICIES},
            "measured_share": {p: [mean(map(useful_share, runs[p, n])) for n in MEASURED_SIZES] for p in POLICIES},
            "measured_rate": {p: [mean(map(tokens_per_s, runs[p, n])) for n in MEASURED_SIZES] for p in POLICIES},
        },
    )


def per_repeat(
    runs: Mapping[Key, Sequence[Run]], first: Key, second: Key, value: Callable[[Run], float]
) -> Iterator[tuple[float, float]]:
    """A figure under both, repeat by repeat."""
    return zip(map(value, runs[first]), map(value, runs[second]), strict=True)


def gain(runs: Mapping[Key, Sequence[Run]], size: int) -> list[float]:
    """Tokens a second of continuous over static at a size, repeat by repeat."""
    return [a / b for a, b in per_repeat(runs, ("continuous", size), ("static", size), tokens_per_s)]


def tokens_per_s(run: Run) -> float:
    """Output tokens over the time of the whole run."""
    return run.num_output_tokens / run.duration_s


def mean(values: Iterable[float]) -> float:
    """As the figures have it: the geometric one."""
    return measured("", list(values), "").value


def in_doubt(figure: Figure) -> str:
    """The figure, and whether its interval holds 1, so that it is no gain and no loss."""
    low, high = figure.low or figure.value, figure.high or figure.value
    return f"{figure.text()} (undecided: {figure.range_text()})" if low <= 1.0 <= high else figure.text()


def share_figure(runs: Sequence[Run], key: Key) -> Figure:
    """Slot-steps at work, on the server."""
    return counted(f"slot-steps at work, {key[0]} at {key[1]} slots", list(map(useful_share, runs)), "%")


def rate_figure(runs: Sequence[Run], key: Key) -> Figure:
    """Tokens a second, on the server."""
    return measured(f"tokens/s, {key[0]} at {key[1]} slots", list(map(tokens_per_s, runs)), "")


def draw(data: Mapping[str, Any], theme: Theme) -> Sheet:
    """Share of slot-steps at work, and tokens a second, over the size of the batch."""
    entries = [legend_line(f"{policy}, simulated", without_marks(KNOWN_STROKES[policy])) for policy in POLICIES]
    entries += [legend_mark(f"{policy}, measured", KNOWN_STROKES[policy]) for policy in POLICIES]
    sheet, (left, right) = two_panels(theme, "A larger batch", entries)
    for axes, name, title, y in (
        (left, "share", "Slot-steps that do work", "%"),
        (right, "rate", "Output tokens a second", "tokens/s"),
    ):
        factor = 100 if name == "share" else 1
        frame(axes, theme, title=title, x="slots (log scale)", y=y, grid="y")
        for policy in POLICIES:
            stroke = KNOWN_STROKES[policy]
            draw_line(axes, theme, data["sizes"], [factor * each for each in data[name][policy]], without_marks(stroke))
            found = [factor * each for each in data[f"measured_{name}"][policy]]
            draw_marks(axes, theme, data["measured_sizes"], found, stroke)
        log_ticks(axes, data["sizes"])
        axes.set_ylim(0, 105 if name == "share" else None)
    return sheet


CLAIM = Claim(
    number=3,
    name="larger-batch",
    title="A larger static batch does not cure it",
    statement="A larger static batch brings more tokens a second, since more rows share a step. But it lasts as long "
    "as the longest of more answers, so a smaller share of its slots does work.",
    test=f"the share of slot-steps that do work falls at every doubling from {SMALLEST} to {LARGEST} slots "
    f"(simulated), and to at most {MOST_SHARE:g} of what it was (simulated and counted on the server); tokens a "
    f"second rise from {SMALLEST} to {LARGEST} slots; and continuous batching brings at least {LEAST_GAIN:g} times as "
    f"many of them at the sizes measured below {LARGEST}, where a step's rows cost less than what they share.",
    measure=measure,
    draw=draw,
)
