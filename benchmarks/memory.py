"""A KV cache with room for 30 % of what is asked of it: what admission by expected peak use is worth.

    PYTHONPATH=src python -m benchmarks.memory                     # in virtual time
    PYTHONPATH=src python -m benchmarks.memory --real --repeats 3  # on a server of this checkout

Demand is the largest number of blocks in use at once when the same traffic meets a KV cache without bounds. The pool
gets a share of it (--share). On that pool every admission runs with all slots, and `greedy` with each limit on the
number of running requests (--max-num-seqs) of a search: the best of those is what an operator could find who knows the
traffic beforehand. All clients ask for at most `MAX_TOKENS` tokens, and how many come nobody knows beforehand: an
answer ends by a stop token. A run with `--real` sends prompts whose answers end where the simulated ones do, by
`min_tokens` and a bias towards the stop token.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.local_server import LocalServer, difference
from everystop.core.admission import ADMISSIONS
from everystop.core.events import AdmitEvent, Event, FinishEvent, StepEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import make_policy
from everystop.core.request import FinishReason, Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.runner.simulated import FILLER_TOKEN, SimulatedRunner
from everystop.sim.cost import CostModel
from everystop.sim.workloads import Dice, Job, Workload
from everystop.trial.http_client import Target
from everystop.trial.http_load import LoadRun, run_load

NS_PER_S = 10**9
MAX_TOKENS = 1500
BLOCK_SIZE = 32
STOP = 299  # the stop token is outside the prompts' alphabet
SKETCH = CostModel(step_ns=5.5e6, token_ns=0.28e6, decode_context_ns=60, row_ns=0.1e6, source="a sketch")
MAX_RECOMPUTED, MIN_THROUGHPUT = 0.05, 0.90
SHAPES = ("chat", "mixed", "drift")
POLICIES = ("continuous", "thrifty")


def make_traffic(shape: str, num_jobs: int, num_clients: int, seed: int) -> Workload:
    """Jobs whose `max_tokens` is how long the answer becomes.

    `chat`: prompts and answers log-normal. `mixed`: one in five brings a long answer, the others a short one, at
    random. `drift`: as `chat`, but from the middle on answers are four times as long, so the past misleads.
    """
    dice = Dice(f"memory {shape}", seed)
    jobs = []
    for i in range(num_jobs):
        num_prompt = dice.log_normal(30, 300)
        if shape == "mixed":
            num_output = dice.log_normal(600, 1400) if dice.fraction() < 0.2 else dice.log_normal(20, 120)
        else:
            num_output = dice.log_normal(25, 350) * (4 if shape == "drift" and i >= num_jobs // 2 else 1)
            num_output = num_output if shape == "drift" else 2 * num_output
        jobs.append(Job(prompt=dice.prompt(num_prompt), max_tokens=num_output))
    return Workload(shape, num_clients, tuple(jobs))


def at_times(workload: Workload, per_s: float, seed: int) -> Workload:
    """The same jobs as independent arrivals with a mean rate."""
    dice, now_s, jobs = Dice("arrivals", seed), 0.0, []
    for job in workload.jobs:
        now_s -= math.log(1.0 - dice.fraction()) / per_s
        jobs.append(replace(job, at_s=now_s))
    return Workload(workload.name, 0, tuple(jobs))


# ------------------------------------------------------------------------------------------------------- virtual time


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one run is made with."""

    admission: str = "greedy"
    policy: str = "continuous"
    max_num_seqs: int = 64
    num_blocks: int = 1 << 20
    block_size: int = BLOCK_SIZE
    max_num_batched_tokens: int = 256
    enable_prefix_caching: bool = True


