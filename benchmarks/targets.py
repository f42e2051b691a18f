"""What a step budget in time is worth beside one in tokens: `--target-itl-ms` on the workload `stall`.

    python -m benchmarks.targets --repeats 3 --out targets.json

16 clients chat while every 2 seconds somebody else's prompt of 1,800 tokens arrives. First the decode-only step is
measured: the median gap between tokens on `calm`, which is the same without the long prompts. Then targets of 1.5, 2.5
and 5 times that step take turns with fixed budgets (`--max-num-batched-tokens`), each run on a fresh server that has
served a little of the same kind before. A fixed budget meets a target if it keeps the same promise: ITL p99 of the
chats at most 1.25 times the target. Last comes a target of half the step, which nothing can meet: the server must say
so, by `everystop_steps_over_target_total` and in its status line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.local_server import LocalServer, difference
from benchmarks.straggler import spread
from everystop.observe.distribution import percentile
from everystop.sim.workloads import DEFAULT_SEED, Workload, make_workload
from everystop.trial.http_client import Target
from everystop.trial.http_load import LoadRun, run_load

OPTIONS = ("--max-num-seqs", "32")
BUDGETS = (32, 64, 96, 128, 192, 256, 512)
TIMES = (1.5, 2.5, 5.0)
OUT_OF_REACH = 0.5
SLACK = 1.25
THROUGHPUT_SHARE = 0.9
WARM_UP_CHATS = 16

Row = dict[str, Any]
Check = tuple[str, str, bool]


def warm_up(url: str) -> None:
    """A little of the same with other tokens: one chat for each client, and one long prompt."""
    whole = make_workload("stall", seed=1)
    chats = [job for job in whole.jobs if job.at_s is None][:WARM_UP_CHATS]
    intruders = [job for job in whole.jobs if job.at_s is not None][:1]
    run_load(Workload("warm-up", whole.num_clients, (*chats, *intruders)), Target(url=url))


def measure(model: str, options: Sequence[str], name: str, seed: int, skip_s: float = 0.0) -> Row:
    """One run of a workload on a fresh server; gaps that begin in its first `skip_s` do not count."""
    load = os.getloadavg()[0]
    with LocalServer(model, [*OPTIONS, *options]) as server:
        warm_up(server.url)
        before = server.wait_idle()
        run = run_load(make_workload(name, seed), Target(url=server.url))
        counted = difference(server.wait_idle(), before)
    return figures(run, counted, skip_s) | {"workload": name, "seed": seed, "load_average": load}


def figures(run: LoadRun, counted: dict[str, float], skip_s: float = 0.0) -> Row:
    """The figures that are compared; raises SystemExit if a request failed."""
    for record in run.records:
        if record.error is not None or not record.is_exact:
            raise SystemExit(f"job {record.job} failed: {record.error or record.usage}")
    wall_s = run.summary()["wall_s"]
    gaps = itl_ms(run, "chat", skip_s)
    num_computed = counted["computed_prompt_tokens"] + counted["generation_tokens"]
    return {
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
        "itl_max_ms": max(gaps, default=float("nan")),
        "long_ttft_ms": [(r.event_s[0] - r.sent_s) * 1e3 for r in run.records if r.group == "intruder"],
        "computed_tok_s": num_computed / wall_s,
        "output_tok_s": counted["generation_tokens"] / wall_s,
        "wall_s": wall_s,
        "step_ms": counted["step_seconds_sum"] / max(1.0, counted["step_seconds_count"]) * 1e3,
        "tokens_per_step": counted["iteration_tokens_sum"] / max(1.0, counted["iteration_tokens_count"]),
        "over_share": counted["steps_over_target"] / max(1.0, counted["steps"]),
        "generator_cpu_s": run.cpu_s,
    }


def itl_ms(run: LoadRun, group: str, skip_s: float = 0.0) -> list[float]:
    """Gaps between tokens of a group's answers, without those that begin in the first `skip_s` of the run."""
    pairs = (pair for r in run.records if r.group == group for pair in itertools.pairwise(r.event_s))
    return [(b - a) * 1e3 for a, b in pairs if a >= skip_s]


def decode_step_ms(model: str, options: Sequence[str], repeats: int) -> float:
    """The decode-only step: the median gap between tokens on `calm`, median over the rounds."""
    rows = [measure(model, options, "calm", DEFAULT_SEED + repeat) for repeat in range(repeats)]
    return float(statistics.median(row["itl_p50_ms"] for row in rows))


def target_flags(target_ms: float) -> list[str]:
    """Flags that ask for a target."""
    return ["--target-itl-ms", f"{target_ms:g}"]


def budget_flags(budget: int) -> list[str]:
    """Flags that fix a budget in tokens, whatever decodes."""
    return ["--max-num-batched-tokens", str(budget), "--max-prefill-per-decode", "0"]


def run_all(
    model: str, options: Sequence[str], targets_ms: Sequence[float], budgets: Sequence[int], repeats: int
) -> list[Row]:
    """`stall` under every target and every fixed budget, in turns."""
    settings: list[tuple[Row, list[str]]] = [({"target_ms": t, "budget": None}, target_flags(t)) for t in targets_ms]
    settings += [({"target_ms": None, "budget": budget}, budget_flags(budget)) for budget in budgets]
    rows = []
    for repeat in range(repeats):
        for setting, flags in settings:
            rows.append(setting | measure(model, [*flags, *options], "stall", DEFAULT_SEED + repeat))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


# ---------------------------------------------------------------- verdicts


