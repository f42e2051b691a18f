"""What real clients sent, sent again: each body gets the status that the client got, and no other field is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.clients import CLIENTS
from tests.server.parrot import MODEL, ParrotServer, parrot, parse_events

FILES = sorted((Path(__file__).parent / "requests").glob("*.json"))
REQUESTS = [
    pytest.param(request, id=f"{path.stem}-{i}")
    for path in FILES
    for i, request in enumerate(json.loads(path.read_text(encoding="utf-8"))["requests"])
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
    assert {path.stem for path in FILES} == {*CLIENTS, "vllm-bench-serve"}
    assert all(json.loads(path.read_text(encoding="utf-8"))["requests"] for path in FILES)


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
