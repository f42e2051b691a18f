"""Throws generated requests at a server without weights, as its own OpenAPI description allows and forbids them.

`python -m tests.conformance.fuzz --examples 150` prints how many cases each path got, and how they were answered. A
case fails if the status is a 500 or not described, if the media type or the body is not what is described, if something
that the description forbids is taken, or if no answer comes within `TIMEOUT_S`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from tests.server.parrot import ParrotServer, parrot

TIMEOUT_S = 20.0
ENDLESS = {"/ui/stream"}  # an answer that never ends
MAX_MODEL_LEN = 128
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
)


@dataclass
class Tally:
    """What came back: cases by operation, and by status."""

    cases: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)


def operations(server: ParrotServer) -> Iterator[schemathesis.APIOperation]:
    """All operations of the description but the endless one and the pages."""
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path not in ENDLESS and "Dashboard" not in (operation.tags or []):
            yield operation


def attack(operation: schemathesis.APIOperation, mode: GenerationMode, max_examples: int, tally: Tally) -> None:
    """Send up to `max_examples` different cases to one operation; raises the first failure, made small."""

    @seed(0)
    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        response = case.call(timeout=TIMEOUT_S)
        tally.cases[f"{operation.method.upper()} {operation.path}"] += 1
        tally.statuses[response.status_code] += 1
        case.validate_response(response, checks=[check for check in CHECKS if not _is_wanted(check, case, response)])

    send()


def _is_wanted(check: object, case: schemathesis.Case, response: schemathesis.Response) -> bool:
    """A 504 where the case brought a timeout of its own: some take longer than a millisecond."""
    has_timeout = isinstance(case.body, dict) and case.body.get("timeout") is not None
    return check is not_a_server_error and response.status_code == 504 and has_timeout


def run(max_examples: int) -> Tally:
    """Attack every operation with cases that fit the description and cases that do not."""
    tally = Tally()
    with parrot(max_model_len=MAX_MODEL_LEN) as server:
        for operation in operations(server):
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                if mode is GenerationMode.POSITIVE or operation.body:  # any text is a fine part of a path
                    attack(operation, mode, max_examples, tally)
        assert server.get("/health")[0] == 200
        assert server.complete("abc")[1]["choices"][0]["text"] == "abc"
        assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0
    return tally


def main() -> None:
    """Print the tally."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=150, help="cases a path and mode, at most")
    tally = run(parser.parse_args().examples)
    for name, num in sorted(tally.cases.items()):
        print(f"{num:6,}  {name}")
    by_status = ", ".join(f"{num:,} × {status}" for status, num in sorted(tally.statuses.items()))
    print(f"{tally.cases.total():6,}  cases, no failure; statuses: {by_status}")


if __name__ == "__main__":
    main()
