"""Claim 1: static occupancy decays to one sequence, and a step of one row is busy but wasteful."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystop.claims.claim import Claim
from everystop.claims.findings import Condition, Findings, Source, counted, exact, in_words, measured
from everystop.claims.lab import NUM_SLOTS, Lab, Trial
from everystop.claims.model_work import ModelWork
from everystop.claims.plots import frame, two_panels
from everystop.claims.steps import decode_steps, execute_s, history_of, steps_of, useful_share
from everystop.observe.comparison import Run
from everystop.observe.formulas import static_occupancy
from everystop.observe.report.drawing import SMALL
from everystop.observe.report.grammar import LOOKS, Theme, Use
from everystop.observe.report.sheets import Entry, Sheet
from everystop.observe.slot_use import slots_by_step
from everystop.sim.workloads import Dice, Job, Workload
from everystop.trial.machine_limits import MachineLimits
from everystop.words import percent

SHORT, LONG = 20, 1000
LENGTHS = (*(SHORT,) * (NUM_SLOTS - 1), LONG)
LONE_STEPS = (978, 982)
MOST_OPERATIONS, LEAST_BYTES = 0.1, 0.4


def one_batch() -> Workload:
    """15 requests of 20 tokens and one of 1,000, all at once; their prompts fit into one step together."""
    dice = Dice("one-batch", 7)
    jobs = (
        Job(prompt=dice.prompt(12), max_tokens=length, group="long" if length == LONG else "short")
        for length in LENGTHS
    )
    return Workload("one-batch", NUM_SLOTS, tuple(jobs))


def measure(lab: Lab) -> Findings:
    """One static batch, and what its lone steps get out of the machine."""
    runs = lab.runs({"one batch": Trial(one_batch(), "static")})["one batch"]
    limits, work = lab.limits(), lab.work()
    lone = counted("steps of a single row", [len(decode_steps(run, 1)) for run in runs], "steps")
    whole = counted("all steps", [len(steps_of(run)) for run in runs], "steps")
    found = counted("slot-steps that bring a token", [useful_share(run) for run in runs], "%")
    said = exact("U = Σ lengths / (B × max length)", static_occupancy(LENGTHS, NUM_SLOTS), "%", Source.COMPUTED)
    uses = {rows: shares(runs, rows, limits, work) for rows in (1, NUM_SLOTS)}
    operations, bandwidth = (
        measured(f"{name} of a step of one row, of the machine's limit", uses[1][name], "%")
        for name in ("operations", "bytes")
    )
    fuller = [
        measured(f"{name} of a step of {NUM_SLOTS} rows, of the machine's limit", uses[NUM_SLOTS][name], "%")
        for name in ("operations", "bytes")
    ]
    return Findings(
        headline=f"{in_words(lone.value, 'of')} {in_words(whole.value, 'steps')} ran with one row of {NUM_SLOTS}; "
        f"{found.text()} of the slot-steps brought a token, and U = {said.text()}. Such a step takes "
        f"{bandwidth.text()} of the bytes a second that the machine can read, and {operations.text()} of the "
        "operations a second that it can do.",
        how=f"{NUM_SLOTS - 1} requests of {SHORT} tokens and one of {LONG:,} at once on {NUM_SLOTS} slots, under "
        f"`static`. The limits: {limits.describe()}.",
        conditions=(
            Condition(figure=lone, at_least=LONE_STEPS[0], at_most=LONE_STEPS[1]),
            Condition(figure=found, at_least=said.value - 0.001, at_most=said.value + 0.001),
            Condition(figure=operations, at_most=MOST_OPERATIONS),
            Condition(figure=bandwidth, at_least=LEAST_BYTES),
        ),
        figures=(said, whole, *fuller),
        caption="Left: slots at work, step by step; cross-hatched is held, finished but not given free. Right: what "
        "a step of one row and of all rows gets out of the machine.",
        remarks=(
            f"A step counts {work.operations_per_row / 1e6:,.0f} million operations a row, and "
            f"{work.bytes_per_step / 1e6:,.0f} MB of weights however many rows; attention and the KV cache are left "
            "out, contexts are short.",
        ),
        data={
            "rows": [[step, slots["decode"] + slots["prefill"], slots["held"]] for step, slots in changes(runs[0])],
            "num_steps": whole.value,
            "num_slots": NUM_SLOTS,
            "shares": {
                str(rows): {
                    "slots": rows / NUM_SLOTS,
                    "memory": measured("", each["bytes"], "").value,
                    "arithmetic": measured("", each["operations"], "").value,
                }
                for rows, each in uses.items()
            },
        },
    )


def shares(runs: list[Run], rows: int, limits: MachineLimits, work: ModelWork) -> dict[str, list[float]]:
    """What the steps of so many decoding rows achieve, of the machine's limits, repeat by repeat."""
    times = [execute_s(decode_steps(run, rows)) for run in runs]
    most = limits.operations_per_s or float("inf")
    return {
        "operations": [work.operations_per_row * rows / each / most for each in times],
        "bytes": [work.bytes_per_step / each / limits.bytes_per_s for each in times],
    }


