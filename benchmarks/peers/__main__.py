"""Installs other servers, measures them beside this one in turns, and reports.

    python -m benchmarks.peers install                     # each in an environment of its own, weights included
    python -m benchmarks.peers run --sweep                 # every setting once, on `chat` and `single`
    python -m benchmarks.peers run --repeats 3             # each one's best, in turns, on all workloads
    python -m benchmarks.peers run --kind clients          # also: context, rows, answers
    python -m benchmarks.peers report --json FILE --charts docs/pictures

Everything lies under --dir (default: `peers` in the folder that EVERYSTOP_HOME names). Runs are appended to --out as
they end; --repeats N goes on counting turns where the file leaves off, and each turn has prompts of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import records, report
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.loads import KINDS, WORKLOADS, Task, make_tasks
from benchmarks.peers.measure import Entrant, Measurement, machine
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.ours import Ours
from benchmarks.peers.peer import Peer, PeerError, Place
from benchmarks.peers.vllm import Vllm
from everystop.core.errors import EverystopError
from everystop.model.home import Home

PEERS: dict[str, Peer] = {peer.name: peer for peer in (Ours(), OpenVino(), LlamaCpp(), Vllm())}
SWEEP_WORKLOADS = ("single", "chat")
STANDS_FOR = {"clients": "chat", "context": "single", "rows": "chat", "answers": "chat"}


def say(sentence: str) -> None:
    """To the person who waits."""
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)


def chosen_peers(names: Sequence[str] | None) -> list[Peer]:
    """The peers of these names, or all."""
    return [PEERS[name] for name in names or PEERS]


def install(arguments: argparse.Namespace) -> int:
    """Install each; what cannot be installed is told with its cause, and does not keep the others away."""
    failed = 0
    for peer in chosen_peers(arguments.peer):
        try:
            peer.install(arguments.place, say)
            if fault := peer.fault(arguments.place):
                raise PeerError(fault)
            say(f"{peer.name}: {peer.version(arguments.place)}")
        except EverystopError as error:
            failed += 1
            say(f"{peer.name} cannot be installed: {error}")
    return 1 if failed else 0


def entrants(peer: Peer, task: Task, arguments: argparse.Namespace, known: list[records.Record]) -> list[Entrant]:
    """The settings of a peer that take a task: those asked for, all of a sweep, or the best that is known."""
    settings = {setting.name: setting for setting in peer.settings}
    if asked := [label.partition(":")[2] for label in arguments.setting if label.partition(":")[0] == peer.name]:
        if unknown := [name for name in asked if name not in settings]:
            raise PeerError(f"{peer.name} has no setting {unknown[0]!r}; it has: {', '.join(settings)}")
        return [Entrant(peer, settings[name]) for name in asked]
    if arguments.sweep or not peer.is_swept:
        return [Entrant(peer, setting) for setting in peer.settings]
    best = records.best_setting(known, peer.name, STANDS_FOR.get(task.kind, task.name))
    if best is None or best not in settings:
        raise PeerError(f"{peer.name} has not been swept; use --sweep first, or name a setting by --setting")
    return [Entrant(peer, settings[best])]


def run(arguments: argparse.Namespace) -> int:
    """Turns: in each, every entrant one after the other."""
    peers = chosen_peers(arguments.peer)
    for peer in list(peers):
        if fault := peer.fault(arguments.place):
            say(f"{peer.name} is left out: {fault}")
            peers.remove(peer)
    known = records.read(arguments.out) if arguments.out.is_file() else []
    first = 1 + max((record["turn"] for record in known if record["kind"] == arguments.kind), default=0)
    names = arguments.workload or (SWEEP_WORKLOADS if arguments.sweep else tuple(WORKLOADS))
    common = {"machine": machine(), "arguments": sys.argv[1:], "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    measurement = Measurement(place=arguments.place, out=arguments.out, say=say, common=common)
    for turn in range(first, first + arguments.repeats):
        tasks = make_tasks(arguments.kind, turn, names=names, counts=arguments.count, limit=arguments.limit)
        pairs = [(e, task) for peer in peers for task in tasks for e in entrants(peer, task, arguments, known)]
        measurement.turn(turn, pairs)
    if arguments.kind == "rows":
        records.append(arguments.out, {**common, **report.limits_record()})
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Text to standard output; JSON and charts where asked for. Exit code 1 when something must not be compared."""
    found = report.summarise(records.read(arguments.out), list(PEERS.values()))
    print(report.text(found))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if arguments.charts is not None:
        from benchmarks.peers.charts import draw_all

        for path in draw_all(found, arguments.charts):
            say(f"drawn: {path}")
    return 1 if found["objections"] else 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--dir", type=Path, help="where environments and weights lie")
    shared.add_argument("--peer", action="append", choices=PEERS, help="only this one; may be repeated")
    runs = argparse.ArgumentParser(add_help=False)
    runs.add_argument("--out", type=Path, default=Path("peers.jsonl"), help="the file of runs")
    installing = commands.add_parser("install", parents=[shared], help="install peers and make their weights")
    installing.set_defaults(work=install)
    running = commands.add_parser("run", parents=[shared, runs], help="measure, in turns")
    running.set_defaults(work=run)
    running.add_argument("--kind", choices=KINDS, default="workload")
    running.add_argument("--workload", action="append", choices=WORKLOADS, help="only this one; may be repeated")
    running.add_argument("--count", type=int, action="append", default=[], help="clients, rows or prompt tokens")
    running.add_argument("--sweep", action="store_true", help="every setting of each peer")
    running.add_argument("--setting", action="append", default=[], metavar="PEER:SETTING", help="only these of a peer")
    running.add_argument("--repeats", type=int, default=1, help="turns")
    running.add_argument("--limit", type=int, help="send only the first N requests of each workload")
    reporting = commands.add_parser("report", parents=[runs], help="tables, ratios, charts")
    reporting.set_defaults(work=show)
    reporting.add_argument("--json", type=Path, help="write everything to this file")
    reporting.add_argument("--charts", type=Path, help="draw into this folder")
    arguments = parser.parse_args(argv)
    if wrong := [label for label in getattr(arguments, "setting", []) if label.partition(":")[0] not in PEERS]:
        parser.error(f"--setting {wrong[0]}: it begins with one of {', '.join(PEERS)} and a colon")
    folder = getattr(arguments, "dir", None) or Home.from_environment().root / "peers"
    arguments.place = Place(folder.absolute())
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit code 1 with a sentence for what cannot be done."""
    arguments = parse_arguments(argv)
    try:
        return int(arguments.work(arguments))
    except EverystopError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
