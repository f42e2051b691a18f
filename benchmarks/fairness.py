"""What `--policy fair` keeps, beside first come, first served: shares of two floods, and a quiet tenant beside a flood.

    python -m benchmarks.fairness --repeats 3 --out fairness.json
    python -m benchmarks.fairness --side-by-side --repeats 3
    python -m benchmarks.fairness --simulated --cost measured

First the capacity is measured, in weighted tokens a second (1 for a token of a prompt, 2 for one of an answer): many
more requests than can run come at once. Rates are shares of it. All arrivals are open loops and the same under
every policy; the policies take turns, each run on a fresh server.

Floods: two tenants, `a` and `b`, begin with a line of requests each, and both ask for more than half of the capacity
and more than their share of it; `a` at twice the rate that this takes, so that first come, first served is unfair. A
run takes at least `--seconds`, and until the lesser share comes to `--least-tokens`. Service is what the clients had
got by then. The bound of the virtual token counter is checked in every window in which both wait, in the events of the
scheduler: the server writes a record, and its calls are repeated.

Quiet: one tenant asks for a fifth of the capacity, a flood for ten times as much. A quiet request without a first token
at the end counts with the time that it has waited so far. `limited` is `fair` where the flood may not take all slots
(`max_running`), so that the quiet tenant need not wait for one.

On a machine that others use, a run of a minute after another says little of two policies. Side by side, two servers of
one thread each run at the same time, on a core of their own, and change cores with each round: what disturbs one
disturbs the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.service import bound, measure_capacity, served, widest_gap
from benchmarks.straggler import spread
from benchmarks.trial import RealStage, Stage, Tenancy, Trial
from everystop.observe.distribution import percentile
from everystop.sim.workloads import Dice, Kind, Workload, burst, in_order_of_time, poisson
from everystop.trial.http_load import LoadRun

OPTIONS = ("--max-num-seqs", "16")
FAIR, LIMITED, FIRST_COME, ALONE = "fair", "limited", "continuous", "alone"
DEMAND = 1.3  # of a flood, in the larger of its share and half the capacity
LINE = 32  # requests of each flood at the start
QUIET_SHARE, FLOOD_TIMES = 0.2, 10.0
GRACE_S = 2.0  # how long arrivals go on after those that count
SPARE = 1.1  # of the time that the lesser share should take to come to its tokens

Weights = dict[str, float]
Row = dict[str, Any]
Call = tuple[Callable[..., Row], tuple[Any, ...]]
Check = tuple[str, str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What is measured and how: where, the kind of requests, flags for all servers, and the capacity."""

    stage: Stage
    kind: Kind
    options: tuple[str, ...]
    seconds: float
    least_tokens: float
    flood_max_running: int = 0
    capacity: float = 0.0

    @property
    def requests_per_s(self) -> float:
        """The capacity in requests."""
        return self.capacity / self.kind.mean_cost

    def flood_seconds(self, weights: Weights) -> float:
        """How long two floods take until the lesser share has come to its tokens, with something to spare."""
        lesser = self.capacity * min(weights.values()) / sum(weights.values())
        return max(self.seconds, SPARE * self.least_tokens / lesser)


def floods(study: Study, weights: Weights, seed: int) -> Workload:
    """Two tenants that both ask for more than they can get; the first one for twice as much."""
    total = sum(weights.values())
    streams = []
    for number, (name, weight) in enumerate(weights.items()):
        dice = Dice(f"flood {name}", seed)
        demand = DEMAND * max(0.5, weight / total) * (2 if number == 0 else 1)
        streams.append(burst(dice, study.kind, name, LINE))
        streams.append(poisson(dice, study.kind, name, demand * study.requests_per_s, study.flood_seconds(weights)))
    return in_order_of_time("floods", *streams)


def quiet_beside_flood(study: Study, seed: int, *, alone: bool) -> Workload:
    """A tenant that asks for a fifth of the capacity, with or without one that asks for ten times as much."""
    seconds, rate = study.seconds + GRACE_S, QUIET_SHARE * study.requests_per_s
    quiet = poisson(Dice("quiet", seed), study.kind, "quiet", rate, seconds)
    if alone:
        return in_order_of_time("quiet alone", quiet)
    flood = poisson(Dice("flood", seed), study.kind, "flood", FLOOD_TIMES * rate, seconds)
    return in_order_of_time("quiet", quiet, flood)


def play(study: Study, workload: Workload, policy: str, tenancy: Tenancy, stop_s: float, *, events: bool) -> Trial:
    """One run; only `fair` is told of the tenants."""
    is_fair = policy in (FAIR, LIMITED)
    options = [*study.options, "--policy", FAIR if is_fair else FIRST_COME]
    return study.stage.play(
        workload, options, tenancy=tenancy if is_fair else None, stop_s=stop_s, wants_events=is_fair and events
    )


