"""Claim 6: what continuous batching costs, in the host's time and in steps that carry somebody else's prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from everystop.claims.claim import Claim
from everystop.claims.clients import itl_s, mean_ttft_s
from everystop.claims.findings import Condition, Figure, Findings, measured
from everystop.claims.full_batch import equal_answers, ratios
from everystop.claims.lab import PREFILL_UNBOUNDED, Lab, Trial
from everystop.claims.plots import draw_line, frame, log_ticks, note, threshold, two_panels
from everystop.claims.steps import timed_steps
from everystop.observe.comparison import Run
from everystop.observe.distribution import percentile
from everystop.observe.report.grammar import KNOWN_STROKES, Theme
from everystop.observe.report.sheets import Sheet
from everystop.sim.workloads import Dice, Job, Workload
from everystop.words import percent

ROWS = (16, 64)
MOST_HOST = 0.05
CHUNKS = (32, 64, 128, 256, 512, 2048)
SMALL, WHOLE = 64, CHUNKS[-1]
NUM_CLIENTS, NUM_JOBS, EVERY = 9, 48, 8
CHAT, PROMPT = (32, 64), 1200
MOST_BOUNDED, LEAST_UNBOUNDED = 0.2, 10.0


def chats(*, interrupted: bool) -> Workload:
    """Clients that chat, and one request in eight brings a long prompt and wants next to no answer."""
    dice = Dice("interrupted", 7)
    jobs = []
    for i in range(NUM_JOBS):
        if i % EVERY != EVERY - 1:
            jobs.append(Job(prompt=dice.prompt(16), max_tokens=dice.between(*CHAT), group="chat"))
        elif interrupted:
            jobs.append(Job(prompt=dice.prompt(PROMPT), max_tokens=2, group="long prompt"))
    return Workload("interrupted" if interrupted else "calm", NUM_CLIENTS, tuple(jobs))


def measure(lab: Lab) -> Findings:
    """The host's share of steps, then the same chats at each limit on the tokens of a step."""
    hosts = {rows: host_figures(lab, rows) for rows in ROWS}
    interrupted = chats(interrupted=True)
    limits: list[dict[str, Any]] = [{"max_num_batched_tokens": chunk, **PREFILL_UNBOUNDED} for chunk in CHUNKS]
    trials = {f"{c} tokens a step": Trial(interrupted, "continuous", f) for c, f in zip(CHUNKS, limits, strict=True)}
    trials["calm"] = Trial(chats(interrupted=False), "continuous")
    *named, calm = lab.runs(trials).values()
    runs = dict(zip(CHUNKS, named, strict=True))
    p99 = {chunk: [gap_p99_s(run) for run in each] for chunk, each in runs.items()}
    still = [gap_p99_s(run) for run in calm]
    first = {chunk: [mean_ttft_s(run, "long prompt") for run in each] for chunk, each in runs.items()}
    bounded = measured(
        f"chats' ITL p99 at {SMALL} tokens a step, times without long prompts", ratios(p99[SMALL], still), "×"
    )
    unbounded = measured(
        "chats' ITL p99 with each prompt in one step, times without long prompts", ratios(p99[WHOLE], still), "×"
    )
    cut = measured(
        f"chats' ITL p99 at {SMALL} tokens a step, of that with each prompt in one step",
        ratios(p99[SMALL], p99[WHOLE]),
        "%",
    )
    price = measured(
        f"TTFT of the long prompts at {SMALL} tokens a step, times in one step", ratios(first[SMALL], first[WHOLE]), "×"
    )
    worst = max((hosts[rows][0] for rows in ROWS), key=lambda figure: figure.value)
    return Findings(
        headline=f"The host takes {worst.text()} of a step at most. A prompt of {PROMPT:,} tokens computed in one step "
        f"makes the others' ITL p99 {unbounded.text()} as long as without it; in chunks of at most {SMALL} tokens a "
        f"step it is {bounded.text()}, and the prompt's own first token then takes {price.text()} as long.",
        how="The host's time is all between the execution of two steps, in a server that streams every row's tokens: "
        f"update, hand-over, planning, and waits for the interpreter beside HTTP; {listed_rows()} rows that only "
        f"decode. Then {NUM_CLIENTS} clients with short chats of {CHAT[0]} to {CHAT[1]} tokens, where one request in "
        f"{EVERY} brings a prompt of {PROMPT:,}, with `--max-num-batched-tokens` from {CHUNKS[0]} to {WHOLE:,} and "
        "`--max-prefill-per-decode 0`, for the default bounds the chunks beside many decoders by itself.",
        conditions=(
            *(Condition(figure=hosts[rows][0], at_most=MOST_HOST) for rows in ROWS),
            Condition(figure=unbounded, at_least=LEAST_UNBOUNDED),
            Condition(figure=cut, at_most=MOST_BOUNDED),
        ),
        figures=(
            *(figure for rows in ROWS for figure in hosts[rows][1:]),
            bounded,
            price,
            measured("chats' ITL p99 without long prompts", still, "s"),
            *(measured(f"chats' ITL p99 at {chunk:,} tokens a step", p99[chunk], "s") for chunk in CHUNKS),
            *(measured(f"TTFT of the long prompts at {chunk:,} tokens a step", first[chunk], "s") for chunk in CHUNKS),
        ),
        caption=f"Left: the chats' ITL p99 by the most tokens of a step; dotted is without long prompts. At {WHOLE:,} "
        "a prompt is computed in one step. Right: how long the long prompts wait for their first token.",
        remarks=(
            "The bound is on tokens, so the time that it stands for depends on the machine; `--target-itl-ms` sets the "
            "bound in time, and `--max-prefill-per-decode` by the number of those who decode.",
        ),
        data={
            "chunks": list(CHUNKS),
            "p99_ms": [1e3 * measured("", p99[chunk], "").value for chunk in CHUNKS],
            "calm_ms": 1e3 * measured("", still, "").value,
            "ttft_ms": [1e3 * measured("", first[chunk], "").value for chunk in CHUNKS],
        },
    )


