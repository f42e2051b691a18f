"""Runs real clients against a real server, says which got through, and writes down what they sent.

    python -m tests.conformance.record                    # all clients, each in an environment of its own
    python -m tests.conformance.record litellm guidellm   # some of them
    python -m tests.conformance.record --environments DIR --keep-requests

Environments are made in build/conformance, or in DIR, and kept. Without --keep-requests the bodies are written to
requests/*.json, from which the ordinary tests send them again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conformance.clients import CLIENTS, HERE, ClientKind, Site
from tests.conformance.proxy import Exchange, RecordingProxy
from tests.server.test_model import ServerProcess

from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.pull import resolve_model
from everystop.model.tokenizer_files import load_tokenizer

ROOT = HERE.parents[1]
REQUESTS = HERE / "requests"
ENVIRONMENTS = ROOT / "build" / "conformance"
MODEL = "smollm2"
CLIENT_S = 600
QUIET = {"TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"}


def environment(kind: ClientKind, folder: Path) -> Path:
    """The `bin` of the client's environment, made where it is missing."""
    home, stamp = folder / kind.name, folder / kind.name / "installed.txt"
    wanted = "\n".join(kind.packages)
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(home / "bin" / "pip"), "install", "--quiet", *kind.packages], check=True)
        stamp.write_text(wanted)
    return home / "bin"


def versions(kind: ClientKind, binaries: Path) -> str:
    """The client's name and version, as it is installed."""
    package = kind.packages[0].partition("=")[0].partition("[")[0]
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return f"{package} {subprocess.check_output([str(binaries / 'python'), '-c', code], text=True).strip()}"


def write_tokenizer(folder: Path) -> Path:
    """The embedded model's tokenizer as the files that clients read, for a folder without weights."""
    home = Home.from_environment()
    tokenizer = load_tokenizer(inspect_model(resolve_model(MODEL, home)), home)
    tokenizer._inner.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token}
    config |= {"bos_token": tokenizer.bos_token or tokenizer.eos_token, "model_max_length": 8192}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def run(kind: ClientKind, binaries: Path, site: Site) -> subprocess.CompletedProcess[str]:
    """Run the client to its end."""
    program, *arguments = kind.command(site)
    environment = {**os.environ, **QUIET, "PATH": f"{binaries}:{os.environ['PATH']}", "OPENAI_API_KEY": "unused"}
    environment.pop("PYTHONPATH", None)
    command = [str(binaries / program), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CLIENT_S, check=False
    )


def distinct(exchanges: Sequence[Exchange]) -> list[dict[str, Any]]:
    """One of each kind: requests that differ in their texts alone are the same to a server."""
    kinds: dict[str, dict[str, Any]] = {}
    for each in exchanges:
        if each.method == "POST":
            sent = {"path": each.path, "status": each.status, "body": each.body}
            kinds.setdefault(json.dumps([each.path, each.status, _shape(each.body)]), sent)
    return list(kinds.values())


def _shape(value: Any) -> Any:
    """The value with its texts replaced, and lists of numbers and texts by one of their items."""
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items() if key != "prompt_cache_key"}
    if isinstance(value, list):
        return sorted({json.dumps(_shape(item)) for item in value})
    return type(value).__name__ if isinstance(value, str | int | float) and not isinstance(value, bool) else value


def main(arguments: list[str]) -> int:
    """Run, record, report; 1 if a client did not get through."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.record")
    parser.add_argument("clients", nargs="*", default=list(CLIENTS))
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--keep-requests", action="store_true")
    options = parser.parse_args(arguments)
    failed = 0
    with ServerProcess() as server, tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        tokenizer.mkdir()
        write_tokenizer(tokenizer)
        for name in options.clients:
            kind, binaries = CLIENTS[name], environment(CLIENTS[name], options.environments)
            with RecordingProxy(server.url) as proxy:
                done = run(kind, binaries, Site(proxy.url, MODEL, tokenizer, Path(folder) / name))
            exchanges, client = proxy.exchanges, versions(kind, binaries)
            faults = sum(each.status >= 500 for each in exchanges)
            passed = done.returncode == 0 and not faults and bool(exchanges)
            failed += not passed
            print(f"{'passed' if passed else 'FAILED'}: {client}, {len(exchanges)} requests, {faults} server faults")
            if not passed:
                print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
            elif not options.keep_requests:
                recorded = {"client": client, "requests": distinct(exchanges)}
                text = json.dumps(recorded, indent=1, ensure_ascii=False) + "\n"
                (REQUESTS / f"{name}.json").write_text(text, encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
