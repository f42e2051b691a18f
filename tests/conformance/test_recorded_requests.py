"""What real clients sent, sent again: each body gets the status that the client got, and no other field is needed."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from tests.conformance.clients import CLIENTS, ROOT, ClientKind
from tests.conformance.environments import pinned
from tests.conformance.record import REQUESTS as FOLDER
from tests.conformance.record import recorded
from tests.server.parrot import MODEL, ParrotServer, parrot, parse_events
from tools.environment import lock_file

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
REQUESTS = [
    pytest.param(request, id=f"{name}-{i}") for name in NAMES for i, request in enumerate(recorded(name)["requests"])
]


@pytest.fixture(scope="module")
def server() -> Iterator[ParrotServer]:
    with parrot(max_model_len=8192, num_blocks=1024) as running:
        yield running


def for_the_parrot(body: Any) -> Any:
    """The body with the parrot's model and token ids, for its vocabulary is that of bytes."""
    body = dict(body)
    if body.get("model") == "smollm2":
        body["model"] = MODEL
    if isinstance(prompt := body.get("prompt"), list):
        body["prompt"] = [
            [token % 256 for token in each] if isinstance(each, list) else each % 256 if isinstance(each, int) else each
            for each in prompt
        ]
    return body


def test_every_client_of_the_suite_is_recorded() -> None:
    assert {*NAMES} == {*CLIENTS, "vllm-bench-serve"}
    assert all(recorded(name)["requests"] for name in NAMES)


@pytest.mark.parametrize("kind", CLIENTS.values(), ids=CLIENTS)
def test_the_version_that_is_recorded_is_the_one_that_is_installed_and_written_about(kind: ClientKind) -> None:
    version = pinned(kind.distribution, kind.lock) if kind.lock else kind.package.partition("==")[2]
    assert recorded(kind.name)["client"] == f"{kind.distribution} {version}"
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert f"| {kind.distribution} {version}" in page.replace("_", "-")


def test_the_lock_of_the_clients_is_that_of_their_group_and_leaves_out_what_is_large() -> None:
    lock = lock_file("clients").read_text(encoding="utf-8")
    group = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["clients"]
    for each in group:
        name, _, version = each.partition("==")
        assert pinned(name.partition("[")[0], "clients") == version
    assert {kind.distribution for kind in CLIENTS.values() if kind.lock == "clients"} < {
        each.partition("==")[0].partition("[")[0] for each in group
    }
    assert re.findall(r"^(?:torch|triton|nvidia-\S+|tensorflow|jax)==", lock, re.MULTILINE) == []


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_recorded_request_is_answered_as_it_was(server: ParrotServer, request_: dict[str, Any]) -> None:
    body = for_the_parrot(request_["body"])
    status, _, answer = server.request("POST", request_["path"], body)
    assert status == request_["status"], answer
    if status != 200:
        assert json.loads(answer)["error"]["message"]
    elif body.get("stream"):
        events = parse_events(answer)
        assert events[-1] == "[DONE]"
        assert [event for event in events[:-1] if "error" in event] == []
    else:
        assert json.loads(answer)["choices"]
