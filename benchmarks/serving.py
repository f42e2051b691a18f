"""What a server of this checkout does under several kinds of load, and which step budget serves best.

    python -m benchmarks.serving --repeats 3 --out serving.json
    python -m benchmarks.serving --sweep --repeats 3 --out sweep.json

The first form runs the workloads in turns on one server, each time with other prompts, so that the prefix cache is
cold, and then the second turn of a chat. The second form starts a server for each pair of --max-num-batched-tokens and
--max-num-seqs, in turns, and runs `chat` and `stall` on it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.loadgen import report
from benchmarks.local_server import LocalServer, difference
from everystop.sim.workloads import DEFAULT_SEED, make_workload
from everystop.trial.http_client import ClientRecord, Target
from everystop.trial.http_load import LoadRun, run_load

WORKLOADS = ("single", "uniform", "prefill", "chat", "shared", "calm", "stall")
BUDGETS = (64, 128, 256, 512)
SEATS = (32, 64)
BLOCK_SIZE = 32
SHARED_LIMIT_TOKENS = 512 + 64 * 88
QUESTION = (
    "A farmer has three fields. The first is twice as large as the second, the second is half as large as the third, "
    "and together they cover one hundred and fifty acres. Explain step by step how large each of the fields is, and "
    "say at the end which of them you would choose for wheat if wheat needs at least fifty acres."
)


def measure(server: LocalServer, name: str, seed: int) -> tuple[LoadRun, dict[str, Any]]:
    """One run of a workload; returns it with its figures. A prompt was computed or came from the prefix cache."""
    load = os.getloadavg()[0]
    before, cpu_s = server.wait_idle(), server.cpu_s()
    run = run_load(make_workload(name, seed), Target(url=server.url))
    cpu_s = server.cpu_s() - cpu_s
    counted = difference(server.wait_idle(), before)
    everyone = run.summary()
    return run, {
        "workload": name,
        "seed": seed,
        "load_average": load,
        "errors": everyone["errors"],
        "inexact": everyone["requests"] - everyone["exact_usage"],
        "tokens_lost": round(counted["generation_tokens"]) - sum(r.max_tokens for r in run.records),
        "events_per_token": everyone["events_per_token"],
        "wall_s": everyone["wall_s"],
        "output_tok_s": everyone["output_tok_s"],
        "total_tok_s": everyone["total_tok_s"],
        "most_at_once": most_at_once(run.records),
        "computed_prompt_tokens": round(counted["computed_prompt_tokens"]),
        "prompt_tokens": round(counted["prompt_tokens"]),
        "steps": round(counted["steps"]),
        "step_ms": counted["step_seconds_sum"] / max(1.0, counted["step_seconds_count"]) * 1e3,
        "tokens_per_step": counted["iteration_tokens_sum"] / max(1.0, counted["iteration_tokens_count"]),
        "server_cpu_s": cpu_s,
        "generator_cpu_s": run.cpu_s,
        **latencies(run),
    }


def latencies(run: LoadRun) -> dict[str, float]:
    """TTFT, ITL and E2E in milliseconds: of the chats where strangers intrude, else of everyone."""
    figures = run.summary("chat" if "chat" in run.groups else None)
    return {
        f"{name}_{key}_ms": figures[f"{name}_ms"][key]
        for name in ("ttft", "itl", "e2e")
        for key in ("mean", "p50", "p90", "p99", "max")
    }


def most_at_once(records: Iterable[ClientRecord]) -> int:
    """Largest number of requests whose answers were under way at one moment."""
    changes: list[tuple[float, int]] = []
    for record in records:
        if record.event_s:
            changes += [(record.event_s[0], 1), (record.event_s[-1], -1)]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def second_turn(server: LocalServer) -> dict[str, int]:
    """Two turns of a chat: how many tokens of the second prompt came from the cache, and how many could have.

    All of the first turn but its last token, whose K and V were never needed, in whole blocks.
    """
    messages = [{"role": "user", "content": QUESTION}]
    first = chat(server, messages)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Thank you. Now say it in one sentence."}]
    second = chat(server, messages)
    num_first = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
    return {
        "first_turn_tokens": num_first,
        "second_prompt_tokens": second["usage"]["prompt_tokens"],
        "cached_tokens": second["usage"]["prompt_tokens_details"]["cached_tokens"],
        "could_be_cached": num_first // BLOCK_SIZE * BLOCK_SIZE,
    }


def chat(server: LocalServer, messages: Sequence[dict[str, str]]) -> Any:
    """One answer, greedy."""
    plain = [{"role": m["role"], "content": m["content"]} for m in messages]
    body = {"messages": plain, "temperature": 0, "max_tokens": 120}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def run_all(model: str, names: Sequence[str], options: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """All workloads in turns on one server."""
    rows = []
    with LocalServer(model, options) as server:
        run_load(make_workload("uniform", 1), Target(url=server.url))
        for repeat in range(repeats):
            for name in names:
                run, row = measure(server, name, DEFAULT_SEED + repeat)
                rows.append(row)
                print(report(f"{repeat + 1} {name} (load {row['load_average']:.1f})", run.summary()), file=sys.stderr)
        rows.append({"workload": "second turn", **second_turn(server)})
    return rows


def run_sweep(model: str, options: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """`chat` and `stall` under each pair of limits, the pairs in turns."""
    rows = []
    for repeat in range(repeats):
        for seats in SEATS:
            for budget in BUDGETS:
                limits = [
                    "--max-num-batched-tokens",
                    str(budget),
                    "--max-num-seqs",
                    str(seats),
                    "--max-prefill-per-decode",
                    "0",
                ]
                with LocalServer(model, [*limits, *options]) as server:
                    for name in ("chat", "stall"):
                        _, row = measure(server, name, DEFAULT_SEED + repeat)
                        rows.append({"max_num_batched_tokens": budget, "max_num_seqs": seats, **row})
                        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def cell(rows: Sequence[dict[str, Any]], name: str, digits: int) -> str:
    """Median of a figure, with its range where there are several."""
    ranked = sorted(row[name] for row in rows)
    text = f"{statistics.median(ranked):,.{digits}f}"
    return text if len(ranked) == 1 else f"{text} ({ranked[0]:,.{digits}f}–{ranked[-1]:,.{digits}f})"


COLUMNS = (
    ("output tok/s", "output_tok_s", 0),
    ("with prompts tok/s", "total_tok_s", 0),
    ("TTFT p50 ms", "ttft_p50_ms", 0),
    ("TTFT p99 ms", "ttft_p99_ms", 0),
    ("ITL p50 ms", "itl_p50_ms", 1),
    ("ITL p99 ms", "itl_p99_ms", 1),
    ("E2E mean s", "e2e_mean_s", 2),
    ("server CPU s", "server_cpu_s", 1),
)


def table(heads: Sequence[str], groups: Iterable[tuple[tuple[Any, ...], list[dict[str, Any]]]]) -> str:
    """Markdown: the key of each group, then its figures."""
    titles = [*heads, *(title for title, _, _ in COLUMNS)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(heads) + "|---:" * len(COLUMNS) + "|"]
    for key, rows in groups:
        seconds = [row | {"e2e_mean_s": row["e2e_mean_ms"] / 1e3} for row in rows]
        cells = [*map(str, key), *(cell(seconds, name, digits) for _, name, digits in COLUMNS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def grouped(
    rows: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], tuple[Any, ...]]
) -> list[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    """Rows by key, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


