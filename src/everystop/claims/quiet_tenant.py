"""Claim 8: what first come, first served does to a quiet tenant beside a loud one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystop.claims.claim import Claim
from everystop.claims.clients import mean_ttft_s, ttft_s
from everystop.claims.findings import Condition, Findings, measured
from everystop.claims.full_batch import ratios
from everystop.claims.lab import NUM_SLOTS, Lab, Trial
from everystop.claims.larger_batch import tokens_per_s
from everystop.claims.plots import draw_line, frame, legend_line, one_panel
from everystop.observe.report.drawing import matplotlib
from everystop.observe.report.grammar import Theme, strokes
from everystop.observe.report.sheets import Sheet
from everystop.sim.workloads import Dice, Job, Kind, burst, in_order_of_time
from everystop.words import percent

KIND = Kind(prompt=(60, 120), output=(30, 60))
NUM_QUIET, FIRST_S, GAP_S = 10, 0.4, 0.4
FLOOD_S = 5.0  # of work, all of it there at once
NUM_PROBE, LEAST_FLOOD, MOST_FLOOD = 32, 32, 600
LEAST_WORSE, LEAST_BETTER, MOST_OF_ALONE, LEAST_THROUGHPUT = 10.0, 5.0, 4.0, 0.8
NAMES = ("first come, first served", "fair", "alone")


def quiet_jobs() -> tuple[Job, ...]:
    """One request of the quiet tenant now and then."""
    dice = Dice("quiet", 7)
    return tuple(KIND.job(dice, "quiet", round(FIRST_S + i * GAP_S, 6)) for i in range(NUM_QUIET))


def flood(num: int) -> tuple[Job, ...]:
    """So many requests of the loud tenant, all at the start."""
    return tuple(burst(Dice("loud", 7), KIND, "loud", num))


def measure(lab: Lab) -> Findings:
    """How fast requests are served, then a flood of some seconds under both policies, and the quiet tenant alone."""
    probe = in_order_of_time("probe", flood(NUM_PROBE))
    (probed,) = lab.runs({"capacity": Trial(probe, "continuous")}, once=True)["capacity"]
    num_loud = min(MOST_FLOOD, max(LEAST_FLOOD, round(FLOOD_S * NUM_PROBE / probed.duration_s)))
    both = in_order_of_time("quiet beside loud", quiet_jobs(), flood(num_loud))
    alone = in_order_of_time("quiet alone", quiet_jobs())
    trials = (Trial(both, "continuous"), Trial(both, "fair"), Trial(alone, "continuous"))
    runs = lab.runs(dict(zip(NAMES, trials, strict=True)))
    waits = {name: [mean_ttft_s(run, "quiet") for run in each] for name, each in runs.items()}
    first_come, fair, by_itself = (waits[name] for name in NAMES)
    worse = measured(
        "quiet tenant's mean TTFT, first come, first served over alone", ratios(first_come, by_itself), "×"
    )
    better = measured("the same, first come, first served over `fair`", ratios(first_come, fair), "×")
    rest = measured("the same, `fair` over alone", ratios(fair, by_itself), "×")
    speed = {name: [tokens_per_s(run) for run in runs[name]] for name in NAMES[:2]}
    kept = measured(
        "tokens a second of all, `fair` over first come, first served", ratios(speed[NAMES[1]], speed[NAMES[0]]), "×"
    )
    loud = {name: [mean_ttft_s(run, "loud") for run in runs[name]] for name in NAMES[:2]}
    return Findings(
        headline=f"Beside a loud tenant the quiet one waits {worse.text()} as long for its first token as alone under "
        f"first come, first served, and {rest.text()} under `fair`, at {kept.text()} the tokens a second.",
        how=f"{NUM_SLOTS} slots. The loud tenant sends {num_loud} requests at once, about {FLOOD_S:g} s of work; the "
        f"quiet one sends {NUM_QUIET}, one every {GAP_S:g} s. Prompts of {KIND.prompt[0]} to {KIND.prompt[1]} tokens, "
        f"answers of {KIND.output[0]} to {KIND.output[1]}. `continuous` is first come, first served; `fair` gives both "
        "the same weight.",
        conditions=(
            Condition(figure=worse, at_least=LEAST_WORSE),
            Condition(figure=better, at_least=LEAST_BETTER),
            Condition(figure=rest, at_most=MOST_OF_ALONE),
            Condition(figure=kept, at_least=LEAST_THROUGHPUT),
        ),
        figures=(
            *(measured(f"quiet tenant's mean TTFT, {name}", waits[name], "s") for name in NAMES),
            *(measured(f"loud tenant's mean TTFT, {name}", loud[name], "s") for name in NAMES[:2]),
        ),
        caption="Each point is a request of the quiet tenant: when it was sent, and how long its first token took.",
        remarks=(
            "How much longer the quiet tenant waits is how much the loud one has sent: under first come, first served "
            "nothing bounds it.",
        ),
        data={
            "sent_s": [job.at_s for job in quiet_jobs()],
            "ttft_s": {name: ttft_s(runs[name][0], "quiet") for name in NAMES},
        },
    )


def draw(data: Mapping[str, Any], theme: Theme) -> Sheet:
    """TTFT of each quiet request under three circumstances."""
    looks = dict(zip(NAMES, strokes(("static", "continuous", "alone")).values(), strict=True))
    sheet, axes = one_panel(theme, "The quiet tenant's first tokens", [legend_line(n, looks[n]) for n in NAMES])
    frame(axes, theme, x="sent, seconds from the start", y="TTFT, seconds (log scale)", grid="y")
    for name in NAMES:
        draw_line(axes, theme, data["sent_s"], data["ttft_s"][name], looks[name])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(matplotlib("ticker").FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(0, max(data["sent_s"]) + GAP_S)
    return sheet


CLAIM = Claim(
    number=8,
    name="quiet-tenant",
    title="First come, first served is not fair to a quiet tenant",
    statement="First come, first served serves most who asks for most: a tenant with few requests waits behind all "
    "that a loud one has sent. A policy that counts what each tenant gets lets it board at once, and costs little.",
    test=f"beside the loud tenant the quiet one's mean TTFT is at least {LEAST_WORSE:g} times that alone under first "
    f"come, first served; under `fair` at least {LEAST_BETTER:g} times shorter than that, and at most "
    f"{MOST_OF_ALONE:g} times that alone; and all together get at least {percent(LEAST_THROUGHPUT)} of the tokens a "
    "second.",
    measure=measure,
    draw=draw,
)
