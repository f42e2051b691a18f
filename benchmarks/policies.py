"""Every policy on real traffic, in virtual time: latencies, goodput, fairness, preemptions.

    python -m benchmarks.policies --traces DIR --cost measured --out policies.json

DIR holds `vtc_lmsys_arena_1500.csv` (27 tenants), `AzureLLMInferenceTrace_conv.csv` and
`AzureLLMInferenceTrace_code.csv`. Lengths are scaled to what a small model on a CPU is asked. How much traffic the
machine can take is found by the simulator itself: under `continuous`, with all requests there at once, the trace takes
so long; the times between arrivals are then multiplied until the trace offers a part of that capacity, or more than all
of it: 80 and 110 % for the tenants, less for the Azure hours, whose means say little: one drifts, the other comes in
bursts of twelve times its mean. The KV cache holds `--kv-share` of what `--max-num-seqs` requests of mean length need
at their longest, so that memory is short at times. The tables go to standard output as Markdown, everything to the file
of `--out` as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystop.cli.costs import MEASURED, read_cost
from everystop.cli.simulate import make_setup
from everystop.config import Config
from everystop.core.durations import NS_PER_MS
from everystop.core.policy import POLICIES
from everystop.sim.cost import StepCost
from everystop.sim.run import run_trace
from everystop.sim.simulator import Setup
from everystop.sim.tally import Slo
from everystop.sim.traces import TraceOptions, read_trace

AT_ONCE = 1e-9
COLUMNS = (
    "policy",
    "TTFT p50",
    "p95",
    "p99",
    "ITL p50",
    "p95",
    "p99",
    "goodput",
    "tok/s",
    "Jain",
    "preempted",
    "again",
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace, its title, what its lengths are multiplied by, and the loads at which it tells policies apart."""

    file: str
    title: str
    scale_lengths: float
    loads: tuple[float, ...]