def run_floods(study: Study, weights: Weights, policy: str, seed: int) -> Row:
    """One run of two floods."""
    workload, seconds = floods(study, weights, seed), study.flood_seconds(weights)
    trial = play(study, workload, policy, Tenancy(weights), seconds, events=True)
    row = figures(trial.run, seconds) | {"scenario": in_words(weights), "policy": policy, "seed": seed}
    if policy == FAIR:
        longest = max(len(job.prompt) for job in workload.jobs)
        row["widest_gap"] = widest_gap(trial.events, weights)
        row["bound"] = bound(longest, trial.num_kv_tokens, weights)
    first, second = weights
    return row | {"ratio": row["served"][second] / max(1, row["served"][first])}


def run_quiet(study: Study, policy: str, seed: int) -> Row:
    """One run of the quiet tenant: under a policy beside the flood, or alone."""
    workload = quiet_beside_flood(study, seed, alone=policy == ALONE)
    limits = {"flood": study.flood_max_running} if policy == LIMITED else {}
    tenancy = Tenancy({"quiet": 1.0, "flood": 1.0}, limits)
    stop_s = study.seconds + GRACE_S
    trial = play(study, workload, policy, tenancy, stop_s, events=False)
    return figures(trial.run, study.seconds, stop_s) | {"scenario": "quiet", "policy": policy, "seed": seed}


def figures(run: LoadRun, seconds: float, stop_s: float | None = None) -> Row:
    """Service within `seconds` by tenant, TTFT of what was sent until then, and what was refused or failed."""
    service = served(run, seconds)
    ttft = {name: ttft_ms(run, name, seconds, stop_s or seconds) for name in run.groups}
    return {
        "seconds": seconds,
        "served": service,
        "weighted_tok_s": sum(service.values()) / seconds,
        "ttft_p50_ms": {name: percentile(values, 50) for name, values in ttft.items()},
        "ttft_p95_ms": {name: percentile(values, 95) for name, values in ttft.items()},
        "requests": {name: len(values) for name, values in ttft.items()},
        "cut_without_token": {name: num_without_token(run, name, seconds) for name in run.groups},
        "refused": sum(record.error is not None for record in run.records),
        "first_error": next((record.error for record in run.records if record.error), None),
        "generator_cpu_s": run.cpu_s,
    }


def ttft_ms(run: LoadRun, group: str, until_s: float, stop_s: float) -> list[float]:
    """From sending to the first token, of a group's requests sent until then; to the end where there was none."""
    return [
        ((record.event_s[0] if record.event_s else stop_s) - record.sent_s) * 1e3
        for record in run.records
        if record.group == group and record.error is None and 0 <= record.sent_s <= until_s
    ]


def num_without_token(run: LoadRun, group: str, until_s: float) -> int:
    """How many of a group's requests sent until then had no token when the run ended."""
    return sum(r.group == group and r.is_cut and not r.event_s and r.sent_s <= until_s for r in run.records)


def in_words(weights: Weights) -> str:
    """Weights as they are typed."""
    return ":".join(f"{weight:g}" for weight in weights.values())


def pairs_of_runs(study: Study, pairs: Sequence[Weights], with_quiet: bool, repeats: int) -> Iterator[tuple[Call, ...]]:
    """All runs, those in pairs that are compared with each other."""
    for seed in range(1, repeats + 1):
        for weights in pairs:
            yield tuple((run_floods, (study, weights, policy, seed)) for policy in (FAIR, FIRST_COME))
        if with_quiet:
            yield tuple((run_quiet, (study, policy, seed)) for policy in (FAIR, FIRST_COME))
            last = (ALONE, LIMITED) if study.flood_max_running else (ALONE,)
            yield tuple((run_quiet, (study, policy, seed)) for policy in last)


def in_turns(runs: Iterable[tuple[Call, ...]]) -> Iterator[Row]:
    """One run at a time."""
    return (function(*arguments) for together in runs for function, arguments in together)


class Lanes:
    """Two processes, each of them and what it starts on a core of its own; they change places with every pair."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))[:2]
        if len(cores) < 2:
            raise SystemExit("--side-by-side needs two cores; this process may use one")
        self._lanes = [
            ProcessPoolExecutor(1, get_context("spawn"), initializer=os.sched_setaffinity, initargs=(0, {core}))
            for core in cores
        ]

    def rows(self, runs: Iterable[tuple[Call, ...]]) -> Iterator[Row]:
        """Two runs at a time."""
        for together in runs:
            yield from self.both(together)
            self._lanes.reverse()

    def both(self, calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
        """The results of two calls that run at the same time."""
        futures = [lane.submit(call[0], *call[1]) for lane, call in zip(self._lanes, calls, strict=False)]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the processes."""
        for lane in self._lanes:
            lane.shutdown()


