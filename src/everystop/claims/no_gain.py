"""Claim 9: where continuous batching stops helping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from everystop.claims.claim import Claim
from everystop.claims.clients import mean_e2e_s
from everystop.claims.findings import Condition, Figure, Findings, Source, counted, exact, measured
from everystop.claims.full_batch import ratios
from everystop.claims.lab import KV_CACHE_TOKENS, NUM_SLOTS, Lab, Trial
from everystop.claims.larger_batch import tokens_per_s
from everystop.claims.plots import (
    draw_line,
    draw_marks,
    frame,
    legend_line,
    legend_mark,
    note,
    two_panels,
    without_marks,
)
from everystop.claims.steps import fit_cost, steps_of
from everystop.observe.comparison import Run
from everystop.observe.report.drawing import matplotlib
from everystop.observe.report.grammar import KNOWN_STROKES, Theme
from everystop.observe.report.sheets import Sheet
from everystop.sim.cost import StepCost
from everystop.sim.workloads import Dice, Job, Workload
from everystop.words import percent

NUM_JOBS, MEAN_TOKENS = 64, 48
DEVIATIONS, WIDE = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25), 1.0  # of the logarithm of an answer's length
LOADS = (0.01, 0.03, 0.1, 0.3, 0.6, 0.9)
NUM_ARRIVALS = 128
TINY_BLOCKS = 16
POLICIES = ("static", "continuous")
CASES = ("mixed lengths", "equal lengths", "prefill only", "one client", "tiny KV cache")
PLACES = {  # of their names in the picture: how far above their marks, and which end of the name is there
    CASES[0]: (-0.06, "center"),
    CASES[1]: (-0.06, "left"),
    CASES[2]: (-0.13, "left"),
    CASES[4]: (0.06, "center"),
}
MOST_GAIN, LEAST_GAIN, MOST_LEFT, LEAST_RECOMPUTED = 1.15, 1.25, 0.85, 0.05

Runs = Mapping[tuple[str, str], Sequence[Run]]


def lengths(deviation: float, num: int) -> Iterator[int]:
    """Answers of about 48 tokens on average, log-normal with that deviation, cut off at two deviations."""
    dice = Dice(f"lengths {deviation}", 7)
    middle = MEAN_TOKENS / math.exp(deviation**2 / 2)
    low, high = (round(middle * math.exp(sign * 2 * deviation)) for sign in (-1, 1))
    return (dice.log_normal(max(1, low), high) for _ in range(num))


def spread(deviation: float, num: int = NUM_JOBS) -> Workload:
    """Requests at once whose answers are that different."""
    dice = Dice("spread", 7)
    jobs = (Job(prompt=dice.prompt(dice.between(8, 16)), max_tokens=length) for length in lengths(deviation, num))
    return Workload("spread", num, tuple(jobs))


def prefill_only() -> Workload:
    """Long prompts, and one token each."""
    dice = Dice("prefill-only", 7)
    return Workload(
        "prefill-only", 32, tuple(Job(prompt=dice.prompt(dice.between(250, 350)), max_tokens=1) for _ in range(32))
    )


def one_client() -> Workload:
    """One request at a time."""
    dice = Dice("one-client", 7)
    return Workload("one-client", 1, tuple(Job(prompt=dice.prompt(12), max_tokens=MEAN_TOKENS) for _ in range(6)))


def at_rate(workload: Workload, per_s: float) -> Workload:
    """The same jobs as independent arrivals."""
    dice, at_s, jobs = Dice("arrivals", 7), 0.0, []
    for job in workload.jobs:
        at_s += dice.exponential(1 / per_s)
        jobs.append(Job(prompt=job.prompt, max_tokens=job.max_tokens, at_s=round(at_s, 6)))
    return Workload("arrivals", 0, tuple(jobs))


def cases() -> dict[str, tuple[Workload, dict[str, Any], int]]:
    """What is measured: requests, flags, and how many tokens fit into the KV cache."""
    mixed, room = spread(WIDE), KV_CACHE_TOKENS
    return {
        CASES[0]: (mixed, {}, room),
        CASES[1]: (spread(0.0), {}, room),
        CASES[2]: (prefill_only(), {}, room),
        CASES[3]: (one_client(), {}, room),
        CASES[4]: (mixed, {"admission": "greedy"}, TINY_BLOCKS * 32),
    }


def trial(policy: str, workload: Workload, flags: Mapping[str, Any], kv_tokens: int = KV_CACHE_TOKENS) -> Trial:
    """Where requests come one by one, static batching does not wait for a batch to fill: the best that it can do."""
    if policy == "static" and workload.num_clients <= 1:
        flags = {**flags, "batch_wait_ms": 0}
    return Trial(workload, policy, flags, kv_tokens)


def measure(lab: Lab) -> Findings:
    """Five cases on the server under both policies, and two curves in virtual time with these runs' step times."""
    trials = {(case, p): trial(p, *given) for case, given in cases().items() for p in POLICIES}
    named = lab.runs({f"{case}, {p}": each for (case, p), each in trials.items()})
    runs: Runs = dict(zip(trials, named.values(), strict=True))
    mixed, equal, prefill, single, tiny = gains = [gain_figure(runs, case) for case in CASES]
    left = measured(
        "gain with the tiny KV cache, times that with room for all",
        ratios(gains_of(runs, CASES[4]), gains_of(runs, CASES[0])),
        "×",
    )
    again = counted(
        "tokens computed again, tiny KV cache, continuous",
        [recomputed_share(run) for run in runs[CASES[4], "continuous"]],
        "%",
    )
    cost = fit_cost(run for each in runs.values() for run in each).model
    curve = [spread_gain(lab, cost, deviation) for deviation in DEVIATIONS]
    loads = load_gains(lab, cost)
    grows = exact(
        "gain at the widest spread of lengths, times that at equal lengths", curve[-1] / curve[0], "×", Source.SIMULATED
    )
    idle = exact(
        f"mean E2E at {percent(LOADS[0])} of capacity, static over continuous", loads[0], "×", Source.SIMULATED
    )
    return Findings(
        headline=f"Continuous batching brings {mixed.text()} the tokens a second of static where lengths differ, "
        f"{equal.text()} where they are equal, {prefill.text()} where there is only prefill. For one client "
        f"answers come {single.text()} as fast; with a KV cache that thrashes, {tiny.text()} the tokens a second.",
        how=f"{NUM_SLOTS} slots. {CASES[0]}: {NUM_JOBS} requests at once, answers log-normal with deviation {WIDE:g} "
        f"and a mean of about {MEAN_TOKENS}; {CASES[1]}: {MEAN_TOKENS} tokens each; {CASES[2]}: 32 prompts of 250 to "
        f"350 tokens, one token each; {CASES[3]}: one request at a time; {CASES[4]}: the first again, in {TINY_BLOCKS} "
        "blocks of 32 tokens under `--admission greedy`. For one client and for arrivals, `--batch-wait-ms` is 0. "
        f"Virtual time, with step times fitted to these runs: {NUM_JOBS} requests at once of growing spread, and "
        f"{NUM_ARRIVALS} independent arrivals.",
        conditions=(
            Condition(figure=mixed, at_least=LEAST_GAIN),
            Condition(figure=equal, at_most=MOST_GAIN),
            Condition(figure=prefill, at_most=MOST_GAIN),
            Condition(figure=single, at_most=MOST_GAIN),
            Condition(figure=idle, at_most=MOST_GAIN),
            Condition(figure=again, at_least=LEAST_RECOMPUTED),
            Condition(figure=left, at_most=MOST_LEFT),
            Condition(figure=grows, at_least=LEAST_GAIN),
        ),
        figures=(gains[4], *(load_figure(load, value) for load, value in zip(LOADS[1:], loads[1:], strict=True))),
        caption="Gain is static over continuous, so 1 is none. Left: time for all requests, by the deviation of "
        "answers' lengths over their mean. Right: mean E2E of independent arrivals, by what is asked of what can be "
        "served; one client, of whom there are never two, stands at the left. Lines are simulated, marks measured.",
        remarks=(
            "Low load is lower than one may think: as soon as two requests overlap, one of them waits for the other "
            "under static batching.",
        ),
        data={
            "variation": [variation(deviation) for deviation in DEVIATIONS],
            "spread_gain": curve,
            "loads": list(LOADS),
            "load_gain": loads,
            "marks": [
                [CASES[0], variation(WIDE), mixed.value],
                [CASES[1], 0.0, equal.value],
                [CASES[2], 0.0, prefill.value],
                [CASES[4], variation(WIDE), tiny.value],
            ],
            "one_client": single.value,
        },
    )