@dataclass(slots=True)
class Outcome:
    """What one run brought; times in seconds."""

    setting: Setting
    duration_s: float = 0.0
    num_finished: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    most_preemptions: int = 0
    peak_blocks: int = 0
    mean_running: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    longest_gap_s: float = 0.0
    num_overtaken: int = 0

    @property
    def tok_s(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def recomputed_share(self) -> float:
        """Of all computed tokens, those that had been computed before."""
        return self.num_recomputed_tokens / max(1, self.num_computed_tokens)

    def figures(self) -> dict[str, Any]:
        """Plain data."""
        plain = asdict(self)
        ttft = sorted(plain.pop("ttft_s"))
        middle = statistics.median(ttft) if ttft else 0.0
        return plain | {
            "output_tok_s": self.tok_s,
            "recomputed_share": self.recomputed_share,
            "ttft_p50_s": middle,
            "ttft_max_s": ttft[-1] if ttft else 0.0,
        }


class VirtualRun:
    """One scheduler, fed by clients who each send their next job when the last is done, or by jobs at their times."""

    def __init__(self, workload: Workload, setting: Setting, cost: CostModel) -> None:
        self.now_ns = 0
        self.outcome = Outcome(setting)
        self._workload = workload
        self._ends: dict[int, int] = {}  # by job: tokens before its last one
        self._arrival_ns: dict[int, int] = {}
        self._last_token_ns: dict[int, int] = {}
        self._not_boarded: list[int] = []
        self._boarded: set[int] = set()
        self._num_running = 0
        limits = Limits(
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_model_len=MAX_TOKENS + 500,
            admission=setting.admission,
        )
        kv = KVCache(
            num_blocks=setting.num_blocks,
            block_size=setting.block_size,
            enable_prefix_caching=setting.enable_prefix_caching,
        )
        self.scheduler = Scheduler(limits, kv, make_policy(setting.policy))
        runner = SimulatedRunner(cost.plan_ns, self._advance, self._token_of)
        self._loop = StepLoop(self.scheduler, runner, lambda: self.now_ns)

    def run(self) -> Outcome:
        """Serve all jobs."""
        waiting = iter(range(len(self._workload.jobs)))
        num_free, is_open = self._workload.num_clients, self._workload.jobs[0].at_s is not None
        coming = next(waiting, None)
        num_steps = 0
        while coming is not None or self.scheduler.has_work:
            while coming is not None and (self._due_ns(coming) <= self.now_ns if is_open else num_free > 0):
                self._add(coming)
                num_free -= 1
                coming = next(waiting, None)
            turn = self._loop.turn()
            num_free += self._note(turn.events)
            if turn.is_idle and coming is not None and is_open:
                self.now_ns = max(self.now_ns, self._due_ns(coming))
            num_steps += 1
        self.outcome.duration_s = self.now_ns / NS_PER_S
        self.outcome.mean_running = self._num_running / max(1, num_steps)
        return self.outcome

    def _due_ns(self, job: int) -> int:
        return round((self._workload.jobs[job].at_s or 0.0) * NS_PER_S)

    def _token_of(self, request_id: int, num_tokens: int) -> int:
        """A request's last token is the stop token."""
        return STOP if num_tokens == self._ends[request_id] else FILLER_TOKEN

    def _advance(self, ns: int) -> None:
        self.now_ns += ns

    def _add(self, i: int) -> None:
        job = self._workload.jobs[i]
        params = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=(STOP,))
        self._ends[i] = len(job.prompt) + job.max_tokens - 1
        self._arrival_ns[i] = now_ns = self._due_ns(i) or self.now_ns
        heapq.heappush(self._not_boarded, i)
        self.scheduler.add(Request(i, job.prompt, params, arrival_ns=now_ns), now_ns)

    def _note(self, events: Sequence[Event]) -> int:
        """Take in events; returns how many requests have ended."""
        outcome, num_ended = self.outcome, 0
        for event in events:
            if isinstance(event, StepEvent):
                self._note_step(event)
            elif isinstance(event, FinishEvent):
                assert event.reason is FinishReason.STOP
                outcome.num_finished += 1
                outcome.num_output_tokens += event.num_output_tokens
                outcome.num_preemptions += event.num_preemptions
                outcome.most_preemptions = max(outcome.most_preemptions, event.num_preemptions)
                num_ended += 1
            elif isinstance(event, AdmitEvent) and not event.resumed:
                self._boarded.add(event.request_id)
                while self._not_boarded and self._not_boarded[0] in self._boarded:
                    heapq.heappop(self._not_boarded)
                outcome.num_overtaken += bool(self._not_boarded) and self._not_boarded[0] < event.request_id
        return num_ended

    def _note_step(self, event: StepEvent) -> None:
        outcome = self.outcome
        outcome.num_computed_tokens += event.plan.num_tokens
        outcome.num_recomputed_tokens += event.num_recomputed_tokens
        outcome.peak_blocks = max(outcome.peak_blocks, outcome.setting.num_blocks - event.num_free_blocks)
        self._num_running += len(event.plan.rows)
        for request_id, tokens in zip(event.plan.rows.request_ids, event.tokens, strict=True):
            if not tokens:
                continue
            last_ns = self._last_token_ns.get(request_id)
            if last_ns is None:
                outcome.ttft_s.append((event.now_ns - self._arrival_ns[request_id]) / NS_PER_S)
            else:
                outcome.longest_gap_s = max(outcome.longest_gap_s, (event.now_ns - last_ns) / NS_PER_S)
            self._last_token_ns[request_id] = event.now_ns


