"""How well the simulator predicts this machine: step times from one recorded run, tried on another that is unlike it.

    python -m benchmarks.prediction --out prediction.json

The first run has batches of 1 to 64 and prompts of 16 to 1,600 tokens, all of it twice, since the last fifth of the
steps is kept from the fit; step times are fitted to its record. The second one is an open loop of chats, Poisson
arrivals at 60 % of the capacity, which is measured before. Both records are replayed, and every plan must be the
recorded one. Then the second run's steps are compared one by one, and its TTFT, ITL and E2E are compared with what the
simulator makes of the same arrivals. The step times stay where `--cost measured` finds them, unless `--cost-out` names
a file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.local_server import LocalServer
from benchmarks.service import measure_capacity
from benchmarks.trial import RealStage
from everystop.cli.costs import cost_path
from everystop.observe.distribution import percentile
from everystop.sim.cost import CostModel
from everystop.sim.fit import TimedStep
from everystop.sim.replay import predict, replay, timed_steps
from everystop.sim.replay_report import replay_figures
from everystop.sim.run import calibrate
from everystop.sim.workloads import Dice, Job, Kind, Workload, in_order_of_time, poisson
from everystop.trial.http_client import Target
from everystop.trial.http_load import LoadRun, run_load

CLIENTS = (8, 1, 32, 2, 64, 4, 16) * 2
PROMPTS, LONG_PROMPTS, OUTPUTS = (16, 600), (600, 1600), (8, 300)
LONG_ONE_IN = 16
JOBS_PER_S = 25  # more than a small model on a CPU takes
CHAT = Kind(prompt=(40, 200), output=(40, 200))
LOAD = 0.6
NAMES = ("ttft_ms", "itl_ms", "e2e_ms")
PERCENTS = ("p50", "p90")

Row = dict[str, Any]


def mixture(num_clients: int, seconds: float, seed: int) -> Workload:
    """Requests of very different lengths from that many clients, more than they can get through."""
    dice = Dice(f"mixture {num_clients}", seed)
    jobs = []
    for i in range(num_clients + round(JOBS_PER_S * seconds)):
        length = dice.log_normal(*(LONG_PROMPTS if i % LONG_ONE_IN == LONG_ONE_IN - 1 else PROMPTS))
        jobs.append(Job(prompt=dice.prompt(length), max_tokens=dice.log_normal(*OUTPUTS)))
    return Workload(f"mixture of {num_clients}", num_clients, tuple(jobs))


def chats(requests_per_s: float, seconds: float, seed: int) -> Workload:
    """Independent chats at a mean rate."""
    return in_order_of_time("chats", poisson(Dice("chats", seed), CHAT, "", requests_per_s, seconds))


def record_mixture(model: str, options: Sequence[str], path: Path, seconds: float) -> None:
    """The run to which step times are fitted: an equal time for each number of clients."""
    each_s = seconds / len(CLIENTS)
    with LocalServer(model, [*options, "--record", str(path)]) as server:
        for seed, num_clients in enumerate(CLIENTS):
            check(run_load(mixture(num_clients, each_s, seed), Target(url=server.url, stop_s=each_s)))
            server.wait_idle(60)


def record_chats(model: str, options: Sequence[str], path: Path, workload: Workload) -> LoadRun:
    """The run that is predicted; returns what its clients saw."""
    with LocalServer(model, [*options, "--record", str(path)]) as server:
        run = run_load(workload, Target(url=server.url))
        server.wait_idle(60)
    check(run)
    return run


def check(run: LoadRun) -> None:
    """Raise SystemExit if a request failed."""
    for record in run.records:
        if record.error is not None:
            raise SystemExit(f"{run.workload}, job {record.job}: {record.error}")


def step_errors(model: CostModel, steps: Sequence[TimedStep]) -> dict[str, Row]:
    """How far each step is off, as shares of its time: all of them, those that only decode, and those that prefill."""
    kinds = {
        "all": steps,
        "decode only": [step for step in steps if not step.features.prefill_pairs],
        "with prefill": [step for step in steps if step.features.prefill_pairs],
    }
    return {name: _errors(model, some) for name, some in kinds.items() if some}


def _errors(model: CostModel, steps: Sequence[TimedStep]) -> Row:
    pairs = [(model.execute_ns(step.features), step.execute_ns) for step in steps]
    errors = [abs(predicted - real) / max(1, real) for predicted, real in pairs]
    return {
        "num_steps": len(steps),
        "mean_ms": sum(real for _, real in pairs) / len(pairs) / 1e6,
        "median_error": percentile(errors, 50),
        "p90_error": percentile(errors, 90),
        "total_error": sum(predicted for predicted, _ in pairs) / max(1, sum(real for _, real in pairs)) - 1,
    }


def client_figures(run: LoadRun) -> Row:
    """The same durations as the clients saw them."""
    figures = run.summary()
    return {name: {percent: figures[name][percent] for percent in PERCENTS} for name in NAMES}


def compare(fitted: Path, held_out: Path, run: LoadRun, cost: Path) -> Row:
    """Fit, replay both records, and predict the second one; `cost` is where the step times go."""
    model = calibrate(fitted, held_out)
    model.write(cost)
    replays = [replay(path) for path in (fitted, held_out)]
    prediction = replay_figures(predict(held_out, model))
    return {
        "model": model.source,
        "coefficients_ns": model.numbers(),
        "replays": [{"num_plans": r.num_plans, "first_difference": r.first_difference} for r in replays],
        "steps": step_errors(model, timed_steps(held_out)[0]),
        "real": {name: prediction["recorded"][name] for name in NAMES},
        "predicted": {name: prediction["replayed"][name] for name in NAMES},
        "clients": client_figures(run),
    }


# ---------------------------------------------------------------- in words


def durations_table(found: Row) -> str:
    """Markdown: each duration as it was in the engine, as predicted, and as the clients saw it."""
    lines = ["| ms | recorded | predicted | error | seen by clients |", "|---|---:|---:|---:|---:|"]
    for name in NAMES:
        for percent in PERCENTS:
            real, predicted = found["real"][name][percent], found["predicted"][name][percent]
            error = f"{predicted / real - 1:+.1%}" if real else "–"
            title = f"{name.removesuffix('_ms').upper()} {percent}"
            seen = found["clients"][name][percent]
            lines.append(f"| {title} | {real:,.1f} | {predicted:,.1f} | {error} | {seen:,.1f} |")
    return "\n".join(lines)


def steps_table(found: Row) -> str:
    """Markdown: the errors of single steps."""
    lines = ["| steps of the held-out run | number | mean ms | error, median | p90 | in sum |", "|---|" + "---:|" * 5]
    for name, row in found["steps"].items():
        lines.append(
            f"| {name} | {row['num_steps']:,} | {row['mean_ms']:.2f} | {row['median_error']:.1%} | "
            f"{row['p90_error']:.1%} | {row['total_error']:+.1%} |"
        )
    return "\n".join(lines)


def replay_checks(found: Row) -> list[tuple[str, str, bool]]:
    """A replay must make the plans that were recorded."""
    return [
        (
            f"replay of the {title} run: every plan is the recorded one",
            f"{row['num_plans']:,} plans"
            + ("" if row["first_difference"] is None else f", step {row['first_difference']} differs"),
            row["first_difference"] is None,
        )
        for title, row in zip(("fitted", "held-out"), found["replays"], strict=True)
    ]


def measure(arguments: argparse.Namespace, folder: Path) -> Row:
    """Both runs, with the records in a folder."""
    fitted, held_out = folder / "fitted.gz", folder / "held-out.gz"
    load = os.getloadavg()[0]
    capacity = measure_capacity(RealStage(arguments.model), CHAT, arguments.option) / CHAT.mean_cost
    rate = LOAD * capacity
    print(f"capacity {capacity:.2f} chats/s; the held-out run has {rate:.2f}", file=sys.stderr, flush=True)
    record_mixture(arguments.model, arguments.option, fitted, arguments.fit_seconds)
    run = record_chats(arguments.model, arguments.option, held_out, chats(rate, arguments.seconds, seed=2))
    found = compare(fitted, held_out, run, cost_path(arguments.cost_out))
    return found | {"load_average": load, "chats_per_s": rate, "num_chats": len(run.records)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit code 1 when a replay differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--fit-seconds", type=float, default=168.0, help="length of the first run (default: 168)")
    parser.add_argument("--seconds", type=float, default=90.0, help="length of the second run (default: 90)")
    parser.add_argument("--cost-out", default="measured", help="where the step times go (default: measured)")
    parser.add_argument("--records", type=Path, help="keep both records in this folder")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--option", action="append", default=[], help="one more flag of serve, as --option=--threads=1")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.records is not None:
            arguments.records.mkdir(parents=True, exist_ok=True)
        found = measure(arguments, arguments.records or Path(folder))
    print(f"{found['model']}\n\n{steps_table(found)}\n\n{durations_table(found)}\n")
    checks = replay_checks(found)
    for title, value, good in checks:
        print(f"{'holds' if good else 'FAILS':<6} {title}: {value}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found | {"checks": checks}, indent=1))
    return 0 if all(good for _, _, good in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
