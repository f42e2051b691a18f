"""Claim 0: why a full batch is nearly free."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from everystop.claims.claim import Claim
from everystop.claims.findings import Condition, Figure, Findings, measured
from everystop.claims.lab import Lab, Trial
from everystop.claims.plots import line_chart, note, two_panels
from everystop.claims.steps import decode_steps, execute_s
from everystop.observe.comparison import Run
from everystop.observe.report.drawing import matplotlib
from everystop.observe.report.grammar import Theme
from everystop.observe.report.sheets import Sheet
from everystop.sim.workloads import Dice, Job, Workload

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FULL = 16
NUM_STEPS = 24
PROMPT_TOKENS = 8
MOST_OF_ONE = 0.2


def equal_answers(num_rows: int) -> Workload:
    """Requests at once that decode together for at least 24 steps, also those that board last."""
    dice = Dice(f"rows-{num_rows}", 7)
    num_boarding = -(-num_rows * PROMPT_TOKENS // 256) + 2
    job = [Job(prompt=dice.prompt(PROMPT_TOKENS), max_tokens=NUM_STEPS + num_boarding) for _ in range(num_rows)]
    return Workload("equal", num_rows, tuple(job))


def measure(lab: Lab) -> Findings:
    """Step times at each number of rows, in turns."""
    trials = {
        f"{rows} rows": Trial(
            equal_answers(rows), "static", {"max_num_seqs": rows, "max_num_batched_tokens": max(256, 2 * rows)}
        )
        for rows in ROWS
    }
    runs = lab.runs(trials)
    times = {rows: [execute_s(decode_steps(run, rows)) for run in runs[f"{rows} rows"]] for rows in ROWS}
    rates = {rows: [rate(run, rows) for run in runs[f"{rows} rows"]] for rows in ROWS}
    longer = measured(f"step of {FULL} rows, times a step of one", ratios(times[FULL], times[1]), "×")
    price = further_row(longer)
    gain = measured(f"tokens a second at {FULL} rows, times those at one", ratios(rates[FULL], rates[1]), "×")
    most = measured("tokens a second at the best number of rows, times those at one", most_gain(rates), "×")
    bend = measured("rows at which half of the highest tokens a second is reached", bends(rates), "rows")
    return Findings(
        headline=f"A step of {FULL} rows takes {longer.text()} as long as one of a single row, and brings "
        f"{gain.text()} as many tokens a second; batching can give at most {most.text()} here, half of which is there "
        f"at {bend.value:.0f} rows.",
        how=f"Short prompts of {PROMPT_TOKENS} tokens, decoding together, 1 to {ROWS[-1]} at a time, on a server for "
        "each number, under `static`, so that they begin together; the median step of those in which all decode, at "
        f"least {NUM_STEPS - 2} steps each, as executed and recorded by the server while it streams them all.",
        conditions=(Condition(figure=price, at_most=MOST_OF_ONE), Condition(figure=gain, at_least=2.0)),
        figures=(longer, most, bend, *(per_row(rows, times[rows]) for rows in ROWS)),
        caption="Left: how long a step takes; the dashed line is what as many steps of one row would take. Right: "
        "tokens a second; the curve bends where the rows' own work takes as long as what all share, which is reading "
        "the weights.",
        remarks=(
            "How much of a step is shared depends on the machine: the more arithmetic it can do for each byte that it "
            "reads, the later the curve bends. On a GPU that is at hundreds of rows, on few cores soon.",
        ),
        data={
            "rows": list(ROWS),
            "step_s": [measured("", times[rows], "s").value for rows in ROWS],
            "tokens_per_s": [measured("", rates[rows], "").value for rows in ROWS],
            "bend_rows": bend.value,
        },
    )


def further_row(longer: Figure) -> Figure:
    """What each further row adds, of a lone row's step, from how many times that a full step takes; less than nothing
    where the full one was shorter.
    """
    value, low, high = (None if x is None else (x - 1) / (FULL - 1) for x in (longer.value, longer.low, longer.high))
    assert value is not None
    name = f"what each further row up to {FULL} adds to the step, of a lone row's"
    return replace(longer, name=name, value=value, unit="%", low=low, high=high)


def per_row(rows: int, values: Sequence[float]) -> Figure:
    """The step time at a number of rows."""
    return measured(f"step of {rows} row{'s' if rows > 1 else ''}", values, "s")


def rate(run: Run, num_rows: int) -> float:
    """Tokens a second from one step of so many rows to the next, hand-over included."""
    records = decode_steps(run, num_rows)
    num_steps = records[-1].step_id - records[0].step_id
    return num_rows * num_steps * 1e9 / (records[-1].now_ns - records[0].now_ns)


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Repeat by repeat."""
    return [a / b for a, b in zip(values, others, strict=True)]


def most_gain(rates: Mapping[int, Sequence[float]]) -> list[float]:
    """The highest rate over that of one row, repeat by repeat."""
    return [max(each) / each[0] for each in zip(*rates.values(), strict=True)]


def bends(rates: Mapping[int, Sequence[float]]) -> list[float]:
    """Rows at which half of the highest rate is reached, linear between the numbers of rows measured."""
    return [reached(list(rates), each, max(each) / 2) for each in zip(*rates.values(), strict=True)]


def reached(rows: Sequence[int], values: Sequence[float], level: float) -> float:
    """Where values that begin below a level first reach it. Example: 1 and 3 at rows 1 and 2 reach 2 at 1.5."""
    if values[0] >= level:
        return float(rows[0])
    points = zip(rows, values, strict=True)
    for (low, below), (high, above) in itertools.pairwise(points):
        if above >= level:
            return low + (high - low) * (level - below) / (above - below)
    raise AssertionError("the highest value is above the level")


def draw(data: Mapping[str, Any], theme: Theme) -> Sheet:
    """Step time, and tokens a second, over rows."""
    sheet, (left, right) = two_panels(theme, "A step by the number of its rows")
    rows, step_ms = data["rows"], [1e3 * each for each in data["step_s"]]
    x = "rows (log scale)"
    line_chart(left, theme, rows, {"": step_ms}, title="How long it takes", x=x, y="ms (log scale)", is_log=True)
    left.set_yscale("log")
    left.plot(rows, [step_ms[0] * each for each in rows], color=theme.faint, ls=(0, (4, 3)), lw=1.4)
    left.set_ylim(step_ms[0] / 2, step_ms[-1] * 3)
    left.yaxis.set_major_formatter(matplotlib("ticker").FuncFormatter(lambda ms, _: f"{ms:,g}"))
    note(left, theme, rows[3], step_ms[0] * rows[3] * 1.3, "one after the other", ha="right")
    rates = {"": data["tokens_per_s"]}
    line_chart(right, theme, rows, rates, title="What it brings", x=x, y="tokens a second", is_log=True)
    right.set_ylim(0, max(data["tokens_per_s"]) * 1.15)
    right.axvline(data["bend_rows"], color=theme.ink, ls=(0, (2, 2)), lw=1.2)
    note(
        right, theme, data["bend_rows"] * 1.1, max(data["tokens_per_s"]) * 0.25, f"half at {data['bend_rows']:.0f} rows"
    )
    return sheet


CLAIM = Claim(
    number=0,
    name="full-batch",
    title="A full batch is nearly free",
    statement="A step reads all weights once, however many rows it has. So another row costs little, until the "
    "arithmetic of the rows takes longer than the reading.",
    test=f"each further row up to {FULL} adds at most {100 * MOST_OF_ONE:.0f} % of what a step of one row takes, and "
    f"{FULL} rows bring at least twice the tokens a second of one.",
    measure=measure,
    draw=draw,
)