def gains_of(runs: Runs, case: str) -> list[float]:
    """Static over continuous, repeat by repeat: of time for all, or of the mean E2E where there is one client."""
    value = mean_e2e_s if case == CASES[3] else duration_s
    return ratios([value(run) for run in runs[case, "static"]], [value(run) for run in runs[case, "continuous"]])


def gain_figure(runs: Runs, case: str) -> Figure:
    """What continuous batching gains in a case."""
    what = "mean E2E, static over continuous" if case == CASES[3] else "tokens a second, continuous over static"
    return measured(f"{what}, {case}", gains_of(runs, case), "×")


def duration_s(run: Run) -> float:
    """For all requests; they bring equally many tokens under both policies."""
    return run.num_output_tokens / tokens_per_s(run)


def recomputed_share(run: Run) -> float:
    """Of all tokens computed, those that had been computed before."""
    steps = steps_of(run)
    return sum(step.num_recomputed_tokens for step in steps) / sum(sum(step.nums) for step in steps)


def spread_gain(lab: Lab, cost: StepCost, deviation: float) -> float:
    """Time for all requests of that spread, static over continuous."""
    workload = spread(deviation)
    static, continuous = (lab.simulate(trial(p, workload, {}), cost).duration_s for p in POLICIES)
    return static / continuous