# ---------------------------------------------------------------- verdicts


def verdicts(rows: Sequence[Row], pairs: Sequence[Weights], study: Study) -> list[Check]:
    """What is promised, what was measured, and whether it holds; of several rounds the median counts."""
    checks: list[Check] = []
    for weights in pairs:
        checks += flood_checks([row for row in rows if row["scenario"] == in_words(weights)], weights, study)
    quiet = [row for row in rows if row["scenario"] == "quiet"]
    for policy in (FAIR, LIMITED):
        if any(row["policy"] == policy for row in quiet):
            checks += quiet_checks(quiet, policy)
    return checks


def flood_checks(rows: Sequence[Row], weights: Weights, study: Study) -> list[Check]:
    """Of two floods."""
    name, fair = in_words(weights), [row for row in rows if row["policy"] == FAIR]
    first, second = weights
    wanted = weights[second] / weights[first]
    ratios = [row["ratio"] for row in fair]
    least = min(min(row["served"].values()) for row in fair)
    widest, allowed = max(row["widest_gap"] for row in fair), min(row["bound"] for row in fair)
    seconds = min(row["seconds"] for row in fair)
    return [
        (
            f"floods {name}: service b / a within 10 % of {wanted:g}",
            f"{spread(ratios, 3)}; {FIRST_COME} {spread((r['ratio'] for r in rows if r['policy'] == FIRST_COME), 3)}",
            abs(statistics.median(ratios) / wanted - 1) <= 0.1,
        ),
        (
            f"floods {name}: at least {study.least_tokens:,.0f} weighted tokens each, {study.seconds:g} s",
            f"{least:,} in {seconds:.0f} s",
            least >= study.least_tokens and seconds >= study.seconds,
        ),
        (f"floods {name}: gap within the bound in every window", f"{widest:,.0f} of {allowed:,.0f}", widest <= allowed),
        *common_checks(f"floods {name}", rows, FAIR),
    ]


def quiet_checks(rows: Sequence[Row], policy: str) -> list[Check]:
    """Of the quiet tenant under `fair`, with or without a limit on the flood."""
    name = "quiet" if policy == FAIR else f"quiet, {policy}"
    mine, first_come, alone = (
        [row["ttft_p95_ms"]["quiet"] for row in rows if row["policy"] == which] for which in (policy, FIRST_COME, ALONE)
    )
    better = [first / fair for first, fair in zip(first_come, mine, strict=True)]
    worse = [fair / own for fair, own in zip(mine, alone, strict=True)]
    return [
        (
            f"{name}: TTFT p95 at least 5 times better than {FIRST_COME}",
            f"{spread(better, 1)} times ({spread(mine, 0)} ms, not {spread(first_come, 0)} ms)",
            statistics.median(better) >= 5,
        ),
        (
            f"{name}: TTFT p95 at most twice its own alone",
            f"{spread(worse, 2)} times ({spread(alone, 0)} ms alone)",
            statistics.median(worse) <= 2,
        ),
        *common_checks(name, rows, policy),
    ]


def common_checks(title: str, rows: Sequence[Row], policy: str) -> Iterator[Check]:
    """Throughput against first come, first served, and that nobody was turned away."""
    rows = [row for row in rows if row["policy"] in (policy, FIRST_COME)]
    fair, first_come = (
        [row["weighted_tok_s"] for row in rows if row["policy"] == which] for which in (policy, FIRST_COME)
    )
    shares = [a / b for a, b in zip(fair, first_come, strict=True)]
    yield (
        f"{title}: throughput at least 95 % of {FIRST_COME}",
        f"{spread([100 * share for share in shares], 1)} %",
        statistics.median(shares) >= 0.95,
    )
    refused = sum(row["refused"] for row in rows)
    words = next((f" ({row['first_error']})" for row in rows if row["first_error"]), "")
    yield f"{title}: no request refused", f"{refused}{words}", refused == 0


