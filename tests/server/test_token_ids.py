"""Token ids that the vocabulary does not have: refused before the engine hears of them, wherever ids are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.server.parrot import VOCAB, ParrotServer

from everystop.core.errors import RequestError
from everystop.core.fitting import check_ids

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("bad", [VOCAB, 10**6, 2**62])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (COMPLETIONS, lambda bad: {"prompt": [97, bad]}, "prompt"),
        (COMPLETIONS, lambda bad: {"prompt": [[97], [98, bad]]}, "prompt"),
        (COMPLETIONS, lambda bad: {"prompt": "a", "stop_token_ids": [1, bad]}, "stop_token_ids"),
        (COMPLETIONS, lambda bad: {"prompt": "a", "allowed_token_ids": [bad, 1]}, "allowed_token_ids"),
        (CHAT, lambda bad: {"messages": MESSAGES, "stop_token_ids": [bad]}, "stop_token_ids"),
        (CHAT, lambda bad: {"messages": MESSAGES, "allowed_token_ids": [bad]}, "allowed_token_ids"),
        ("/detokenize", lambda bad: {"tokens": [97, bad]}, "tokens"),
    ],
)
def test_an_id_that_no_token_has_is_named(server: ParrotServer, path: str, body: Any, name: str, bad: int) -> None:
    check_refusal(server, path, body(bad), name, bad)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_so_it_is_in_a_bias(server: ParrotServer, path: str) -> None:
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    check_refusal(server, path, {**prompt, "logit_bias": {"97": 1, "99999": 1}}, "logit_bias", 99999)


def check_refusal(server: ParrotServer, path: str, body: Mapping[str, Any], name: str, bad: int) -> None:
    next_id = server.engine.allocate_ids(0)
    status, answer = server.post(path, body)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "invalid_token_id", name)
    assert answer["error"]["message"] == (
        f"{name} holds the token id {bad}, and the vocabulary has {VOCAB}; ids must be from 0 to {VOCAB - 1}"
    )
    assert server.engine.allocate_ids(0) == next_id, "the engine has heard of it"


def test_ids_at_both_ends_of_the_vocabulary_are_taken() -> None:
    check_ids("prompt", (0, 49_151), 49_152)
    check_ids("prompt", (), 49_152)
    for bad in (-1, 49_152):
        with pytest.raises(RequestError, match=rf"token id {bad}, and the vocabulary has 49,152; .+ from 0 to 49151$"):
            check_ids("prompt", (0, bad), 49_152)
