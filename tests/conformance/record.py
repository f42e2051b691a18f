"""Runs real clients against a real server, says which got through, and writes down what they sent.

    python -m tests.conformance.record                    # all clients
    python -m tests.conformance.record litellm guidellm   # some of them
    python -m tests.conformance.record --environments DIR --keep-requests

What the tests' environments do not hold is installed in build/conformance, or in DIR, and kept. Without
--keep-requests the bodies are written to requests/*.json, from which the ordinary tests send them again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.conformance.clients import CLIENTS, HERE, Site
from tests.conformance.environments import APART, environment, version
from tests.conformance.proxy import Exchange
from tests.conformance.trial import try_client
from tests.server.test_model import ServerProcess

from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.pull import resolve_model
from everystop.model.tokenizer_files import load_tokenizer

REQUESTS = HERE / "requests"
MODEL = "smollm2"


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


def recorded(name: str) -> dict[str, Any]:
    """What is written down of a client: its name and version as `client`, and `requests`."""
    found: dict[str, Any] = json.loads((REQUESTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def sent(exchanges: Iterable[Exchange]) -> list[dict[str, Any]]:
    """What was posted, one of each kind: requests that differ in their texts alone are the same to a server."""
    posted = [each for each in exchanges if each.method == "POST"]
    return list(kinds({"path": each.path, "status": each.status, "body": each.body} for each in posted).values())


def kinds(requests: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first request of each kind, by what tells kinds apart."""
    found: dict[str, dict[str, Any]] = {}
    for each in requests:
        found.setdefault(json.dumps([each["path"], each["status"], _shape(each["body"])], sort_keys=True), each)
    return found


def _shape(value: Any) -> Any:
    """The value with its texts replaced, and lists of numbers and texts by one of their items."""
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items() if key != "prompt_cache_key"}
    if isinstance(value, list):
        return sorted({json.dumps(_shape(item), sort_keys=True) for item in value})
    return type(value).__name__ if isinstance(value, str | int | float) and not isinstance(value, bool) else value


def main(arguments: list[str]) -> int:
    """Run, record, report; 1 if a client did not get through."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.record")
    parser.add_argument("clients", nargs="*", default=list(CLIENTS))
    parser.add_argument("--environments", type=Path, default=APART)
    parser.add_argument("--keep-requests", action="store_true")
    options = parser.parse_args(arguments)
    failed = 0
    with ServerProcess() as server, tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder) / "tokenizer"
        tokenizer.mkdir()
        write_tokenizer(tokenizer)
        for name in options.clients:
            kind, binaries = CLIENTS[name], environment(CLIENTS[name], options.environments)
            trial = try_client(kind, binaries, Site(server.url, MODEL, tokenizer, Path(folder) / name))
            client, num = f"{kind.distribution} {version(kind, binaries)}", len(trial.exchanges)
            failed += not trial.passed
            print(f"{'passed' if trial.passed else 'FAILED'}: {client}, {num} requests, {trial.faults} server faults")
            if not trial.passed:
                print(trial.report())
            elif not options.keep_requests:
                recorded = {"client": client, "requests": sent(trial.exchanges)}
                text = json.dumps(recorded, indent=1, ensure_ascii=False) + "\n"
                (REQUESTS / f"{name}.json").write_text(text, encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
