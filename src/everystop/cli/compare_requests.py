"""Which requests `everystop compare` sends: a preset's, a file's, or a trace's, and the options that change them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from everystop.cli import settings, simulate
from everystop.cli.compare_server import check_server_options
from everystop.core.errors import ConfigError

if TYPE_CHECKING:
    from everystop.sim.workloads import Workload


def add_requests(parser: argparse.ArgumentParser) -> None:
    """Which requests are sent."""
    group = parser.add_argument_group("requests")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--preset",
        metavar="NAME",
        help="straggler (the default), chat, uniform, stall, shared, prefill or low-load; has its own --max-num-seqs",
    )
    which.add_argument("--workload", metavar="FILE", type=settings.path, help="requests with token ids, as JSON lines")
    which.add_argument(
        "--trace", metavar="FILE", type=settings.path, help="requests with times and lengths, as for simulate"
    )
    simulate.add_trace_changes(group)
    group.add_argument(
        "--clients", metavar="N", type=int, help="send by N clients, one request at a time each, at no set times"
    )
    group.add_argument("--workload-seed", metavar="N", type=int, help="another one makes other prompts of a preset")


def read_requests(arguments: argparse.Namespace) -> tuple[Workload, int | None]:
    """What is sent, and the number of slots that a preset brings; raises ConfigError and what is wrong with a file."""
    from everystop.sim.traces import read_trace
    from everystop.sim.workloads import DEFAULT_SEED, WorkloadError, read_workload
    from everystop.trial.presets import DEFAULT, PRESETS
    from everystop.trial.traced import traced_workload

    refuse_idle_options(arguments)
    max_num_seqs = None
    if arguments.trace is not None:
        workload = traced_workload(arguments.trace.name, read_trace(arguments.trace, simulate.trace_options(arguments)))
    elif arguments.workload is not None:
        try:
            workload = read_workload(arguments.workload.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            cause = getattr(error, "strerror", None) or error
            raise ConfigError(f"--workload {arguments.workload} cannot be read: {cause}") from None
        except WorkloadError as error:
            raise ConfigError(f"--workload {arguments.workload}, {error}") from None
    else:
        name = arguments.preset or DEFAULT
        if name not in PRESETS:
            raise ConfigError(f"--preset is {name!r}; choose one of {', '.join(PRESETS)}")
        seed = DEFAULT_SEED if arguments.workload_seed is None else arguments.workload_seed
        workload, max_num_seqs = PRESETS[name].workload(name, seed), PRESETS[name].max_num_seqs
    return with_clients(workload, arguments.clients), max_num_seqs


def refuse_idle_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option that would change nothing."""
    changes = {"format": None, "scale_lengths": 1.0, "dilate_time": 1.0, "limit": None}
    if arguments.trace is None:
        for name, default in changes.items():
            if getattr(arguments, name) != default:
                raise ConfigError(f"--{name.replace('_', '-')} has no effect without --trace; leave it out")
    elif arguments.clients is not None and arguments.dilate_time != 1.0:
        raise ConfigError("--dilate-time has no effect with --clients, which send at no set times; leave one out")
    if arguments.workload_seed is not None and (arguments.trace or arguments.workload):
        raise ConfigError("--workload-seed makes the prompts of presets; it has no effect on a file; leave it out")
    if not 0 <= arguments.temperature <= 100:
        raise ConfigError(f"--temperature is {arguments.temperature:g}; it must be 0 to 100")
    if hasattr(arguments, "seed") and not arguments.temperature:
        raise ConfigError("--seed has no effect on greedy outputs; raise --temperature or leave it out")
    check_server_options(arguments)


def with_clients(workload: Workload, num_clients: int | None) -> Workload:
    """The same requests from so many clients, at no set times; None changes nothing."""
    from everystop.sim.workloads import MAX_CLIENTS

    if num_clients is None:
        return workload
    if not 1 <= num_clients <= MAX_CLIENTS:
        raise ConfigError(f"--clients is {num_clients:,}; it must be at least 1, and at most {MAX_CLIENTS:,}")
    jobs = tuple(dataclasses.replace(job, at_s=None) for job in workload.jobs)
    return dataclasses.replace(workload, num_clients=num_clients, jobs=jobs)
