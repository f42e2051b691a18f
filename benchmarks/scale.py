"""Does a simulation's memory grow with its trace? The same traffic, more and more of it, over many replicas.

    python -m benchmarks.scale --requests 100000 1000000 --replicas 64

Each run is `everystop simulate` in a process of its own, which reads a made-up trace from a pipe while that is written,
so nothing holds the whole of it. Peak memory and processor time are those that the operating system counts for the
process. The program fails if the longest run needs over 10 % more memory than the shortest. `--lines N` only prints the
trace.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from everystop.sim.cost import CostModel

SKETCH = CostModel(step_ns=5.5e6, token_ns=3.5e5, row_ns=4e4, source="a sketch of a small model on two cores")
RATE_PER_REPLICA = 24.0
NUM_TENANTS, NUM_PREFIXES = 8, 500
MAX_TOKENS = 20
MAX_GROWTH = 1.1


def trace_lines(num_requests: int, num_replicas: int, seed: int = 1) -> Iterator[str]:
    """JSON lines in the simulator's own format: prompts of 16 to 112 tokens, a quarter of them with a known prefix,
    answers of 4 to 20, independent arrivals.
    """
    dice = random.Random(seed)
    now_ns = 0.0
    for _ in range(num_requests):
        now_ns += dice.expovariate(RATE_PER_REPLICA * num_replicas) * 1e9
        line: dict[str, Any] = {
            "arrival_ns": int(now_ns),
            "num_prompt_tokens": dice.randint(16, 112),
            "num_output_tokens": dice.randint(4, MAX_TOKENS),
            "tenant": f"tenant-{dice.randrange(NUM_TENANTS)}",
        }
        if dice.random() < 0.25:
            line |= {"prefix_ids": [dice.randrange(NUM_PREFIXES)], "prefix_id_tokens": 64}
        yield json.dumps(line)


def simulate(lines: Iterable[str], options: list[str]) -> dict[str, Any]:
    """Feed the lines to `everystop simulate`; returns its results, peak memory in MB and processor time in s."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "results.json").open("w+") as output:
        SKETCH.write(Path(folder) / "cost.json")
        command = [sys.executable, "-m", "everystop", "simulate", "--trace", "/dev/stdin", "--format", "own", "--json"]
        command += ["--max-tokens", str(MAX_TOKENS)]  # of a pipe the longest output is not known beforehand
        if "--cost" not in options:
            options = [*options, "--cost", str(Path(folder) / "cost.json")]
        process = subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stdout=output, text=True)
        assert process.stdin is not None
        with process.stdin:
            for line in lines:
                process.stdin.write(line + "\n")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"the simulation ended with {process.returncode}")
        output.seek(0)
        unit = 1 if sys.platform == "darwin" else 1024
        return json.load(output) | {"peak_mb": usage.ru_maxrss * unit / 1e6, "cpu_s": usage.ru_utime + usage.ru_stime}


def main() -> None:
    """Run the sizes one after the other, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", nargs="+", type=int, default=[100_000, 1_000_000], metavar="N")
    parser.add_argument("--replicas", type=int, default=64, metavar="N")
    parser.add_argument("--router", default="least-loaded")
    parser.add_argument("--policy", default="continuous")
    parser.add_argument("--num-blocks", type=int, default=512, metavar="N", help="KV blocks of each replica")
    parser.add_argument("--cost", metavar="FILE", help="step times (default: a sketch)")
    parser.add_argument("--lines", type=int, metavar="N", help="print a trace of that many requests, and end")
    arguments = parser.parse_args()
    if arguments.lines is not None:
        for line in trace_lines(arguments.lines, arguments.replicas):
            sys.stdout.write(line + "\n")
        return
    options = ["--replicas", str(arguments.replicas), "--router", arguments.router, "--policy", arguments.policy]
    options += ["--num-blocks", str(arguments.num_blocks), *(["--cost", arguments.cost] if arguments.cost else [])]
    peaks = []
    for num_requests in sorted(arguments.requests):
        results = simulate(trace_lines(num_requests, arguments.replicas), options)
        peaks.append(results["peak_mb"])
        print(
            f"{results['num_finished']:,} requests over {arguments.replicas} replicas: {results['peak_mb']:.1f} MB, "
            f"{results['cpu_s']:.1f} s of processor time; {results['num_output_tokens']:,} output tokens, "
            f"{results['num_steps']:,} steps, TTFT p99 {results['ttft_ms']['p99']:,.0f} ms",
            flush=True,
        )
    if peaks[-1] > MAX_GROWTH * peaks[0]:
        raise SystemExit(f"memory grows with the trace: {peaks[-1] / peaks[0]:.2f} times")


if __name__ == "__main__":
    main()
