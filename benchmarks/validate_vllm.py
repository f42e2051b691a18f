"""Recorded runs of vLLM beside what the simulator makes of their arrivals; prints every error.

    python -m benchmarks.validate_vllm --traces DIR [--block-share X] [--json]

DIR holds `vllm_measured/`, from LLMServingSim (github.com/casys-kaist/LLMServingSim at 5daddb21, bench/examples, MIT):
two runs of vLLM 0.19.0 over 300 requests of ShareGPT's lengths, with the times of each request and the engine's
arguments, and profiles of single kernels. The scheduler is ours with vLLM's limits, once as it is and once with vLLM's
rule for chunks (a prompt takes what is left of the budget). Step times come once from the profile on that GPU, once
from the GPU's data sheet and the shares that were fitted to other GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.vllm_profile import LayerProfile, fit_profile
from everystop.core.budget import StepBudget
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import make_policy
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.runner.simulated import SimulatedRunner
from everystop.sim.clock import Clock
from everystop.sim.cost import StepCost
from everystop.sim.gpus import GPUS, SHAPES, ModelShape
from everystop.sim.replay import Timeline
from everystop.sim.roofline import Roofline

NS_PER_S = 10**9
NUM_AMPLE_BLOCKS = 25_000
METRICS = ("TTFT", "TPOT", "E2E")
DATA_SHEETS = {
    "RTX4090": {"bytes_per_s": 1008e9, "flops_per_s": 165.2e12, "memory_bytes": 24e9},
    "RTXPRO6000": {"bytes_per_s": 1597e9, "flops_per_s": 500e12, "memory_bytes": 96e9},
}
SHARES_OF = "h100"
PROFILED = "llama-3.1-8b"


class WholeChunks(Scheduler):
    """Our scheduler with vLLM's rule for chunks: a prompt takes what is left of the budget, whoever waits."""

    def _deal_decodes(self, *arguments: Any) -> Any:
        draft, prefilling = super()._deal_decodes(*arguments)
        draft.budget = _WholeBudget(draft.budget.tokens, None, self.kv.block_size)
        return draft, prefilling


class _WholeBudget(StepBudget):
    def share(self, start: int, remaining: int, *, contended: bool) -> int:
        return min(remaining, self.left_at(start))


SCHEDULERS: dict[str, type[Scheduler]] = {"ours": Scheduler, "whole chunks": WholeChunks}


@dataclass(frozen=True, slots=True)
class RealRun:
    """A recorded run: what was asked for, with which limits, and TTFT, TPOT and E2E of each request in seconds.

    TTFT and E2E count from the arrival at the client. Its clock is not the engine's: the request that reached the
    engine soonest is taken to have needed no time for that.
    """

    name: str
    gpu: str
    shape: ModelShape
    limits: Limits
    num_blocks: int
    arrivals_ns: list[int]
    lengths: list[tuple[int, int]]
    times: dict[str, list[float]]
    link: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> RealRun:
        """Read meta.json, config.json and requests.jsonl of one run."""
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
        requests = sorted((json.loads(line) for line in lines), key=lambda request: float(request["arrival_time"]))
        engine = meta["engine_kwargs"]
        first_s = requests[0]["arrival_time"]
        arrivals = [request["arrival_time"] - first_s for request in requests]
        clock_s = min(request["queued_ts"] - at for request, at in zip(requests, arrivals, strict=True))
        shape = replace(SHAPES[engine["model"].partition("/")[2].lower()], num_shards=engine["tensor_parallel_size"])
        return cls(
            name=folder.name,
            gpu=folder.name.partition("_")[0],
            shape=shape,
            limits=Limits(
                max_num_seqs=engine["max_num_seqs"],
                max_num_batched_tokens=engine["max_num_batched_tokens"],
                max_model_len=engine["max_model_len"] or 32_768,
            ),
            num_blocks=meta.get("kv_cache", {}).get("num_gpu_blocks", NUM_AMPLE_BLOCKS),
            arrivals_ns=[round(at * NS_PER_S) for at in arrivals],
            lengths=[(request["input_toks"], request["output_toks"]) for request in requests],
            times=_real_times(requests, [at + clock_s for at in arrivals]),
            link={"floor_ns": config["link_latency"], "bytes_per_s": config["link_bw"] * 1e9},
        )