def pooled(rows: Sequence[Row]) -> Row:
    """One setting over its rounds: medians, and the TTFT of all long prompts together."""
    ttft = [value for row in rows for value in row["long_ttft_ms"]]
    return {
        "itl_p99_ms": statistics.median(row["itl_p99_ms"] for row in rows),
        "computed_tok_s": statistics.median(row["computed_tok_s"] for row in rows),
        "long_ttft_p50_ms": percentile(ttft, 50),
        "long_ttft_p95_ms": percentile(ttft, 95),
    }


def best_budget(rows: Sequence[Row], target_ms: float) -> tuple[int, Row] | None:
    """The fixed budget with the highest throughput of those that meet the target; None if none does."""
    fixed = {budget: pooled([row for row in rows if row["budget"] == budget]) for budget in budgets_of(rows)}
    good = [item for item in fixed.items() if item[1]["itl_p99_ms"] <= SLACK * target_ms]
    return max(good, key=lambda item: item[1]["computed_tok_s"], default=None)


def budgets_of(rows: Sequence[Row]) -> list[int]:
    """The fixed budgets that were tried."""
    return sorted({row["budget"] for row in rows if row["budget"] is not None})


def verdicts(rows: Sequence[Row]) -> list[Check]:
    """What is promised of each target, what was measured, and whether it holds."""
    checks: list[Check] = []
    for target_ms in sorted({row["target_ms"] for row in rows if row["target_ms"] is not None}):
        checks += target_checks([row for row in rows if row["target_ms"] == target_ms], rows, target_ms)
    return checks


def target_checks(own: Sequence[Row], rows: Sequence[Row], target_ms: float) -> list[Check]:
    """Of one target, against the best fixed budget that meets it."""
    name, mine, best = f"target {target_ms:.1f} ms", pooled(own), best_budget(rows, target_ms)
    p99 = mine["itl_p99_ms"]
    checks: list[Check] = [
        (
            f"{name}: ITL p99 of the chats at most {SLACK:g} times",
            f"{spread([row['itl_p99_ms'] for row in own], 1)} ms, {p99 / target_ms:.2f} times",
            p99 <= SLACK * target_ms,
        )
    ]
    if best is None:
        return [*checks, (f"{name}: against fixed budgets", "none of them meets it", True)]
    budget, fixed = best
    share = mine["computed_tok_s"] / fixed["computed_tok_s"]
    checks.append(
        (
            f"{name}: throughput at least 90 % of the best budget that meets it, {budget} tokens",
            f"{share:.1%} ({mine['computed_tok_s']:,.0f} and {fixed['computed_tok_s']:,.0f} computed tok/s)",
            share >= THROUGHPUT_SHARE,
        )
    )
    for percent in ("p50", "p95"):
        key = f"long_ttft_{percent}_ms"
        checks.append(
            (
                f"{name}: TTFT {percent} of the long prompts no worse than with {budget} tokens",
                f"{mine[key]:,.0f} ms and {fixed[key]:,.0f} ms",
                mine[key] <= fixed[key],
            )
        )
    return checks


def out_of_reach_check(row: Row, target_ms: float) -> Check:
    """A target that nothing can meet is told of, not pretended: most steps count as planned beyond their target."""
    share = row["over_share"]
    return (f"target {target_ms:.1f} ms: reported as out of reach", f"in {share:.0%} of steps", share > 0.5)


def table(rows: Sequence[Row]) -> str:
    """Markdown, a line for each setting."""
    heads = (
        "setting",
        "ITL p50 ms",
        "ITL p99 ms",
        "ITL max ms",
        "long TTFT p50 ms",
        "p95 ms",
        "computed tok/s",
        "steps over target",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        fixed = row["budget"]
        title = f"{fixed} tokens" if fixed else f"target {row['target_ms']:.1f} ms"
        groups.setdefault(title, []).append(row)
    for title, same in groups.items():
        cells = [spread([row[key] for row in same], 1) for key in ("itl_p50_ms", "itl_p99_ms", "itl_max_ms")]
        cells += [f"{pooled(same)[key]:,.0f}" for key in ("long_ttft_p50_ms", "long_ttft_p95_ms")]
        cells.append(spread([row["computed_tok_s"] for row in same], 0))
        cells.append("" if same[0]["budget"] else f"{max(row['over_share'] for row in same):.1%}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit code 1 when something promised does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--times", type=float, nargs="+", default=TIMES, help="targets, in times the decode-only step")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="fixed budgets to compare with")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--option", action="append", default=[], help="one more flag of serve, as --option=--threads=1")
    arguments = parser.parse_args(argv)
    step_ms = decode_step_ms(arguments.model, arguments.option, arguments.repeats)
    print(f"decode-only step {step_ms:.2f} ms")
    targets_ms = [round(step_ms * times, 2) for times in arguments.times]
    rows = run_all(arguments.model, arguments.option, targets_ms, arguments.budgets, arguments.repeats)
    checks = verdicts(rows)
    low_ms = round(step_ms * OUT_OF_REACH, 2)
    low = measure(arguments.model, [*target_flags(low_ms), *arguments.option], "stall", DEFAULT_SEED)
    rows.append({"target_ms": low_ms, "budget": None} | low)
    checks.append(out_of_reach_check(low, low_ms))
    print(table(rows))
    for title, value, good in checks:
        print(f"{'holds' if good else 'FAILS':<6} {title}: {value}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"step_ms": step_ms, "rows": rows, "checks": checks}, indent=1))
    return 0 if all(good for _, _, good in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