TRAFFIC = (
    Traffic("vtc_lmsys_arena_1500.csv", "27 tenants of the LMSYS arena", 1.0, (0.8, 1.1)),
    Traffic("AzureLLMInferenceTrace_conv.csv", "Azure conversation hour", 0.25, (0.6, 0.9)),
    Traffic("AzureLLMInferenceTrace_code.csv", "Azure code hour", 0.25, (0.3, 0.8)),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """A trace made to fit a machine: its size, the KV cache, and how long the machine takes for all of it at once."""

    num_requests: int
    span_s: float
    num_blocks: int
    capacity_s: float

    def dilation(self, load: float) -> float:
        """What times between arrivals are multiplied by, so that the trace offers `load` of the capacity."""
        return self.capacity_s / (load * self.span_s)


def measure(path: Path, traffic: Traffic, cost: StepCost, kv_share: float, limit: int | None) -> Scale:
    """Size the KV cache to the trace, and find the machine's capacity for it."""
    config = Config()
    options = TraceOptions(scale_lengths=traffic.scale_lengths, limit=limit)
    lengths, last_ns = [], 0
    for request in read_trace(path, options):
        lengths.append(request.num_prompt_tokens + request.num_output_tokens)
        last_ns = request.arrival_ns
    mean_blocks = sum(lengths) / len(lengths) / config.block_size
    num_blocks = max(-(-max(lengths) // config.block_size), round(kv_share * config.max_num_seqs * mean_blocks))
    at_once = TraceOptions(scale_lengths=traffic.scale_lengths, limit=limit, dilate_time=AT_ONCE)
    results = run_trace(path, at_once, make_setup(config, cost, num_blocks=num_blocks))
    return Scale(len(lengths), last_ns / 1e9, num_blocks, results["duration_s"])


def set_up(policy: str, cost: StepCost, num_blocks: int, slo: Slo) -> Setup:
    """A server with that policy and the defaults of `serve`; one that works towards targets gets what is demanded."""
    targets: dict[str, Any] = {}
    if policy == "deadline" and slo.ttft_ns is not None and slo.itl_ns is not None:
        targets = {"ttft_target_ms": slo.ttft_ns / NS_PER_MS, "itl_target_ms": slo.itl_ns / NS_PER_MS}
    return make_setup(Config(policy=policy, **targets), cost, num_blocks=num_blocks, slo=slo)


def run_all(arguments: argparse.Namespace, cost: StepCost, slo: Slo) -> Iterator[dict[str, Any]]:
    """The results of every trace at every load under every policy."""
    for traffic in TRAFFIC:
        path = arguments.traces / traffic.file
        scale = measure(path, traffic, cost, arguments.kv_share, arguments.limit)
        for load in arguments.loads or traffic.loads:
            options = TraceOptions(
                scale_lengths=traffic.scale_lengths, dilate_time=scale.dilation(load), limit=arguments.limit
            )
            for policy in arguments.policies:
                start = time.process_time()
                results = run_trace(path, options, set_up(policy, cost, scale.num_blocks, slo))
                spent = time.process_time() - start
                print(f"{traffic.file}, load {load:g}, {policy}: {spent:.1f} s of processor time", file=sys.stderr)
                yield {"title": traffic.title, "load": load, "capacity_s": scale.capacity_s, **results}


def cells(results: dict[str, Any]) -> list[str]:
    """One line of a table; durations in milliseconds."""
    ttft, itl, fairness = results["ttft_ms"], results["itl_ms"], results["fairness_index"]
    return [
        f"`{results['setup']['policy']}`",
        *(f"{ttft[name]:,.0f}" for name in ("p50", "p95", "p99")),
        *(f"{itl[name]:,.1f}" for name in ("p50", "p95", "p99")),
        f"{results['goodput']['share']:.1%}",
        f"{results['output_tokens_per_s']:,.0f}",
        "–" if fairness is None else f"{fairness['mean']:.3f}",
        f"{results['num_preemptions']:,}",
        f"{results['recomputed_share']:.2%}",
    ]


def heading(results: dict[str, Any]) -> str:
    """What the lines of a table have in common."""
    trace, setup = results["trace"], results["setup"]
    return (
        f"{results['title']} at {results['load']:.0%} of capacity: {results['num_requests']:,} requests, lengths × "
        f"{trace['scale_lengths']:g}, times × {trace['dilate_time']:.3f} (all at once they take "
        f"{results['capacity_s']:,.0f} s), {setup['num_blocks']:,} KV blocks of {setup['block_size']} tokens."
    )


def tables(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a table for each trace and load. Policies that made the same of it share a line: without tenants,
    `fair` does what `continuous` does.
    """
    for title, group in itertools.groupby(runs, key=heading):
        yield f"\n{title}\n"
        yield "| " + " | ".join(COLUMNS) + " |"
        yield "|---" + "|---:" * (len(COLUMNS) - 1) + "|"
        lines: dict[tuple[str, ...], list[str]] = {}
        for results in group:
            policy, *figures = cells(results)
            lines.setdefault(tuple(figures), []).append(policy)
        for line, policies in lines.items():
            yield "| " + " | ".join([", ".join(policies), *line]) + " |"


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--cost", default=MEASURED, metavar="FILE", help="step times; measured (default): this machine's"
    )
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES, metavar="POLICY")
    parser.add_argument("--loads", nargs="+", type=float, metavar="X", help="of every trace (default: its own)")
    parser.add_argument("--kv-share", type=float, default=0.5, metavar="X")
    parser.add_argument("--slo-ttft-ms", type=float, default=2_000, metavar="MS")
    parser.add_argument("--slo-itl-ms", type=float, default=250, metavar="MS")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests of each trace")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything there, as JSON")
    arguments = parser.parse_args()
    slo = Slo(ttft_ns=round(arguments.slo_ttft_ms * NS_PER_MS), itl_ns=round(arguments.slo_itl_ms * NS_PER_MS))
    cost = read_cost(arguments.cost)
    runs = list(run_all(arguments, cost, slo))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    print(
        f"Milliseconds of virtual time. Goodput: share of requests with a TTFT of at most {arguments.slo_ttft_ms:g} ms "
        f"and no gap above {arguments.slo_itl_ms:g} ms. Jain: fairness index over tenants that waited, mean of windows "
        f"of 10 s. Again: share of computed tokens that had been computed before. Step times: {cost.source}."
    )
    for line in tables(runs):
        print(line)


if __name__ == "__main__":
    main()
