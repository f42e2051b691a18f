"""Claim 4: continuous batching stays near full, and a freed slot is used again in the next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystop.claims.claim import Claim
from everystop.claims.findings import Condition, Findings, counted
from everystop.claims.lab import NUM_SLOTS, Lab, Trial
from everystop.claims.plots import draw_line, frame, legend_line, note, one_panel, without_marks
from everystop.claims.steps import history_of, steps_of
from everystop.core.events import AdmitEvent, FinishEvent
from everystop.observe.comparison import Run
from everystop.observe.report.grammar import KNOWN_STROKES, Theme
from everystop.observe.report.sheets import Sheet
from everystop.sim.workloads import Dice, Job, Workload

LEAST_FULL = 0.95
NUM_JOBS = 128
MAX_GAPS = 1
POLICIES = ("static", "continuous")


def mixed_answers(num_jobs: int = NUM_JOBS) -> Workload:
    """Requests at once with short prompts, so that whoever leaves can be replaced within one step's budget, and
    log-normal answers of 8 to 128 tokens.
    """
    dice = Dice("mixed-answers", 7)
    jobs = (Job(prompt=dice.prompt(dice.between(8, 12)), max_tokens=dice.log_normal(8, 128)) for _ in range(num_jobs))
    return Workload("mixed-answers", num_jobs, tuple(jobs))


def measure(lab: Lab) -> Findings:
    """The same requests under both policies."""
    workload = mixed_answers()
    runs = lab.runs({policy: Trial(workload, policy) for policy in POLICIES})
    gaps = {policy: [slot_gaps(run) for run in each] for policy, each in runs.items()}
    longest = counted(
        "longest gap from a slot's end to its next start, continuous",
        [max(each) for each in gaps["continuous"]],
        "steps",
    )
    refilled = counted(
        "slots used again while others waited, continuous", [len(each) for each in gaps["continuous"]], "times"
    )
    idle = counted(
        "longest gap from a slot's end to its next start, static", [max(each) for each in gaps["static"]], "steps"
    )
    full = counted(
        "slot-steps filled while anybody waited, continuous", [filled(run) for run in runs["continuous"]], "%"
    )
    static = counted("slot-steps filled while anybody waited, static", [filled(run) for run in runs["static"]], "%")
    return Findings(
        headline=f"While anybody waited, {full.text()} of the slot-steps were filled (static: {static.text()}); the "
        f"{refilled.value:,.0f} slots that came free then were used again at most {longest.text()} later (static: up "
        f"to {idle.text()}).",
        how=f"{NUM_JOBS} requests at once on {NUM_SLOTS} slots, answers log-normal from 8 to 128 tokens, under "
        "`static` and `continuous`. A gap is the number of the step in which a slot's next request boarded, less the "
        "number of that in which the last one got its last token.",
        conditions=(
            Condition(figure=longest, at_least=1, at_most=MAX_GAPS),
            Condition(figure=full, at_least=LEAST_FULL),
        ),
        figures=(refilled, idle, static),
        caption="Rows in each step, until the last request has boarded and then to the end. Continuous batching "
        "sinks only when nobody is left to board; static batching sinks in every batch.",
        remarks=(
            "Prompts are short here. Where many leave at once and the prompts of those who board do not fit into one "
            "step's budget (`--max-num-batched-tokens`), they board over as many steps as that takes.",
        ),
        data={policy: rows_by_step(each[0]) for policy, each in runs.items()} | {"num_slots": NUM_SLOTS},
    )


def slot_gaps(run: Run) -> list[int]:
    """For each slot that was used again: steps from the last one of its occupant to the first of the next."""
    ended: dict[int, int] = {}
    gaps = []
    acts = history_of(run).acts
    for act in acts.since(acts.start):
        if isinstance(act, FinishEvent):
            ended[act.slot] = act.step_id
        elif isinstance(act, AdmitEvent) and act.slot in ended:
            gaps.append(act.step_id - ended.pop(act.slot))
    return gaps


def filled(run: Run) -> float:
    """Share of the slots that had a row, over the steps in which somebody waited who had not boarded."""
    steps = [record for record in steps_of(run) if record.num_waiting]
    return sum(record.num_rows - record.num_padded_rows for record in steps) / (len(steps) * run.max_num_seqs)


def rows_by_step(run: Run) -> dict[str, Any]:
    """The rows at each step where their number changes, how many steps there were, and when the last one boarded."""
    rows = [record.num_rows for record in steps_of(run)]
    changes = [[i, num] for i, num in enumerate(rows) if not i or num != rows[i - 1]]
    waiting = [i for i, record in enumerate(steps_of(run)) if record.num_waiting]
    return {"changes": changes, "num_steps": len(rows), "last_wait": waiting[-1] + 1 if waiting else 0}


def draw(data: Mapping[str, Any], theme: Theme) -> Sheet:
    """Rows by step under both policies."""
    entries = [legend_line(policy, without_marks(KNOWN_STROKES[policy])) for policy in POLICIES]
    sheet, axes = one_panel(theme, "Rows in each step", entries)
    frame(axes, theme, x="step", y="rows", grid="y")
    for policy in POLICIES:
        shown = data[policy]
        steps, rows = zip(*shown["changes"], (shown["num_steps"], 0), strict=True)
        draw_line(axes, theme, steps, rows, without_marks(KNOWN_STROKES[policy]), drawstyle="steps-post")
    full, end = data["num_slots"], data["continuous"]["last_wait"]
    axes.axvline(end, color=theme.ink, ls=(0, (2, 2)), lw=1.2)
    longest = max(data[policy]["num_steps"] for policy in POLICIES)
    note(axes, theme, end + 0.01 * longest, full * 1.09, "continuous: nobody waits any more", ha="left")
    axes.set_ylim(0, full * 1.17)
    axes.set_yticks(range(0, full + 1, 4))
    axes.set_xlim(0, longest * 1.01)
    return sheet


CLAIM = Claim(
    number=4,
    name="refill",
    title="Continuous batching stays near full",
    statement="A request that finishes leaves its slot at once, and whoever waits takes it in the next step.",
    test=f"while anybody waits, at least {100 * LEAST_FULL:.0f} % of the slot-steps are filled, and every slot that "
    "comes free is used again in the very next step.",
    measure=measure,
    draw=draw,
)
