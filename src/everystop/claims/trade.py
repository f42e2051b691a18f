"""Claim 5: more tokens a second and shorter waits, paid for by those who are on board."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everystop.claims.claim import Claim
from everystop.claims.findings import Condition, Figure, Findings, measured
from everystop.claims.lab import NUM_SLOTS, Lab, Trial
from everystop.claims.plots import OTHER, PLAIN, frame, one_panel
from everystop.observe.comparison import Comparison, Run
from everystop.observe.gains import Gain, gains
from everystop.observe.report.drawing import SMALL, matplotlib
from everystop.observe.report.grammar import Theme
from everystop.observe.report.sheets import Sheet
from everystop.sim.workloads import Dice, Job, Workload
from everystop.words import significant

NUM_JOBS, LONG, STEP_TOKENS = 64, 300, 1024
POLICIES = ("static", "continuous")
LEAST_GAIN, LEAST_LOSS = 1.25, 1.05
GAINS = {"output_throughput": "tokens a second", "ttft_p95": "TTFT p95", "e2e_p95": "E2E p95"}
LOSSES = {"itl_p99": "ITL p99", "decode_mean/long": "the stragglers' own decode time"}


def with_stragglers() -> Workload:
    """Requests at once, the first of each 16 with a long answer; a static batch boards in a single step, so that nobody
    in it ever decodes beside a prompt.
    """
    dice = Dice("with-stragglers", 7)
    jobs = []
    for i in range(NUM_JOBS):
        is_long = i % NUM_SLOTS == 0
        num_output = LONG if is_long else dice.log_normal(8, 128)
        prompt = dice.prompt(dice.between(24, 63))
        jobs.append(Job(prompt=prompt, max_tokens=num_output, group="long" if is_long else "short"))
    return Workload("with-stragglers", NUM_JOBS, tuple(jobs))


def measure(lab: Lab) -> Findings:
    """The same requests under both policies."""
    workload = with_stragglers()
    runs = lab.runs({p: Trial(workload, p, {"max_num_batched_tokens": STEP_TOKENS}) for p in POLICIES})
    found = {gain.measure.name: gain for gain in gains(compared(workload.name, runs), "continuous")}
    better = [as_gain(found[name], word) for name, word in GAINS.items()]
    worse = [as_loss(found[name], word) for name, word in LOSSES.items()]
    return Findings(
        headline=f"Continuous batching brings {better[0].text()} the tokens a second; TTFT p95 is "
        f"{better[1].text()} and E2E p95 {better[2].text()} as short. But ITL p99 is {worse[0].text()}, and the "
        f"stragglers' own decode time {worse[1].text()} as long.",
        how=f"{NUM_JOBS} requests at once on {NUM_SLOTS} slots, prompts of 24 to 63 tokens; one in {NUM_SLOTS} has an "
        f"answer of {LONG} tokens, the others' are log-normal from 8 to 128. Steps have room for {STEP_TOKENS:,} "
        "tokens, so a static batch boards in one step: the best case for its ITL.",
        conditions=(
            *(Condition(figure=figure, at_least=LEAST_GAIN) for figure in better),
            *(Condition(figure=figure, at_least=LEAST_LOSS) for figure in worse),
        ),
        figures=tuple(
            absolute(found[name], i, policy) for name in (*GAINS, *LOSSES) for i, policy in enumerate(POLICIES)
        ),
        caption="Times better to the right, times worse to the left; the dark lines are the intervals.",
        remarks=(
            "Nobody loses what nobody else gains: a straggler decodes faster alone, because the other slots stand "
            "still. Whoever serves one long answer at a time and nobody else has no use for batching.",
        ),
        data={
            "better": [shown(figure, word) for figure, word in zip(better, GAINS.values(), strict=True)],
            "worse": [shown(figure, word) for figure, word in zip(worse, LOSSES.values(), strict=True)],
        },
    )


def compared(name: str, runs: Mapping[str, Sequence[Run]]) -> Comparison:
    """All runs, as what gains are taken from."""
    return Comparison(
        workload=name,
        policies=POLICIES,
        runs=tuple(run for each in runs.values() for run in each),
        settings={},
        num_repeats_asked=len(runs[POLICIES[0]]),
    )


def as_gain(gain: Gain, word: str) -> Figure:
    """Continuous over static of what should grow, static over continuous of what should shrink."""
    if gain.measure.is_rate:
        values = [a / b for a, b in zip(gain.values, gain.baseline, strict=True)]
        return measured(f"{word}, continuous over static", values, "×")
    values = [b / a for a, b in zip(gain.values, gain.baseline, strict=True)]
    return measured(f"{word}, static over continuous", values, "×")


def as_loss(gain: Gain, word: str) -> Figure:
    """Continuous over static of what should not grow and does."""
    values = [a / b for a, b in zip(gain.values, gain.baseline, strict=True)]
    return measured(f"{word}, continuous over static", values, "×")


def absolute(gain: Gain, place: int, policy: str) -> Figure:
    """What a policy came to."""
    word = (GAINS | LOSSES)[gain.measure.name]
    values = gain.values if place else gain.baseline
    return measured(f"{word}, {policy}", values, "" if gain.measure.is_rate else "s")


def shown(figure: Figure, word: str) -> list[Any]:
    """A figure as it is drawn."""
    return [word, figure.value, figure.low, figure.high]


def draw(data: Mapping[str, Any], theme: Theme) -> Sheet:
    """A bar for each figure, to the right or to the left of 1."""
    sheet, axes = one_panel(theme, "Continuous over static: what gets better, and what gets worse", height=230)
    frame(axes, theme, x="times worse     |     times better", grid="x")
    rows = [(*row, True) for row in data["better"]] + [(*row, False) for row in data["worse"]]
    for place, (word, value, low, high, is_better) in enumerate(rows):
        draw_bar(axes, theme, place, word, (value, low or value, high or value), is_better=is_better)
    most = max(high or value for _, value, _, high, _ in rows)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(matplotlib("ticker").NullLocator())
    reach = max(most * 2.2, 6)  # with room for the words at the longest bar
    axes.set_xlim(1 / reach, reach)
    ticks = [2.0**i for i in range(-8, 9) if 1 / reach <= 2.0**i <= reach]
    axes.set_xticks(ticks, [f"{max(tick, 1 / tick):g}" for tick in ticks])
    axes.axvline(1, color=theme.ink, lw=1.2, zorder=4)
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.invert_yaxis()
    return sheet


def draw_bar(
    axes: Any, theme: Theme, place: int, word: str, found: tuple[float, float, float], *, is_better: bool
) -> None:
    """One bar with its name, its number and its interval; `found` is value, low and high; 2 is twice as good or bad."""
    value, low, high = found
    sign = 1 if is_better else -1
    colour = (PLAIN if is_better else OTHER).colour
    axes.barh(place, value**sign - 1, left=1, height=0.6, color=colour, edgecolor=theme.outline, lw=0.8, zorder=3)
    axes.plot([low**sign, high**sign], [place, place], color=theme.ink, lw=2.2, zorder=5)
    style = {"color": theme.ink, "fontsize": SMALL, "va": "center", "zorder": 6}
    sides = ("left", "right") if is_better else ("right", "left")
    direction = "as many" if word == GAINS["output_throughput"] else "as short" if is_better else "as long"
    axes.text((high * 1.05) ** sign, place, f"{significant(value)} × {direction}", ha=sides[0], **style)
    axes.text(0.96**sign, place, word, ha=sides[1], **style)


CLAIM = Claim(
    number=5,
    name="trade",
    title="Throughput rises and waits fall; who is on board pays",
    statement="Continuous batching brings more tokens a second, and both first tokens and whole answers come sooner. "
    "The price is paid between tokens: steps are fuller, and prompts are computed in them, so ITL p99 rises, and a "
    "long answer that would have decoded alone takes longer.",
    test=f"tokens a second, TTFT p95 and E2E p95 each become at least {LEAST_GAIN:g} times better, and ITL p99 and the "
    f"decode time of the long answers at least {LEAST_LOSS:g} times worse.",
    measure=measure,
    draw=draw,
)
