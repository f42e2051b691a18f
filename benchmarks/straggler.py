"""What iteration-level batching is worth when one answer of a batch is long: three policies, one server, one workload.

    python -m benchmarks.straggler --repeats 3 --out straggler.json

64 clients at once on 16 slots, 4 of them with answers of 1,000 tokens, 60 with 20 (`workloads.straggler`). Each run has
a fresh server, so the prefix cache is cold, and the policies take turns, so that a noisy neighbour meets all of them.
The kernels, the budget and the answers are the same; a run whose answers differ makes the program fail. Afterwards a
sweep over the number of rows gives the fixed cost of a step: the more of a step is fixed, the more any batching gains,
so a slow engine would flatter the comparison.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.local_server import LocalServer, difference
from everystop.observe.distribution import percentile
from everystop.sim.workloads import Dice, Job, Workload, make_workload
from everystop.trial.http_client import Target
from everystop.trial.http_load import LoadRun, run_load

POLICIES = ("continuous", "static", "static-padded")
OPTIONS = ("--max-num-seqs", "16")
STATIC_OPTIONS = ("--batch-wait-ms", "100")
SWEEP_ROWS = (1, 2, 4, 8, 12, 16)
SWEEP_TOKENS = 96


def equal_answers(num_clients: int, max_tokens: int, seed: int) -> Workload:
    """As many requests as clients, short prompts, answers of one length: rows stay constant."""
    dice = Dice("equal", seed)
    return Workload(
        "equal", num_clients, tuple(Job(prompt=dice.prompt(24), max_tokens=max_tokens) for _ in range(num_clients))
    )


def measure(model: str, policy: str, options: Sequence[str]) -> dict[str, Any]:
    """One run of the workload on a fresh server."""
    load = os.getloadavg()[0]
    of_policy = STATIC_OPTIONS if policy.startswith("static") else ()
    with LocalServer(model, ["--policy", policy, *of_policy, *options]) as server:
        target = Target(url=server.url)
        run_load(equal_answers(16, 8, seed=1), target)
        before = server.wait_idle()
        run = run_load(make_workload("straggler"), target)
        check(run)
        counted = difference(server.wait_idle(), before)
    return figures(run, counted) | {"policy": policy, "load_average": load}


def check(run: LoadRun) -> None:
    """Raise SystemExit unless every request ended well and complete."""
    for record in run.records:
        if record.error or not record.is_exact:
            raise SystemExit(f"job {record.job} failed: {record.error or record.usage}")


def figures(run: LoadRun, counted: dict[str, float]) -> dict[str, Any]:
    """The figures that are compared."""
    short, long, everyone = run.summary("short"), run.summary("long"), run.summary()
    return {
        "answers": run.digest,
        "steps": round(counted["steps"]),
        "wall_s": everyone["wall_s"],
        "output_tok_s": everyone["output_tok_s"],
        "step_ms": counted["step_seconds_sum"] / counted["step_seconds_count"] * 1e3,
        "rows": counted["iteration_tokens_sum"],
        "short_e2e_mean_s": short["e2e_ms"]["mean"] / 1e3,
        "short_e2e_p90_s": short["e2e_ms"]["p90"] / 1e3,
        "short_ttft_p90_s": short["ttft_ms"]["p90"] / 1e3,
        "itl_p50_ms": everyone["itl_ms"]["p50"],
        "itl_p99_ms": everyone["itl_ms"]["p99"],
        "long_decode_s": long["decode_ms"]["mean"] / 1e3,
        "generator_cpu_s": run.cpu_s,
    }


def sweep(model: str, options: Sequence[str], repeats: int) -> dict[str, Any]:
    """Median time of a step by its number of rows, as a client sees it, and the straight line through these."""
    with LocalServer(model, ["--policy", "continuous", *options]) as server:
        target = Target(url=server.url)
        gaps: dict[int, list[float]] = {rows: [] for rows in SWEEP_ROWS}
        for repeat in range(repeats):
            for rows in SWEEP_ROWS:
                run = run_load(equal_answers(rows, SWEEP_TOKENS, seed=100 * repeat + rows), target)
                check(run)
                gaps[rows].append(step_gap_ms(run))
    step_ms = {rows: statistics.median(values) for rows, values in gaps.items()}
    fixed_ms, per_row_ms = straight_line(list(step_ms.items()))
    return {"step_ms": step_ms, "fixed_ms": fixed_ms, "per_row_ms": per_row_ms}


def step_gap_ms(run: LoadRun) -> float:
    """Median gap between two tokens while all requests decode."""
    start_s = max(record.event_s[0] for record in run.records)
    end_s = min(record.event_s[-1] for record in run.records)
    gaps = []
    for record in run.records:
        inside = [t for t in record.event_s if start_s <= t <= end_s]
        gaps += [(b - a) * 1e3 for a, b in itertools.pairwise(inside)]
    return percentile(gaps, 50)


def straight_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares through (x, y): value at 0 and slope."""
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def compare(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """How many times larger each figure is than under `continuous`, run by run of the same round."""
    by_policy = {policy: [run for run in runs if run["policy"] == policy] for policy in POLICIES}
    names = ("wall_s", "short_e2e_mean_s", "short_e2e_p90_s", "itl_p99_ms", "long_decode_s")
    return {
        policy: {
            name: [a[name] / b[name] for a, b in zip(by_policy[policy], by_policy["continuous"], strict=True)]
            for name in names
        }
        for policy in POLICIES[1:]
    }


def verdicts(runs: Sequence[dict[str, Any]], ratios: dict[str, dict[str, list[float]]]) -> list[tuple[str, str, bool]]:
    """What is promised, what was measured, and whether it holds; ratios are medians over the rounds."""
    steps = {policy: [run["steps"] for run in runs if run["policy"] == policy] for policy in POLICIES}
    static, padded = ratios["static"], ratios["static-padded"]
    num_answers = len({run["answers"] for run in runs})
    checks: list[tuple[str, Any, bool]] = [
        ("steps, static: 4,000 ± 15", steps["static"], all(abs(n - 4000) <= 15 for n in steps["static"])),
        ("steps, continuous: at most 1,090", steps["continuous"], all(n <= 1090 for n in steps["continuous"])),
        ("answers are identical", num_answers, num_answers == 1),
    ]
    for title, values, bound in (
        ("wall: static", static["wall_s"], 2.0),
        ("wall: static-padded", padded["wall_s"], 5.0),
        ("short E2E, mean: static", static["short_e2e_mean_s"], 7.0),
        ("short E2E, p90: static", static["short_e2e_p90_s"], 8.0),
    ):
        times = statistics.median(values)
        checks.append((f"{title} at least {bound:g} times", times, times >= bound))
    return [(title, in_words(value), good) for title, value, good in checks]


def in_words(value: Any) -> str:
    """A number, or a list of numbers once each."""
    if isinstance(value, list):
        return ", ".join(f"{n:,}" for n in sorted(set(value)))
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def spread(values: Iterable[float], digits: int) -> str:
    """Median, and the range where there is more than one value."""
    ranked = sorted(values)
    text = f"{statistics.median(ranked):,.{digits}f}"
    return text if len(ranked) == 1 else f"{text} ({ranked[0]:,.{digits}f}–{ranked[-1]:,.{digits}f})"


def table(runs: Sequence[dict[str, Any]], ratios: dict[str, dict[str, list[float]]]) -> str:
    """The comparison in Markdown."""
    columns = {policy: [run for run in runs if run["policy"] == policy] for policy in POLICIES}
    rows = (
        ("steps", "steps", 0),
        ("wall, s", "wall_s", 2),
        ("output, tok/s", "output_tok_s", 0),
        ("step executed, mean ms", "step_ms", 2),
        ("short requests: E2E mean, s", "short_e2e_mean_s", 2),
        ("short requests: E2E p90, s", "short_e2e_p90_s", 2),
        ("short requests: TTFT p90, s", "short_ttft_p90_s", 2),
        ("ITL p50, ms", "itl_p50_ms", 1),
        ("ITL p99, ms", "itl_p99_ms", 1),
        ("long requests: decode, s", "long_decode_s", 2),
    )
    lines = [f"| | {' | '.join(POLICIES)} |", "|---|" + "---:|" * len(POLICIES)]
    for title, name, digits in rows:
        cells = (spread([run[name] for run in columns[policy]], digits) for policy in POLICIES)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    for title, name in (
        ("wall, times continuous", "wall_s"),
        ("short E2E mean, times", "short_e2e_mean_s"),
        ("short E2E p90, times", "short_e2e_p90_s"),
        ("ITL p99, times", "itl_p99_ms"),
        ("long decode, times", "long_decode_s"),
    ):
        cells = (spread(ratios[policy][name], 2) for policy in POLICIES[1:])
        lines.append(f"| {title} | 1 | {' | '.join(cells)} |")
    return "\n".join(lines)


def describe_step(step: dict[str, Any]) -> str:
    """The sweep in words."""
    times = ", ".join(f"{rows}: {value:.2f}" for rows, value in step["step_ms"].items())
    whole = step["fixed_ms"] + 16 * step["per_row_ms"]
    return (
        f"step by rows, ms: {times}\nfixed cost of a step {step['fixed_ms']:.2f} ms, each row "
        f"{step['per_row_ms']:.3f} ms: {step['fixed_ms'] / whole:.0%} of a step of 16 rows is fixed"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit code 1 when something promised does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--option", action="append", default=[], help="one more flag of serve, as --option=--threads=1")
    arguments = parser.parse_args(argv)
    options = (*OPTIONS, *arguments.option)
    runs = []
    for repeat in range(arguments.repeats):
        for policy in POLICIES:
            runs.append(measure(arguments.model, policy, options))
            print(f"{repeat + 1}: {json.dumps(runs[-1])}", file=sys.stderr, flush=True)
    step = sweep(arguments.model, options, arguments.repeats)
    ratios = compare(runs)
    print(table(runs, ratios))
    print(describe_step(step))
    checks = verdicts(runs, ratios)
    for title, value, good in checks:
        print(f"{'holds' if good else 'FAILS':<6} {title}: {value}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"runs": runs, "ratios": ratios, "step": step, "checks": checks}, indent=1))
    return 0 if all(good for _, _, good in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