def table(rows: Sequence[Row]) -> str:
    """Markdown, a line for each scenario and policy; medians, with the range of several rounds."""
    heads = ("scenario", "policy", "tenant", "weighted tokens", "TTFT p50 ms", "TTFT p95 ms", "all, weighted tok/s")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|---:|---:|---:|---:|"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["scenario"], row["policy"]), []).append(row)
    for (scenario, policy), same in groups.items():
        for name in same[0]["served"]:
            cells = [spread([row["served"][name] for row in same], 0)]
            cells += [spread([row[key][name] for row in same], 0) for key in ("ttft_p50_ms", "ttft_p95_ms")]
            cells.append(spread([row["weighted_tok_s"] for row in same], 0))
            lines.append(f"| {' | '.join([scenario, policy, name, *cells])} |")
    return "\n".join(lines)


# ---------------------------------------------------------------- the command


def read_weights(text: str) -> Weights:
    """Two weights from "1:3"."""
    try:
        first, second = (float(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no pair of weights such as 1:3") from None
    return {"a": first, "b": second}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", default="smollm2")
    add("--repeats", type=int, default=3)
    add("--seconds", type=float, default=60.0, help="how long a run takes at least (default: 60)")
    add("--least-tokens", type=float, default=50_000, help="weighted tokens that each flood must get (default: 50,000)")
    add("--weights", nargs="*", type=read_weights, default=[read_weights("1:1"), read_weights("1:3")], metavar="A:B")
    add("--no-quiet", action="store_true", help="only the floods")
    add("--prompt", nargs=2, type=int, default=(100, 300), metavar="N", help="shortest and longest prompt")
    add("--output", nargs=2, type=int, default=(40, 80), metavar="N", help="shortest and longest answer")
    add(
        "--flood-max-running", type=int, default=10, help="max_running under `limited`, 0 to leave it out (default: 10)"
    )
    add("--option", action="append", default=[], help="one more flag of serve, as --option=--threads=1")
    add("--side-by-side", action="store_true", help="compare servers of one thread that run at the same time")
    add("--simulated", action="store_true", help="the same arrivals in virtual time")
    add("--cost", help="step times for --simulated, as of `everystop simulate`")
    add("--out", type=Path, help="write all figures to this JSON file")
    arguments = parser.parse_args(argv)
    if arguments.simulated == (arguments.cost is None):
        parser.error("--simulated needs --cost, and --cost is for --simulated")
    if arguments.simulated and arguments.side_by_side:
        parser.error("--side-by-side is for real servers; virtual time is disturbed by nobody")
    return arguments


def make_study(arguments: argparse.Namespace, lanes: Lanes | None) -> Study:
    """Where and how; the capacity is measured here, side by side as the mean of both."""
    if arguments.simulated:
        from benchmarks.virtual import VirtualStage
        from everystop.cli.costs import read_cost

        stage: Stage = VirtualStage(read_cost(arguments.cost))
    else:
        stage = RealStage(arguments.model)
    kind = Kind(prompt=tuple(arguments.prompt), output=tuple(arguments.output))
    longest = -(-(kind.longest + 1) // 64) * 64
    options = (*OPTIONS, "--max-model-len", str(longest), *arguments.option)
    if lanes is None:
        capacity = measure_capacity(stage, kind, options)
    else:
        options = (*options, "--threads", "1")
        capacity = statistics.mean(lanes.both([(measure_capacity, (stage, kind, options))] * 2))
    return Study(
        stage=stage,
        kind=kind,
        options=options,
        seconds=arguments.seconds,
        least_tokens=arguments.least_tokens,
        flood_max_running=arguments.flood_max_running,
        capacity=capacity,
    )


def describe(study: Study) -> Mapping[str, Any]:
    """What was measured and how, as plain data."""
    return {
        "capacity_weighted_tok_s": study.capacity,
        "capacity_requests_s": study.requests_per_s,
        "prompt": study.kind.prompt,
        "output": study.kind.output,
        "options": study.options,
        "seconds": study.seconds,
        "flood_max_running": study.flood_max_running,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit code 1 when something promised does not hold."""
    arguments = parse_arguments(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a flood's line holds a connection each
    lanes = Lanes() if arguments.side_by_side else None
    study = make_study(arguments, lanes)
    print(f"capacity {study.capacity:,.0f} weighted tok/s, {study.requests_per_s:.2f} requests/s of this kind")
    runs = pairs_of_runs(study, arguments.weights, not arguments.no_quiet, arguments.repeats)
    rows = []
    for row in in_turns(runs) if lanes is None else lanes.rows(runs):
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    if lanes is not None:
        lanes.close()
    checks = verdicts(rows, arguments.weights, study)
    print(table(rows))
    for title, value, good in checks:
        print(f"{'holds' if good else 'FAILS':<6} {title}: {value}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"study": describe(study), "rows": rows, "checks": checks}, indent=1))
    return 0 if all(good for _, _, good in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