def listed_rows() -> str:
    """The numbers of rows in words."""
    return " and ".join(map(str, ROWS))


def host_figures(lab: Lab, rows: int) -> list[Figure]:
    """The host's share of a step of so many rows, its time, and that over static batching's."""
    workload, flags = equal_answers(rows), {"max_num_seqs": rows}
    runs = lab.runs({f"{rows} rows, {p}": Trial(workload, p, flags) for p in ("static", "continuous")})
    static, own = ([host_s(run, rows) for run in each] for each in runs.values())
    host = [host for host, _ in own]
    return [
        measured(f"host's share of a step of {rows} rows", [host / (host + execute) for host, execute in own], "%"),
        measured(f"host's time beside a step of {rows} rows", host, "s"),
        measured(f"host's time beside {rows} rows, over static batching's", ratios(host, [h for h, _ in static]), "×"),
    ]


def host_s(run: Run, rows: int) -> tuple[float, float]:
    """Median time of the host beside a step of so many decoding rows, and of its execution."""
    steps = [step for step in timed_steps(run) if step.features.num_rows == rows == step.features.num_tokens]
    host = median(step.host_ns for step in steps if step.host_ns is not None)
    return host / 1e9, median(step.execute_ns for step in steps) / 1e9


def gap_p99_s(run: Run) -> float:
    """Of all gaps between the chats' tokens."""
    return percentile(itl_s(run, "chat"), 99)


def draw(data: Mapping[str, Any], theme: Theme) -> Sheet:
    """ITL p99 of the chats, and TTFT of the long prompts, over the tokens of a step."""
    sheet, (left, right) = two_panels(theme, "A long prompt among chats, by the most tokens of a step")
    chunks, stroke = data["chunks"], KNOWN_STROKES["continuous"]
    for axes, name, title in ((left, "p99_ms", "Chats: ITL p99"), (right, "ttft_ms", "Long prompts: TTFT")):
        frame(axes, theme, title=title, x="most tokens of a step (log scale)", y="ms", grid="y")
        draw_line(axes, theme, chunks, data[name], stroke)
        log_ticks(axes, chunks)
        axes.set_ylim(0, max(data[name]) * 1.12)
        label_ends(axes, theme, chunks, data[name], side="right" if axes is left else "left")
    threshold(left, theme, data["calm_ms"], "", x=0.5)
    above = data["calm_ms"] + max(data["p99_ms"]) * 0.05
    note(left, theme, chunks[-1], above, "dotted: without long prompts", ha="right")
    return sheet


def label_ends(axes: Any, theme: Theme, xs: Sequence[float], ys: Sequence[float], *, side: str) -> None:
    """The numbers at 64 tokens, whose `side` is at the mark, and at a whole prompt."""
    for i, which in ((xs.index(SMALL), side), (len(xs) - 1, "right")):
        note(axes, theme, xs[i], ys[i] + max(ys) * 0.07, f"{ys[i]:,.0f} ms", ha=which)


CLAIM = Claim(
    number=6,
    name="price",
    title="The price is small where prompts are cut",
    statement="Deciding anew at every step costs the host next to nothing. What others feel are prompts that are "
    "computed in their steps; cutting prompts into chunks bounds that, at the cost of the prompt's own first token.",
    test=f"the host takes at most {percent(MOST_HOST)} of a step of {listed_rows()} rows; prompts of {PROMPT:,} tokens "
    f"in one step make the others' ITL p99 at least {LEAST_UNBOUNDED:g} times as long as without them; and in chunks "
    f"of at most {SMALL} tokens a step it is at most {percent(MOST_BOUNDED)} of that.",
    measure=measure,
    draw=draw,
)
