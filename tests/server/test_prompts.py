"""From a body to what the engine is asked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.server.parrot import ParrotServer

from everystop.core.request import SamplingParams
from everystop.server.prompts import prepare
from everystop.server.protocol import parse_completion


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [({}, 60), ({"min_tokens": 80}, 80), ({"min_tokens": 1014}, 1014), ({"max_tokens": 7}, 7)],
)
def test_recommended_length_holds_where_a_request_does_not_say_otherwise(
    server: ParrotServer, fields: dict[str, Any], num_tokens: int
) -> None:
    """There is room for 1,024 tokens, prompt and answer; `min_tokens` is asked for, the length only recommended."""
    model = server.service.state.model
    model = replace(model, accepted=replace(model.accepted, defaults=SamplingParams(max_tokens=60)))
    body = json.dumps({"prompt": [97] * 10, **fields}).encode()
    assert prepare(model, parse_completion, body).params.max_tokens == num_tokens
