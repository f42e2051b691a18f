"""`everystop explain ID`: why a request took as long as it did, from a running server or from a record."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from everystop.cli import settings
from everystop.core.errors import ConfigError, RecordError
from everystop.server_url import EXAMPLE_URL

if TYPE_CHECKING:
    from everystop.observe.history import History
    from everystop.sim.replay import PastRun


ESTIMATE_S = 120.0  # longer than a server takes for one


def add_parser(commands: Any) -> None:
    """Describe the command and its options."""
    parser = commands.add_parser(
        "explain",
        usage="everystop explain ID [--url URL | --record FILE] [options]",
        help="say why a request took so long",
        description="Say why a request took so long: one sentence, where its time went, and which tokens came late. ID "
        "is the id of the answer (chatcmpl-... or cmpl-...), the x-request-id that the client sent, or the request's "
        "number in the engine.",
        formatter_class=settings.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("id", metavar="ID", help="which request")
    settings.add_remote_options(parser)
    parser.add_argument(
        "--record", metavar="FILE", type=settings.path, help="look in a record instead of asking a server"
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="also estimate how long the request would have taken alone, under another policy, and with other limits; "
        "a server does so if it was started with --record",
    )
    parser.add_argument("--json", action="store_true", help="print all that is known as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Explain, and print it."""
    data = read_record(arguments) if arguments.record is not None else ask_server(arguments)
    if arguments.json:
        print(json.dumps(data))
        return 0
    from rich.console import Console

    from everystop.cli.blame import show

    show(data, Console(highlight=False))
    return 0


def ask_server(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """The explanation by the running server; raises RemoteError."""
    from everystop.cli.remote import Remote

    remote = Remote(arguments.url, arguments.api_key, arguments.ca_file)
    path = f"/v1/requests/{quote(arguments.id, safe='')}/explain"
    data: Mapping[str, Any] = (
        remote.get_json(path + "?what_if=true", timeout_s=ESTIMATE_S) if arguments.what_if else remote.get_json(path)
    )
    return data


def read_record(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """The explanation by what a record holds; raises RecordError."""
    if not (arguments.api_key is arguments.ca_file is None and arguments.url == EXAMPLE_URL):
        raise ConfigError(
            "--record reads a file and asks no server; leave out --url, --api-key and --ca-file, or --record"
        )
    from everystop.sim.replay import history_of_record, past_run

    if not arguments.what_if:
        history = history_of_record(arguments.record)
        return explain_past(history, find_in(arguments.record, history, arguments.id))
    try:
        run = past_run(arguments.record)
        request_ids = find_in(arguments.record, run.history, arguments.id)
        data = explain_past(run.history, request_ids)
        return {**data, "what_if": estimate(run, request_ids, data)}
    except MemoryError:
        raise RecordError(f"{arguments.record} is too long for the memory there is; record a shorter run") from None


def find_in(path: Path, history: History, name: str) -> list[int]:
    """The sequences of a request of a record; raises RecordError if it has none of that name."""
    request_ids = find(history, name)
    if not request_ids:
        raise RecordError(
            f"{path} has no request {name!r}; it has {len(history.trails):,}, by the ids of their answers or by "
            "number, from 0"
        )
    return request_ids


def explain_past(history: History, request_ids: list[int]) -> dict[str, Any]:
    """The explanation, others being called by the ids of their answers, where those are known."""
    from everystop.observe.explain import explain
    from everystop.observe.wording import number_name

    def name_of(request_id: int) -> str:
        trail = history.trails.get(request_id)
        client = None if trail is None else trail.client
        return number_name(request_id) if client is None else client.name

    return explain(history, request_ids, now_ns=history.last_ns, name_of=name_of).as_data()


def estimate(run: PastRun, request_ids: list[int], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """How long it would have taken otherwise, also with what its explanation advises; raises RecordError."""
    from everystop.cli.what_if import in_words
    from everystop.sim.what_if import what_if

    return in_words(what_if(run, request_ids, advised=[advice["flag"] for advice in data["advice"]]).as_data())


def find(history: History, name: str) -> list[int]:
    """The sequences of the request of that name, whoever gave it, or of that number, with or without an r before it."""
    client = next(history.clients_called(name), None)
    if client is not None:
        return list(client.request_ids)
    trail = history.trail_called(name)
    return [] if trail is None else [trail.request_id]