def load_gains(lab: Lab, cost: StepCost) -> list[float]:
    """Mean E2E, static over continuous, at shares of the requests a second that continuous batching can serve."""
    workload = spread(WIDE, NUM_ARRIVALS)
    most_per_s = NUM_ARRIVALS / lab.simulate(trial("continuous", workload, {}), cost).duration_s
    found = []
    for load in LOADS:
        arrivals = at_rate(workload, load * most_per_s)
        static, continuous = (mean_e2e_s(lab.simulate(trial(p, arrivals, {}), cost)) for p in POLICIES)
        found.append(static / continuous)
    return found


def load_figure(load: float, value: float) -> Figure:
    """A point of the curve."""
    return exact(f"mean E2E at {percent(load)} of capacity, static over continuous", value, "×", Source.SIMULATED)


def variation(deviation: float) -> float:
    """Standard deviation over mean of the lengths as they are drawn."""
    drawn = list(lengths(deviation, NUM_JOBS))
    return pstdev(drawn) / fmean(drawn)


def draw(data: Mapping[str, Any], theme: Theme) -> Sheet:
    """Gain over the spread of lengths, and over load."""
    stroke = KNOWN_STROKES["continuous"]
    entries = [legend_line("simulated", without_marks(stroke)), legend_mark("measured", stroke)]
    sheet, (left, right) = two_panels(theme, "What continuous batching gains over static", entries)
    gain_axes(left, theme, "Tokens a second", "standard deviation of lengths / mean")
    draw_line(left, theme, data["variation"], data["spread_gain"], without_marks(stroke))
    high = max(*data["spread_gain"], *(value for *_, value in data["marks"]))
    for case, x, value in data["marks"]:
        draw_marks(left, theme, [x], [value], stroke)
        shift, side = PLACES[case]
        note(left, theme, x, value + shift * high, case, ha=side)
    left.set_ylim(0, high * 1.15)
    left.set_xlim(-0.03, max(data["variation"]) * 1.06)
    gain_axes(right, theme, "Mean E2E", "load, % of capacity (log scale)")
    percents = [100 * load for load in data["loads"]]
    draw_line(right, theme, percents, data["load_gain"], without_marks(stroke))
    draw_marks(right, theme, percents[:1], [data["one_client"]], stroke)
    most = max(*data["load_gain"], data["one_client"])
    note(right, theme, percents[0], data["one_client"] - 0.06 * most, "one client", ha="left")
    right.set_xscale("log")
    right.set_xticks(percents, [f"{each:g}" for each in percents])
    right.xaxis.set_minor_locator(matplotlib("ticker").NullLocator())
    right.set_ylim(0, most * 1.15)
    return sheet


def gain_axes(axes: Any, theme: Theme, title: str, x: str) -> None:
    """Axes of a gain, with a line where there is none."""
    frame(axes, theme, title=title, x=x, y="times", grid="y")
    axes.axhline(1, color=theme.ink, ls=(0, (1, 2)), lw=1.4, zorder=3)


CLAIM = Claim(
    number=9,
    name="no-gain",
    title="Where it stops helping",
    statement="Continuous batching gains where answers differ in length and somebody waits. Where all are equally "
    "long, where nobody else is there, where there is nothing but prefill, static batching is as good; and where the "
    "KV cache has no room for those on board, part of the gain goes into computing again.",
    test=f"it brings at least {LEAST_GAIN:g} times the tokens a second where lengths differ, and more by that much at "
    f"the widest spread than at none (simulated); but at most {MOST_GAIN:g} times where lengths are equal or there is "
    f"only prefill; answers come at most {MOST_GAIN:g} times sooner for one client and at {percent(LOADS[0])} load "
    f"(simulated); and a KV cache that makes it compute at least {percent(LEAST_RECOMPUTED)} of the tokens again "
    f"leaves at most {percent(MOST_LEFT)} of the ratio.",
    measure=measure,
    draw=draw,
)
