"""Nobody learns from a quick first token what another tenant has asked: each has a prefix cache of its own (AC-20)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.server.parrot import ParrotServer, parrot

from everystop.core.request import Request, SamplingParams, extend_block_keys
from everystop.server.visibility import ANYBODY, Caller, salt_of
from everystop.tenants import Tenant, Tenants

PROMPT = "a prompt of more than three blocks of sixteen tokens, secret."
WHOLE = len(PROMPT) // 16 * 16
TENANTS = Tenants(by_name={"gold": Tenant(keys=("g1", "g2")), "tin": Tenant(keys=("t1",))}, header="x-tenant")


@pytest.fixture
def keyed() -> Iterator[ParrotServer]:
    with parrot(api_keys=("a", "b"), admin_keys=("root",), tenants=TENANTS) as server:
        yield server


def cached(
    server: ParrotServer, key: str | None = None, tenant: str = "", prompt: str = PROMPT, **fields: object
) -> int:
    """Tokens of the prompt that came from the prefix cache."""
    headers = ({"x-api-key": key} if key else {}) | ({"x-tenant": tenant} if tenant else {})
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    status, answer = server.post("/v1/completions", body, headers)
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_finds_its_own_prompts_and_nobody_elses(keyed: ParrotServer) -> None:
    for key in ("g1", "t1", "a", "b", "root"):
        assert cached(keyed, key) == 0, key
    for key in ("g1", "g2", "t1", "a", "b", "root"):
        assert cached(keyed, key) == WHOLE, key


def test_no_field_or_header_of_a_request_leads_to_anothers_cache(keyed: ParrotServer) -> None:
    cached(keyed, "g1")
    cached(keyed, "a")
    for salt in ("", "gold", "tenant:gold", "a", salt_of(Caller("gold", "tenant:gold", False), "gold", "")):
        assert cached(keyed, "t1", "gold", cache_salt=salt) == 0, salt
    assert cached(keyed, "b", "gold") == 0, "a name that is believed is still another owner's"


def test_a_gateway_with_one_key_keeps_its_tenants_apart(keyed: ParrotServer) -> None:
    assert cached(keyed, "a", "tin") == 0
    assert cached(keyed, "a", "lead") == 0
    assert cached(keyed, "a", "lead") == WHOLE
    assert cached(keyed, "t1") == 0


def test_salts_of_a_client_hold_within_its_tenant(keyed: ParrotServer) -> None:
    assert cached(keyed, "g1", cache_salt="x") == 0
    assert cached(keyed, "g2", cache_salt="x") == WHOLE
    assert cached(keyed, "g1", cache_salt="y") == 0
    assert cached(keyed, "g1") == 0
    assert cached(keyed, "t1", cache_salt="x") == 0


def test_without_keys_the_cache_is_everybodys_but_for_salts(server: ParrotServer) -> None:
    prompt = PROMPT[::-1]
    assert cached(server, prompt=prompt) == 0
    assert cached(server, prompt=prompt) == WHOLE
    assert cached(server, "any", prompt=prompt) == WHOLE, "no keys are set, so this one says nothing"
    assert cached(server, prompt=prompt, cache_salt="s") == 0
    assert cached(server, prompt=prompt, cache_salt="s") == WHOLE


def test_parts_of_a_salt_do_not_run_together() -> None:
    parts = [
        ("a", "b", "c"),
        ("ab", "", "c"),
        ("a", "bc", ""),
        ("a", "", "bc"),
        ("", "ab", "c"),
        ("a", "b;", "c"),
        ("a;1:b", "", "c"),
    ]
    salts = [salt_of(Caller("", owner, False), tenant, salt) for owner, tenant, salt in parts]
    assert len(set(salts)) == len(parts)
    assert salt_of(ANYBODY, "gold", "s") == "s"


def test_adapter_and_salt_of_one_name_differ() -> None:
    """AC-19, on the keys of blocks themselves."""
    keys = []
    for salt, adapter in (("X", ""), ("", "X"), ("X", "X"), ("", ""), ("X;adapter:0:", ""), ("", ";adapter:1:X")):
        request = Request(0, range(64), SamplingParams(), cache_salt=salt, adapter=adapter)
        extend_block_keys(request, 16)
        keys.append(tuple(request.block_keys))
    assert len(set(keys)) == len(keys)
    assert all(not set(one) & set(other) for one, other in pairwise(keys))