def _real_times(requests: list[dict[str, Any]], arrivals_s: list[float]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for request, arrival_s in zip(requests, arrivals_s, strict=True):
        first_s, last_s = request["first_token_ts"], request["last_token_ts"]
        times["TTFT"].append(first_s - arrival_s)
        times["TPOT"].append((last_s - first_s) / max(1, request["output_toks"] - 1))
        times["E2E"].append(last_s - arrival_s)
    return times


def simulate(
    run: RealRun, cost: StepCost, scheduler_class: type[Scheduler]
) -> tuple[dict[str, list[float]], Scheduler]:
    """The same arrivals in virtual time; returns the times of each request, and the scheduler as it was left."""
    clock, timeline = Clock(), Timeline()
    kv = KVCache(num_blocks=run.num_blocks, block_size=16, enable_prefix_caching=True)
    scheduler = scheduler_class(run.limits, kv, make_policy("continuous"))
    loop = StepLoop(scheduler, SimulatedRunner(cost.plan_ns, clock.advance), lambda: clock.now_ns)
    coming = deque(make_requests(run))
    while coming or scheduler.has_work:
        while coming and coming[0].arrival_ns <= clock.now_ns:
            request = coming.popleft()
            scheduler.add(request, request.arrival_ns)
        turn = loop.turn()
        timeline.note(turn.events)
        if turn.is_idle and coming:
            clock.advance_to(coming[0].arrival_ns)
    times: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for i, (arrival_ns, (_, num_output)) in enumerate(zip(run.arrivals_ns, run.lengths, strict=True)):
        first_ns, last_ns = timeline.first_token_ns[i], timeline.finish_ns[i]
        times["TTFT"].append((first_ns - arrival_ns + cost.request_ns) / NS_PER_S)
        times["TPOT"].append((last_ns - first_ns) / max(1, num_output - 1) / NS_PER_S)
        times["E2E"].append((last_ns - arrival_ns + cost.request_ns) / NS_PER_S)
    return times, scheduler


def make_requests(run: RealRun) -> Iterator[Request]:
    """The requests in order of arrival; no two prompts are alike."""
    for i, (arrival_ns, (num_prompt, num_output)) in enumerate(zip(run.arrivals_ns, run.lengths, strict=True)):
        yield Request(i, [i + 1] * num_prompt, SamplingParams(max_tokens=num_output), arrival_ns=arrival_ns)


def compare(real: dict[str, list[float]], simulated: dict[str, list[float]]) -> dict[str, float]:
    """Errors as shares: of the distribution's median and p90, and the median size over requests one by one."""
    errors = {}
    for metric in METRICS:
        a, b = np.array(real[metric]), np.array(simulated[metric])
        errors[f"{metric} p50"] = float(np.quantile(b, 0.5) / np.quantile(a, 0.5) - 1)
        errors[f"{metric} p90"] = float(np.quantile(b, 0.9) / np.quantile(a, 0.9) - 1)
        errors[f"{metric} each"] = float(np.median(np.abs(b / a - 1)))
    return errors


def step_times(run: RealRun, folder: Path) -> dict[str, StepCost]:
    """Step times by the name of their model. Tables are of one model on one GPU; they serve where that is the run's."""
    profile = folder / f"profile_{run.gpu}_llama31-8b_tp1"
    sheet = replace(GPUS[SHARES_OF], name=run.gpu, **DATA_SHEETS[run.gpu])
    fitted, errors = fit_profile(profile, sheet, SHAPES[PROFILED])
    for kind, found in errors.items():
        print(f"{run.gpu}, constants fitted to its profile: {kind} {found}", file=sys.stderr)
    print(f"{run.gpu}: decodes beside a prompt take {fitted.mixed_decode_factor} times as long", file=sys.stderr)
    models: dict[str, StepCost] = {}
    if run.shape == SHAPES[PROFILED]:
        models["tables of its profile"] = LayerProfile.read(profile, run.shape)
    for name, gpu in (("roofline fitted to its profile", fitted), ("data sheet, shares of " + SHARES_OF, sheet)):
        models[name] = Roofline(
            gpu=gpu,
            shape=run.shape,
            request_ns=0.0,
            reduce_floor_ns=run.link["floor_ns"],
            reduce_bytes_per_s=run.link["bytes_per_s"],
        )
    return models


def validate(folder: Path, block_share: float = 1.0) -> list[dict[str, Any]]:
    """Every run under every model of step times and both rules for chunks, with that share of the KV blocks it had."""
    results = []
    for path in sorted(folder.glob("*/meta.json")):
        run = RealRun.read(path.parent)
        run = replace(run, num_blocks=round(run.num_blocks * block_share))
        for cost_name, cost in step_times(run, folder).items():
            for rule, scheduler_class in SCHEDULERS.items():
                times, scheduler = simulate(run, cost, scheduler_class)
                results.append(
                    {
                        "run": run.name,
                        "step times": cost_name,
                        "chunks": rule,
                        "num_preemptions": scheduler.num_preemptions,
                        **compare(run.times, times),
                    }
                )
    return results


def describe(results: list[dict[str, Any]]) -> str:
    """A table in Markdown; "each" is the median size of the error of one request."""
    columns = [f"{metric} {what}" for metric in METRICS for what in ("p50", "p90", "each")]
    lines = [
        "| run | step times | chunks | " + " | ".join(columns) + " |",
        "|---|---|---|" + "---|" * len(columns),
    ]
    for result in results:
        figures = [f"{result[name]:.1%}" if name.endswith("each") else f"{result[name]:+.1%}" for name in columns]
        lines.append("| " + " | ".join([result["run"], result["step times"], result["chunks"], *figures]) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Compare, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validate_vllm", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", metavar="DIR", type=Path, required=True, help="folder with vllm_measured")
    parser.add_argument(
        "--block-share", metavar="X", type=float, default=1.0, help="KV blocks over those that there were"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    results = validate(options.traces / "vllm_measured", options.block_share)
    print(json.dumps(results, indent=1) if options.json else describe(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