def verdicts(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """What is promised, what was measured, and whether it holds."""
    runs = [row for row in rows if row["workload"] != "second turn"]
    checks = []
    for title, name in (
        ("errors", "errors"),
        ("answers with inexact usage", "inexact"),
        ("tokens lost", "tokens_lost"),
    ):
        worst = max((abs(row[name]) for row in runs), default=0)
        checks.append((f"{title}: none", str(worst), worst == 0))
    for row in runs:
        if row["workload"] == "shared":
            computed, most = row["computed_prompt_tokens"], row["most_at_once"]
            title = f"shared: at most {SHARED_LIMIT_TOKENS:,} of {row['prompt_tokens']:,} prompt tokens computed"
            checks.append((title, f"{computed:,}, {most} answers at once", computed <= SHARED_LIMIT_TOKENS))
    for row in rows:
        if row["workload"] == "second turn":
            good = row["cached_tokens"] >= row["could_be_cached"]
            checks.append((f"second turn: {row['could_be_cached']} cached", str(row["cached_tokens"]), good))
    return checks


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit code 1 when something promised does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--sweep", action="store_true", help="compare step budgets and numbers of slots")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only this one; may be repeated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--option", action="append", default=[], help="one more flag of serve, as --option=--threads=1")
    arguments = parser.parse_args(argv)
    if arguments.sweep:
        rows = run_sweep(arguments.model, arguments.option, arguments.repeats)
        heads = ("workload", "budget", "slots")
        groups = grouped(rows, lambda r: (r["workload"], r["max_num_batched_tokens"], r["max_num_seqs"]))
        groups.sort(key=lambda group: [*map(str, group[0][:1]), *group[0][1:]])
        print(table(heads, groups))
    else:
        rows = run_all(arguments.model, arguments.workload or WORKLOADS, arguments.option, arguments.repeats)
        print(table(("workload",), grouped(rows[:-1], lambda r: (r["workload"],))))
    checks = verdicts(rows)
    for title, value, good in checks:
        print(f"{'holds' if good else 'FAILS':<6} {title}: {value}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"rows": rows, "checks": checks}, indent=1))
    return 0 if all(good for _, _, good in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