def changes(run: Run) -> list[tuple[int, dict[str, int]]]:
    """What the slots did, at each step where that changes; steps count from 0."""
    found: list[tuple[int, dict[str, int]]] = []
    by_step = slots_by_step(history_of(run), run.max_num_seqs)
    with_rows = (slots for record, slots in by_step if record.num_rows)
    for step, slots in enumerate(with_rows):
        if not found or slots != found[-1][1]:
            found.append((step, slots))
    return found


def draw(data: Mapping[str, Any], theme: Theme) -> Sheet:
    """Slots over steps, and three shares for one row and for all."""
    decode, held = LOOKS[Use.DECODE], LOOKS[Use.HELD]
    entries = (Entry("at work", decode), Entry("held: finished, slot kept", held))
    sheet, (left, right) = two_panels(theme, "One static batch with a straggler", entries, gap=170)
    rows = [*data["rows"], [data["num_steps"], *data["rows"][-1][1:]]]
    steps, used = [step for step, _, _ in rows], [num for _, num, _ in rows]
    both = [num + num_held for _, num, num_held in rows]
    frame(left, theme, title="Slots, step by step", x="step", y="slots")
    style = {"step": "post", "edgecolor": theme.outline, "lw": 0.8}
    left.fill_between(steps, used, both, facecolor=held.fill, hatch=held.hatch, hatchcolor=held.hatch_colour, **style)
    left.fill_between(steps, used, facecolor=decode.fill, **style)
    left.set_xlim(0, data["num_steps"])
    left.set_ylim(0, data["num_slots"] * 1.06)
    left.set_yticks(range(0, data["num_slots"] + 1, 4))
    bars(right, theme, data["shares"])
    return sheet


def bars(axes: Any, theme: Theme, shares: Mapping[str, Mapping[str, float]]) -> None:
    """A bar for each share, in groups by the number of rows, each with its number."""
    frame(axes, theme, title="Of the most there is", x="%", grid="x")
    places, labels = [], []
    for group, (rows, values) in enumerate(shares.items()):
        for i, (name, value) in enumerate(values.items()):
            place = group * 4 + i
            axes.barh(place, 100 * value, height=0.72, color=LOOKS[Use.DECODE].fill, edgecolor=theme.outline, lw=0.8)
            axes.text(100 * value + 1.5, place, percent(value), color=theme.ink, fontsize=SMALL, va="center")
            places.append(place)
            labels.append(f"{rows} row{'s' if rows != '1' else ''}: {name}")
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 114)


CLAIM = Claim(
    number=1,
    name="straggler",
    title="A static batch decays to one sequence",
    statement="While the longest answer of a static batch goes on, all other slots are held by requests that have "
    "finished. A step for one row takes the machine's memory as much as one for all rows, and leaves its arithmetic "
    "idle.",
    test=f"{LONE_STEPS[0]} to {LONE_STEPS[1]} steps have a single row; the share of slot-steps that bring a token is "
    f"U within a tenth of a percentage point; and a step of one row reaches at most {percent(MOST_OPERATIONS)} of the "
    f"operations a second, but at least {percent(LEAST_BYTES)} of the bytes a second that this machine can do.",
    measure=measure,
    draw=draw,
)
