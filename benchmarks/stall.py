"""What long prompts do to those who chat, under the default settings: the workload `stall` beside `calm`.

    python -m benchmarks.stall --repeats 3 --out stall.json

16 clients chat in a closed loop while every 2 seconds somebody else's prompt of 1,800 tokens arrives; `calm` is the
same without these prompts. In turns, each on a fresh server that has served a little of the same kind before: `calm`
and `stall` as they come; whole prompts (2,048 tokens a step); and fixed budgets, with no bound by the number of
decoders. Gaps that begin in the first 3 seconds do not count. What must hold: ITL p99 of the chats under 2.5 times that
of `calm`, at least 90 % of the tokens a second of the best fixed budget, and TTFT p95 of the long prompts under 2 times
that of whole prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.straggler import spread
from benchmarks.targets import budget_flags, measure
from everystop.observe.distribution import percentile
from everystop.sim.workloads import DEFAULT_SEED

BUDGETS = (64, 96, 128, 256)
WHOLE = 2048
SKIP_S = 3.0
MOST_ITL, LEAST_THROUGHPUT, MOST_TTFT = 2.5, 0.9, 2.0
CALM, DEFAULT, WHOLE_PROMPTS = "calm", "stall, default", "stall, whole prompts"

Row = dict[str, Any]
Check = tuple[str, str, bool]


def settings(budgets: Sequence[int]) -> dict[str, tuple[str, list[str]]]:
    """Workload and flags of each setting."""
    chosen = {CALM: ("calm", []), DEFAULT: ("stall", []), WHOLE_PROMPTS: ("stall", budget_flags(WHOLE))}
    return chosen | {f"stall, {budget} tokens a step": ("stall", budget_flags(budget)) for budget in budgets}


def run_all(model: str, options: Sequence[str], budgets: Sequence[int], repeats: int) -> dict[str, list[Row]]:
    """Every setting in turns."""
    rows: dict[str, list[Row]] = {name: [] for name in settings(budgets)}
    for repeat in range(repeats):
        for name, (workload, flags) in settings(budgets).items():
            row = measure(model, [*flags, *options], workload, DEFAULT_SEED + repeat, SKIP_S)
            rows[name].append(row)
            print(json.dumps({"setting": name} | row), file=sys.stderr, flush=True)
    return rows


def median_of(rows: Sequence[Row], key: str) -> float:
    """Over the rounds."""
    return float(statistics.median(row[key] for row in rows))


def long_ttft_ms(rows: Sequence[Row], percent: float) -> float:
    """Of all long prompts of all rounds together."""
    return percentile([value for row in rows for value in row["long_ttft_ms"]], percent)


def verdicts(rows: dict[str, list[Row]]) -> list[Check]:
    """What must hold, what was measured, and whether it does."""
    own, calm, whole = rows[DEFAULT], rows[CALM], rows[WHOLE_PROMPTS]
    gap = median_of(own, "itl_p99_ms") / median_of(calm, "itl_p99_ms")
    fixed = {name: median_of(each, "computed_tok_s") for name, each in rows.items() if name not in (CALM, DEFAULT)}
    best = max(fixed, key=lambda name: fixed[name])
    share = median_of(own, "computed_tok_s") / fixed[best]
    ttft = long_ttft_ms(own, 95) / long_ttft_ms(whole, 95)
    return [
        (f"ITL p99 of the chats under {MOST_ITL:g} times that of calm", f"{gap:.2f} times", gap < MOST_ITL),
        (
            f"tokens a second at least {LEAST_THROUGHPUT:.0%} of the best fixed budget's ({best})",
            f"{share:.1%}",
            share >= LEAST_THROUGHPUT,
        ),
        (
            f"TTFT p95 of the long prompts under {MOST_TTFT:g} times that of whole prompts",
            f"{ttft:.2f} times",
            ttft < MOST_TTFT,
        ),
    ]


def table(rows: dict[str, list[Row]]) -> str:
    """Markdown, a line for each setting."""
    heads = ("setting", "ITL p50 ms", "ITL p99 ms", "long TTFT p50 ms", "p95 ms", "computed tok/s", "output tok/s")
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for name, same in rows.items():
        cells = [spread([row[key] for row in same], 1) for key in ("itl_p50_ms", "itl_p99_ms")]
        has_long = bool(same[0]["long_ttft_ms"])
        cells += [f"{long_ttft_ms(same, percent):,.0f}" if has_long else "" for percent in (50, 95)]
        cells += [spread([row[key] for row in same], 0) for key in ("computed_tok_s", "output_tok_s")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit code 1 when something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="fixed budgets to compare with")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--option", action="append", default=[], help="one more flag of serve, as --option=--threads=1")
    arguments = parser.parse_args(argv)
    rows = run_all(arguments.model, arguments.option, arguments.budgets, arguments.repeats)
    checks = verdicts(rows)
    print(table(rows))
    for what, found, holds in checks:
        print(f"{'holds' if holds else 'FAILS'}  {what}: {found}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 0 if all(holds for *_, holds in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
