"""From the command to the first streamed token of a chat, and where that time goes.

    python -m benchmarks.startup --repeats 7 --out startup.json

Model fetched, caches made and files in memory (the first run is not counted). The client waits for the line that says
where the server serves, then streams one chat answer. The phases are measured in a process of their own that opens the
model as the server does; the imports by `python -X importtime`. Their sum is smaller than the whole by what the server
overlaps or adds: the socket, the event loop, one request over HTTP.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.local_server import COMMAND, ROOT, LocalServer, child_environment

LIMIT_S = 2.0
LAUNCHER = (str(ROOT / "everystop"), "serve")
PACKAGES_SHOWN = 14


def whole(model: str, command: Sequence[str], options: Sequence[str]) -> dict[str, float]:
    """Seconds from starting the command to the line that says where it serves, and to the first token of a chat;
    processor time until then, which a busy machine stretches less.
    """
    start_s = time.perf_counter()
    with LocalServer(model, options, command) as server:
        ready_s = time.perf_counter() - start_s
        first_token(server)
        return {"serving_s": ready_s, "first_token_s": time.perf_counter() - start_s, "cpu_s": server.cpu_s()}


def first_token(server: LocalServer) -> None:
    """Return when the first text of a chat answer has arrived; raises SystemExit if none does."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    body = {"messages": [{"role": "user", "content": "Where does the night bus go?"}], "stream": True, "max_tokens": 8}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    for line in answer:
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:]).get("choices") or [{}]
            if choices[0].get("delta", {}).get("content"):
                connection.close()
                return
    raise SystemExit(f"no token: HTTP {answer.status}")


class Phases:
    """Durations of consecutive phases, in seconds, by name."""

    def __init__(self) -> None:
        self.durations_s: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def end(self, name: str) -> None:
        """The phase that began with the last call ends here."""
        now_s = time.perf_counter()
        self.durations_s[name] = now_s - self._last_s
        self._last_s = now_s


def open_in_phases(model: str) -> dict[str, float]:
    """Do what `serve` does up to the first token, without HTTP; called in a fresh process."""
    phases = Phases()
    import everystop.cli

    everystop.cli.make_parser()
    phases.end("import the command line")
    import everystop.runner.native
    import everystop.server.opening

    opening: Any = everystop.server.opening
    phases.end("import server, model and runner")
    config = opening.Config(model=model)
    home = opening.Home.from_environment()
    checkpoint = opening.inspect_model(opening.resolve_model(config.model, home))
    phases.end("find the model, check headers")
    tokenizer = opening.load_tokenizer(checkpoint, home)
    phases.end("tokenizer")
    template = opening.load_chat_template(checkpoint, tokenizer, None)
    prompt = tokenizer.encode_rendered(template.render([{"role": "user", "content": "Where does the night bus go?"}]))
    phases.end("chat template")
    threads = opening.num_threads(config)
    loaded = opening.load_model(checkpoint, dtype=config.dtype, num_threads=threads, home=home)
    phases.end("weights")
    first_step = engine_of(opening, config, loaded, tokenizer, prompt)
    phases.end("engine and KV cache")
    first_step()
    phases.end("first step")
    return phases.durations_s


def engine_of(opening: Any, config: Any, loaded: Any, tokenizer: Any, prompt: Sequence[int]) -> Callable[[], None]:
    """An engine, and what makes it run one request to its first token."""
    import threading

    from everystop.core.request import SamplingParams
    from everystop.engine.messages import Submit

    engine, *_ = opening.build_engine(
        config,
        loaded,
        eos_token_ids=tokenizer.eos_ids,
        num_valid_tokens=loaded.spec.vocab_size,
        make_text_decoder=tokenizer.text_decoder,
    )
    seen = threading.Event()
    engine.on_outputs = lambda outputs: seen.set()

    def first_step() -> None:
        engine.start()
        engine.submit(Submit(engine.allocate_ids(1), tuple(prompt), SamplingParams(max_tokens=1, temperature=0.0)))
        assert seen.wait(30)
        engine.stop()

    return first_step


def phases_in_child(model: str) -> dict[str, float]:
    """`open_in_phases` in a fresh interpreter, and how long that takes to come up."""
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.startup", "--phases-of", model],
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
        env=child_environment(),
    )
    whole_s = time.perf_counter() - start_s
    durations_s: dict[str, float] = json.loads(done.stdout)
    return {"interpreter, and its end": whole_s - sum(durations_s.values()), **durations_s}


def import_times() -> list[tuple[str, float]]:
    """Milliseconds spent in the modules of each top-level package, itself alone, largest first."""
    statement = "import everystop.server.opening, everystop.runner.native"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", statement],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env=child_environment(),
    )
    totals: dict[str, float] = {}
    for line in done.stderr.splitlines():
        own, _, name = (part.strip() for part in line.removeprefix("import time:").split("|"))
        if own.isdigit():
            package = name.partition(".")[0]
            totals[package] = totals.get(package, 0.0) + int(own) / 1e3
    return sorted(totals.items(), key=lambda item: -item[1])


def in_words(values_s: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values_s):.3f} s ({min(values_s):.3f}–{max(values_s):.3f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit code 1 when the median misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-launcher", action="store_true", help="start this Python's package, not ./everystop")
    parser.add_argument("--option", action="append", default=[], help="one more flag of serve, as --option=--threads=1")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--phases-of", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.phases_of:
        print(json.dumps(open_in_phases(arguments.phases_of)))
        return 0
    command = COMMAND if arguments.no_launcher else LAUNCHER
    load = os.getloadavg()[0]
    runs = [whole(arguments.model, command, arguments.option) for _ in range(arguments.repeats + 1)][1:]
    phases = [phases_in_child(arguments.model) for _ in range(arguments.repeats)]
    first_s = [run["first_token_s"] for run in runs]
    print(f"{Path(command[0]).name}, {arguments.repeats} runs, load average {load:.1f}")
    print(f"serving      {in_words([run['serving_s'] for run in runs])}\nfirst token  {in_words(first_s)}")
    print(f"processor    {in_words([run['cpu_s'] for run in runs])}")
    medians = {name: statistics.median(phase[name] for phase in phases) for name in phases[0]}
    for name, value in medians.items():
        print(f"  {name:<34}{value * 1e3:8.0f} ms")
    imports = import_times()
    for name, value in imports[:PACKAGES_SHOWN]:
        print(f"    import {name:<27}{value:8.1f} ms")
    good = statistics.median(first_s) < LIMIT_S
    print(f"{'holds' if good else 'FAILS':<6} first token: under {LIMIT_S:g} s")
    if arguments.out is not None:
        result = {"runs": runs, "phases_s": phases, "imports_ms": imports, "load_average": load}
        arguments.out.write_text(json.dumps(result, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
