"""Claim 7: memory reserved for the worst case is mostly wasted; memory taken in blocks is not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from everystop.claims.claim import Claim
from everystop.claims.findings import Condition, Findings, Source, counted, exact
from everystop.claims.kv_memory import MemoryUse, memory_use
from everystop.claims.lab import KV_CACHE_TOKENS, NUM_SLOTS, PREFILL_UNBOUNDED, Lab, Trial
from everystop.claims.plots import frame, one_panel
from everystop.observe.report.drawing import SMALL
from everystop.observe.report.grammar import LOOKS, Theme, Use
from everystop.observe.report.sheets import Entry, Sheet
from everystop.sim.cost import CostModel
from everystop.sim.workloads import Dice, Job, Workload
from everystop.words import listed, percent, significant

SIZES, MEASURED_SIZES = (16, 32, 64, 128, 256), (16, 32, 64)
DEFAULT_SIZE = 32
WINDOW, ASKED = 2048, 512
NUM_JOBS = 48
LEAST_CONTIGUOUS, MOST_PAGED, MOST_OFF = 0.6, 0.1, 0.001
ANY_COST = CostModel(step_ns=1e6, source="any: what is counted does not depend on it")


def conversations() -> Workload:
    """Requests at once with prompts and answers of many lengths, no two with a common prefix."""
    dice = Dice("conversations", 7)
    jobs = (
        Job(prompt=dice.prompt(dice.log_normal(30, 600)), max_tokens=dice.log_normal(16, 256)) for _ in range(NUM_JOBS)
    )
    return Workload("conversations", NUM_JOBS, tuple(jobs))


def measure(lab: Lab) -> Findings:
    """Every block size with the real allocator in virtual time, three of them on the server."""
    workload = conversations()
    flags = [{"block_size": size, **PREFILL_UNBOUNDED} for size in SIZES]
    trials = {size: Trial(workload, "continuous", each) for size, each in zip(SIZES, flags, strict=True)}
    virtual = {size: memory_use(lab.simulate(trials[size], ANY_COST), size) for size in SIZES}
    runs = lab.runs({f"blocks of {size} tokens": trials[size] for size in MEASURED_SIZES}, once=True)
    real = {size: memory_use(each[0], size) for size, each in zip(MEASURED_SIZES, runs.values(), strict=True)}
    paged = {
        size: exact(f"wasted with blocks of {size} tokens", virtual[size].wasted_share, "%", Source.SIMULATED)
        for size in SIZES
    }
    use = virtual[DEFAULT_SIZE]
    reserved = contiguous(use)
    wasted = {
        name: exact(f"wasted with {name}", use.wasted_of(num), "%", Source.COMPUTED) for name, num in reserved.items()
    }
    off = counted(
        "wasted share on the server less that in virtual time, at most",
        [max(abs(real[size].wasted_share - virtual[size].wasted_share) for size in MEASURED_SIZES)],
        "%",
    )
    worst = max(virtual[a].wasted_share / virtual[b].wasted_share for a, b in itertools.pairwise(SIZES))
    smaller = exact("wasted at any block size, times at twice that size, at most", worst, "×", Source.SIMULATED)
    window = wasted[f"room for {WINDOW:,} tokens each"]
    more = exact(
        f"requests that fit in the same memory, blocks of {DEFAULT_SIZE} over room for {WINDOW:,} tokens each",
        WINDOW * use.num_requests / use.num_reserved,
        "×",
        Source.COMPUTED,
    )
    return Findings(
        headline=f"Room for {WINDOW:,} tokens each leaves {window.text()} of the reserved memory empty; blocks of "
        f"{DEFAULT_SIZE} tokens leave {paged[DEFAULT_SIZE].text()}, and {more.text()} as many requests fit.",
        how=f"{NUM_JOBS} requests on {NUM_SLOTS} slots, prompts log-normal from 30 to 600 tokens, answers from 16 to "
        "256. After each step it is counted how many tokens stand in the cache and how many the blocks in use have "
        f"room for. The real allocator in virtual time; on the server with blocks of "
        f"{listed([str(size) for size in MEASURED_SIZES])}. `--max-prefill-per-decode 0`, or the steps would depend on "
        "who of those that are sent at once has arrived. Contiguous reservation is arithmetic on the same steps.",
        conditions=(
            Condition(figure=window, at_least=LEAST_CONTIGUOUS),
            Condition(figure=paged[DEFAULT_SIZE], at_most=MOST_PAGED),
            Condition(figure=smaller, at_most=1.0),
            Condition(figure=off, at_most=MOST_OFF),
        ),
        figures=(
            more,
            *(figure for figure in wasted.values() if figure is not window),
            *(figure for size, figure in paged.items() if size != DEFAULT_SIZE),
            *(counted(f"the same on the server, {size} tokens", [real[size].wasted_share], "%") for size in real),
        ),
        caption="Each bar is what is reserved for the requests on board, mean over the steps: what tokens stand in, "
        f"and what none does. At the right, how many such requests {KV_CACHE_TOKENS:,} tokens of memory have room for.",
        remarks=(
            "Blocks waste the empty part of each last block, and what a prompt that is being computed has not filled "
            "yet. Knowing all lengths beforehand, which nobody does, contiguous memory would still be reserved long "
            "before it is used.",
        ),
        data={
            "rows": [
                *(bar(name, use, num) for name, num in reserved.items()),
                *(bar(f"blocks of {size}", virtual[size], virtual[size].num_reserved) for size in reversed(SIZES)),
            ]
        },
    )


def contiguous(use: MemoryUse) -> dict[str, int]:
    """What contiguous memory would have been reserved, in tokens, summed over the steps."""
    return {
        f"room for {WINDOW:,} tokens each": WINDOW * use.num_requests,
        f"room for prompt + {ASKED} tokens": use.num_prompt + ASKED * use.num_requests,
        "room for the length it will have": use.num_whole,
    }


def bar(name: str, use: MemoryUse, num_reserved: int) -> list[Any]:
    """Its name, the share that is used, and how many requests would fit."""
    return [name, use.num_used / num_reserved, KV_CACHE_TOKENS * use.num_requests / num_reserved]


def draw(data: Mapping[str, Any], theme: Theme) -> Sheet:
    """A bar for each way to reserve, divided into used and wasted."""
    used, wasted = LOOKS[Use.DECODE], LOOKS[Use.HELD]
    entries = (Entry("tokens stand in it", used), Entry("reserved and empty", wasted))
    sheet, axes = one_panel(theme, "Memory reserved for the KV cache", entries, height=300)
    box = axes.get_position()
    shift = 160 / sheet.width
    axes.set_position((box.x0 + shift, box.y0, box.width - shift - 110 / sheet.width, box.height))
    frame(axes, theme, x="% of what is reserved", grid="x")
    for place, (_, share, num) in enumerate(data["rows"]):
        edge = {"edgecolor": theme.outline, "lw": 0.8, "height": 0.66}
        axes.barh(place, 100 * share, color=used.fill, **edge)
        axes.barh(
            place,
            100 - 100 * share,
            left=100 * share,
            color=wasted.fill,
            hatch=wasted.hatch,
            hatchcolor=wasted.hatch_colour,
            **edge,
        )
        inside = {"color": "#FFFFFF", "fontsize": SMALL, "va": "center", "ha": "left", "fontweight": "bold"}
        axes.text(1, place, percent(share), **inside)
        axes.text(101.5, place, f"{significant(num)} fit", color=theme.ink, fontsize=SMALL, va="center")
    axes.set_yticks(range(len(data["rows"])), [name for name, _, _ in data["rows"]])
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    return sheet


CLAIM = Claim(
    number=7,
    name="fragmentation",
    title="Blocks waste little memory, worst-case reservation most of it",
    statement="Whoever reserves contiguous memory for the longest sequence that may come leaves most of it empty. "
    "Taken block by block as sequences grow, only the end of each last block is empty, and the smaller the blocks, the "
    "less.",
    test=f"room for {WINDOW:,} tokens each wastes at least {percent(LEAST_CONTIGUOUS)} (arithmetic), blocks of "
    f"{DEFAULT_SIZE} at most {percent(MOST_PAGED)} (simulated), and less the smaller they are; and the server wastes "
    "the same as the simulation within a tenth of a percentage point.",
    measure=measure,
    draw=draw,
)
