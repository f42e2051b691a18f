"""Claim 2: a long answer keeps everybody out who waits, though slots are free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everystop.claims.claim import Claim
from everystop.claims.findings import Condition, Findings, counted, measured
from everystop.claims.lab import NUM_SLOTS, Lab, Trial
from everystop.claims.plots import WIDTH
from everystop.claims.steps import history_of, steps_of
from everystop.observe.comparison import Comparison, RequestLine, Run, from_json, to_json
from everystop.observe.report.grammar import Theme
from everystop.observe.report.pictures import twin_slot_chart
from everystop.observe.report.sheets import Sheet
from everystop.sim.workloads import Dice, Job, Workload

SHORT, LONG = 20, 300
NUM_LATE = NUM_SLOTS
LEAST_TIMES, LEAST_FREE = 3.0, 0.9
POLICIES = ("static", "continuous")


def blocked() -> Workload:
    """A batch with one long answer in it, and as many short ones that wait behind; all there from the start."""
    dice = Dice("blocked", 7)
    groups = ["long"] + ["short"] * (NUM_SLOTS - 1) + ["behind"] * NUM_LATE
    jobs = (Job(prompt=dice.prompt(12), max_tokens=LONG if group == "long" else SHORT, group=group) for group in groups)
    return Workload("blocked", len(groups), tuple(jobs))


def measure(lab: Lab) -> Findings:
    """The same requests under both policies."""
    workload = blocked()
    runs = lab.runs({policy: Trial(workload, policy) for policy in POLICIES})
    early = {
        policy: counted(f"boarded before the long answer ended, {policy}", [num_early(run) for run in each], "requests")
        for policy, each in runs.items()
    }
    free = counted(
        "steps with a slot that did no work, of those in which they waited, static",
        [free_share(run) for run in runs["static"]],
        "%",
    )
    waits = {policy: [mean_wait_s(run) for run in each] for policy, each in runs.items()}
    times = [a / b for a, b in zip(waits["static"], waits["continuous"], strict=True)]
    ratio = measured("mean wait to board, static over continuous", times, "×")
    figures = [measured(f"mean wait to board, {policy}", waits[policy], "s") for policy in POLICIES]
    return Findings(
        headline=f"{NUM_LATE} short requests waited {figures[0].text()} under static batching and {figures[1].text()} "
        f"under continuous: {ratio.text()}. In {free.text()} of the steps in which static batching let them wait, "
        "slots did no work.",
        how=f"{NUM_SLOTS} slots; a first batch of {NUM_SLOTS - 1} answers of {SHORT} tokens and one of {LONG}, and "
        f"behind it {NUM_LATE} requests of {SHORT} tokens, all sent at once. The wait runs from a request's arrival "
        "to its boarding.",
        conditions=(
            Condition(figure=early["static"], at_most=0),
            Condition(figure=early["continuous"], at_least=NUM_LATE),
            Condition(figure=free, at_least=LEAST_FREE),
            Condition(figure=ratio, at_least=LEAST_TIMES),
        ),
        figures=tuple(figures),
        caption="The same requests on the same time axis. Cross-hatched slots are held: their request has finished, "
        "and nobody may board until the whole batch has.",
        remarks=(
            "How much longer they wait is set by how much longer the longest answer is than the others: nothing of "
            "it is peculiar to this machine.",
        ),
        data={"comparison": to_json(first_runs(workload.name, runs))},
    )


def first_runs(name: str, runs: Mapping[str, Sequence[Run]]) -> Comparison:
    """The first run of each policy, as what pictures are drawn from."""
    return Comparison(
        workload=name,
        policies=tuple(runs),
        runs=tuple(each[0] for each in runs.values()),
        settings={},
        num_repeats_asked=1,
    )


def late_of(run: Run) -> list[RequestLine]:
    """The requests that wait behind the batch."""
    return [line for line in run.requests if line.group == "behind"]


def boarded_ns(run: Run, line: RequestLine) -> int:
    """When a request boarded for the first time."""
    assert line.request_id is not None
    return history_of(run).trails[line.request_id].admits[0].now_ns


def num_early(run: Run) -> int:
    """How many boarded before the long answer ended, which its client learns a little later."""
    long = next(line for line in run.requests if line.group == "long")
    assert long.request_id is not None
    finish = history_of(run).trails[long.request_id].finish
    assert finish is not None, "a run is over when all its requests are"
    return sum(boarded_ns(run, line) < finish.now_ns for line in late_of(run))


def free_share(run: Run) -> float:
    """Share of the steps before the last of them boarded in which a slot had no row."""
    last_ns = max(boarded_ns(run, line) for line in late_of(run))
    steps = [record for record in steps_of(run) if record.now_ns <= last_ns]
    return sum(record.num_rows < run.max_num_seqs for record in steps) / len(steps)


def mean_wait_s(run: Run) -> float:
    """From arrival to boarding."""
    trails = history_of(run).trails
    waits = []
    for line in late_of(run):
        assert line.request_id is not None
        waits.append(boarded_ns(run, line) - trails[line.request_id].since_ns)
    return sum(waits) / len(waits) / 1e9


def draw(data: Mapping[str, Any], theme: Theme) -> Sheet:
    """Slots over time, static above, continuous below."""
    runs = from_json(data["comparison"]).runs
    return twin_slot_chart(runs, theme, width=WIDTH)


CLAIM = Claim(
    number=2,
    name="head-of-line",
    title="One long answer blocks everybody who waits",
    statement="Under static batching a waiting request boards when the longest answer of the batch is done, however "
    "many slots have been free since. Under continuous batching it boards when any answer is done.",
    test=f"none of {NUM_LATE} waiting requests boards before the long answer ends under `static`, and all do under "
    f"`continuous`; slots did no work in at least {100 * LEAST_FREE:.0f} % of the steps in which they waited under "
    f"`static`; and their mean wait there is at least {LEAST_TIMES:.0f} times as long.",
    measure=measure,
    draw=draw,
)