def simulate(workload: Workload, setting: Setting, cost: CostModel) -> Outcome:
    """One run in virtual time."""
    return VirtualRun(workload, setting, cost).run()


def search(run: Callable[[int], float], most: int) -> list[int]:
    """Limits to try: a coarse grid over 1 to `most`, then every limit about the best of it; returns those tried.

    `run` gives the throughput under a limit.
    """
    step = max(1, most // 16)
    speeds = {limit: run(limit) for limit in range(step, most + 1, step)}
    best = max(speeds, key=lambda limit: speeds[limit])
    for limit in range(max(1, best - step + 1), min(most, best + step - 1) + 1):
        if limit not in speeds:
            speeds[limit] = run(limit)
    return sorted(speeds)


def compare_simulated(
    workload: Workload, share: float, base: Setting, cost: CostModel, limits: Sequence[int] = ()
) -> list[Outcome]:
    """Demand, then every admission and policy on the small pool, then the best static limit; the last one is that.

    It is searched for, or is the best of `limits`.
    """
    demand = simulate(workload, base, cost)
    small = replace(base, num_blocks=round(demand.peak_blocks * share))
    outcomes = [demand]
    for policy, admission in itertools.product(POLICIES, ADMISSIONS):
        setting = replace(small, admission=admission, policy=policy)
        outcomes.append(simulate(workload, setting, cost))
    limited: dict[int, Outcome] = {}

    def speed(limit: int) -> float:
        limited[limit] = simulate(workload, replace(small, max_num_seqs=limit), cost)
        return limited[limit].tok_s

    for limit in limits or search(speed, base.max_num_seqs):
        if limit not in limited:
            speed(limit)
    return [*outcomes, max(limited.values(), key=lambda outcome: outcome.tok_s)]


def verdicts(expected: Outcome, best: Outcome, num_jobs: int) -> list[tuple[str, str, bool]]:
    """What is promised, what came of it, and whether it holds."""
    ratio = expected.tok_s / best.tok_s
    return [
        (
            f"recomputed under {MAX_RECOMPUTED:.0%}",
            f"{expected.recomputed_share:.2%}",
            expected.recomputed_share < MAX_RECOMPUTED,
        ),
        (f"throughput at least {MIN_THROUGHPUT:.0%} of the best limit's", f"{ratio:.1%}", ratio >= MIN_THROUGHPUT),
        (
            "everyone ends, in order of arrival at the door",
            f"{expected.num_finished} of {num_jobs}, {expected.num_overtaken} overtaken",
            expected.num_finished == num_jobs and not expected.num_overtaken,
        ),
    ]


def title_of(setting: Setting, demand: bool = False) -> str:
    """A row's first cell."""
    if demand:
        return "KV cache without bounds"
    limit = "" if setting.max_num_seqs == 64 else f", --max-num-seqs {setting.max_num_seqs}"
    return f"{setting.policy}, {setting.admission}{limit}"


def table(outcomes: Sequence[Outcome]) -> str:
    """The comparison in Markdown; the first row is the demand, the last the best limit."""
    lines = [
        "| | blocks | output tok/s | of the best limit | running, mean | recomputed | preemptions | most of one "
        "| TTFT p50 s | max s | longest gap s |",
        "|---|" + "---:|" * 10,
    ]
    best = outcomes[-1]
    for number, outcome in enumerate(outcomes):
        figures = outcome.figures()
        blocks = outcome.peak_blocks if number == 0 else outcome.setting.num_blocks
        lines.append(
            f"| {title_of(outcome.setting, number == 0)} | {blocks:,} | {outcome.tok_s:,.0f} | "
            f"{outcome.tok_s / best.tok_s:.1%} | {outcome.mean_running:.1f} | {outcome.recomputed_share:.2%} | "
            f"{outcome.num_preemptions:,} | {outcome.most_preemptions} | {figures['ttft_p50_s']:.2f} | "
            f"{figures['ttft_max_s']:.2f} | {outcome.longest_gap_s:.2f} |"
        )
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------- real server


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingTarget(Target):
    """Makes each answer end after the job's `max_tokens` tokens without saying so beforehand."""

    def request(self, job: Job, index: int = 0) -> bytes:
        """The stop token is masked until the last position, and nothing can beat it there."""
        ending = {
            "max_tokens": MAX_TOKENS,
            "min_tokens": job.max_tokens - 1,
            "stop_token_ids": [STOP],
            "logit_bias": {str(STOP): 100},
        }
        return Target.request(replace(self, extra=self.extra | ending), job, index)


class Poller:
    """A context that looks at a gauge of a server several times a second; `most` is the largest value seen."""

    def __init__(self, server: LocalServer, name: str, every_s: float = 0.1) -> None:
        self.most = 0.0
        self._server, self._name, self._every_s = server, name, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stop.wait(self._every_s):
            self.most = max(self.most, self._server.counters()[self._name])


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSetting:
    """Flags of a server: its pool in bytes (None: the default), and who boards."""

    admission: str
    max_num_seqs: int
    policy: str = "continuous"
    num_bytes: int | None = None

    def options(self) -> list[str]:
        """As on the command line."""
        flags = ["--admission", self.admission, "--max-num-seqs", str(self.max_num_seqs), "--policy", self.policy]
        return flags + (["--kv-cache-memory", str(self.num_bytes)] if self.num_bytes is not None else [])


def serve(model: str, workload: Workload, setting: RealSetting, options: Sequence[str]) -> dict[str, Any]:
    """One run on a fresh server."""
    with LocalServer(model, [*setting.options(), *options]) as server:
        target = StoppingTarget(url=server.url)
        warm_up = Workload("warm-up", 4, tuple(Job(prompt=(1000 + i, 500, 501), max_tokens=8) for i in range(8)))
        run_load(warm_up, target)
        before = server.wait_idle()
        with Poller(server, "kv_cache_usage_perc") as poller:
            run = run_load(workload, target)
        counted = difference(after := server.wait_idle(), before)
    check(run)
    return {**asdict(setting), **real_figures(run, counted, after["kv_cache_blocks"], poller.most)}


def check(run: LoadRun) -> None:
    """Raise SystemExit unless every request ended well and where it should."""
    for record in run.records:
        if record.error or not record.is_exact or record.finish_reason != "stop":
            raise SystemExit(f"job {record.job} failed: {record.error or record.usage} {record.finish_reason}")


def real_figures(run: LoadRun, counted: dict[str, float], num_blocks: float, peak_usage: float) -> dict[str, Any]:
    """The figures that are compared."""
    everyone = run.summary()
    computed = counted["iteration_tokens_sum"]
    return {
        "blocks": round(num_blocks),
        "peak_blocks": round(num_blocks * peak_usage),
        "output_tok_s": everyone["output_tok_s"],
        "recomputed_share": counted["recomputed_tokens"] / computed if computed else 0.0,
        "num_preemptions": round(counted["num_preemptions"]),
        "ttft_p50_s": everyone["ttft_ms"]["p50"] / 1e3,
        "ttft_max_s": everyone["ttft_ms"]["max"] / 1e3,
        "itl_max_s": everyone["itl_ms"]["max"] / 1e3,
        "answers": run.digest,
    }


def real_settings(model: str, workload: Workload, share: float, options: Sequence[str]) -> list[RealSetting]:
    """What is compared on a pool of that share of the demand, which a first run finds out.

    The number of bytes of a block follows from a pool of known size.
    """
    slots = workload.num_clients
    probe = RealSetting(admission="greedy", max_num_seqs=slots)
    demand = serve(model, workload, probe, options)
    print(f"demand: {demand['peak_blocks']:,} blocks", file=sys.stderr, flush=True)
    known = 512 * 2**20
    with LocalServer(model, [*replace(probe, num_bytes=known).options(), *options]) as server:
        bytes_per_block = known / server.counters()["kv_cache_blocks"]
    num_blocks, num_longest = round(demand["peak_blocks"] * share), max(len(job.prompt) for job in workload.jobs)
    if num_blocks * BLOCK_SIZE < num_longest + MAX_TOKENS:
        raise SystemExit(f"{num_blocks} blocks cannot hold {num_longest + MAX_TOKENS:,} tokens; take more --clients")
    small = replace(probe, num_bytes=round(num_blocks * bytes_per_block))
    limits = sorted({max(1, round(slots * part)) for part in (0.25, 0.3, 0.35, 0.4)})
    return [
        *(replace(small, admission=admission, policy=policy) for policy in POLICIES for admission in ADMISSIONS),
        *(replace(small, max_num_seqs=limit) for limit in limits),
    ]


def compare_real(
    model: str, workload: Workload, share: float, repeats: int, options: Sequence[str]
) -> list[dict[str, Any]]:
    """All runs, in turns."""
    settings = real_settings(model, workload, share, options)
    runs = []
    for repeat in range(repeats):
        for setting in settings:
            runs.append(serve(model, workload, setting, options))
            print(f"{repeat + 1}: {json.dumps(runs[-1])}", file=sys.stderr, flush=True)
    return runs


def real_rows(runs: Iterable[dict[str, Any]], num_clients: int) -> dict[str, list[dict[str, Any]]]:
    """Runs by what they were made with."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        limit = "" if run["max_num_seqs"] == num_clients else f", --max-num-seqs {run['max_num_seqs']}"
        rows.setdefault(f"{run['policy']}, {run['admission']}{limit}", []).append(run)
    return rows


def middle(runs: Iterable[dict[str, Any]], name: str) -> float:
    """Median over repeats."""
    return statistics.median(run[name] for run in runs)


def real_table(rows: dict[str, list[dict[str, Any]]], best: str) -> str:
    """The comparison in Markdown, medians."""
    lines = [
        "| | blocks | output tok/s | of the best limit | recomputed | preemptions | TTFT p50 s | max s "
        "| longest gap s |",
        "|---|" + "---:|" * 8,
    ]
    for title, runs in rows.items():
        ratio = middle(runs, "output_tok_s") / middle(rows[best], "output_tok_s")
        lines.append(
            f"| {title} | {middle(runs, 'blocks'):,.0f} | {middle(runs, 'output_tok_s'):,.0f} | {ratio:.1%} | "
            f"{middle(runs, 'recomputed_share'):.2%} | {middle(runs, 'num_preemptions'):,.0f} | "
            f"{middle(runs, 'ttft_p50_s'):.2f} | {middle(runs, 'ttft_max_s'):.2f} | {middle(runs, 'itl_max_s'):.2f} |"
        )
    return "\n".join(lines)


def real_verdicts(rows: dict[str, list[dict[str, Any]]], best: str) -> list[tuple[str, str, bool]]:
    """As `verdicts`; that every request ended is checked after each run."""
    expected = rows["continuous, expected"]
    share = middle(expected, "recomputed_share")
    ratio = middle(expected, "output_tok_s") / middle(rows[best], "output_tok_s")
    answers = {run["answers"] for runs in rows.values() for run in runs}
    return [
        (f"recomputed under {MAX_RECOMPUTED:.0%}", f"{share:.2%}", share < MAX_RECOMPUTED),
        (f"throughput at least {MIN_THROUGHPUT:.0%} of the best limit's", f"{ratio:.1%}", ratio >= MIN_THROUGHPUT),
        ("answers are identical", str(len(answers)), len(answers) == 1),
    ]


# ------------------------------------------------------------------------------------------------------- command line


def report(title: str, text: str, checks: Sequence[tuple[str, str, bool]]) -> bool:
    """Print a comparison; whether all that is promised holds."""
    print(f"\n{title}\n\n{text}\n")
    for what, value, good in checks:
        print(f"{'holds' if good else 'FAILS':<6}{what}: {value}")
    return all(good for _, _, good in checks)


def main_simulated(arguments: argparse.Namespace) -> tuple[bool, list[dict[str, Any]]]:
    """Every shape, from clients in a closed loop and as independent arrivals."""
    cost = SKETCH if arguments.cost is None else CostModel.read(arguments.cost)
    num_clients = arguments.clients or 64
    base = Setting(max_num_seqs=num_clients, max_num_batched_tokens=max(256, num_clients))
    all_good, results = True, []
    for title, workload in simulated_workloads(arguments, num_clients):
        outcomes = compare_simulated(workload, arguments.share, base, cost)
        checks = verdicts(outcomes[1], outcomes[-1], len(workload.jobs))
        all_good &= report(title, table(outcomes), checks)
        results.append({"title": title, "runs": [outcome.figures() for outcome in outcomes], "checks": checks})
    return all_good, results


def simulated_workloads(arguments: argparse.Namespace, num_clients: int) -> Iterator[tuple[str, Workload]]:
    """With titles."""
    for shape in arguments.shape or SHAPES:
        workload = make_traffic(shape, arguments.jobs or 1000, num_clients, arguments.seed)
        yield f"{shape}: {num_clients} clients, each with one request at a time", workload
        if arguments.rate:
            timed = at_times(workload, arguments.rate, arguments.seed)
            yield f"{shape}: independent arrivals, {arguments.rate:g} a second", timed


def main_real(arguments: argparse.Namespace) -> tuple[bool, list[dict[str, Any]]]:
    """Every shape, from clients in a closed loop."""
    num_clients = arguments.clients or 32
    all_good, results = True, []
    for shape in arguments.shape or ("chat",):
        workload = make_traffic(shape, arguments.jobs or 8 * num_clients, num_clients, arguments.seed)
        runs = compare_real(arguments.model, workload, arguments.share, arguments.repeats, arguments.option)
        rows = real_rows(runs, num_clients)
        limited = [title for title in rows if "--max-num-seqs" in title]
        best = max(limited, key=lambda title: middle(rows[title], "output_tok_s"))
        all_good &= report(f"{shape}: {num_clients} clients", real_table(rows, best), real_verdicts(rows, best))
        results.append({"shape": shape, "runs": runs})
    return all_good, results


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, write; exit code 1 when something promised does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--real", action="store_true", help="on a real server instead of in virtual time")
    parser.add_argument("--share", type=float, default=0.3, help="of the demand that the pool has room for")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="traffic (default: all; real: chat)")
    parser.add_argument("--jobs", type=int, help="requests in all (default: 1,000; real: 8 a client)")
    parser.add_argument("--clients", type=int, help="clients, and slots (default: 64; real: 32)")
    parser.add_argument("--rate", type=float, help="simulated: also as independent arrivals, so many a second")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--cost", type=Path, help="simulated: step times that `everystop calibrate` wrote")
    parser.add_argument("--repeats", type=int, default=1, help="real: rounds")
    parser.add_argument("--option", action="append", default=[], help="real: one more flag of serve")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    arguments = parser.parse_args(argv)
    good, results = (main_real if arguments.real else main_simulated)(arguments)
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
