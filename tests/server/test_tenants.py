"""Whose request it is, and how urgent: what reaches the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot

from everystop.engine.messages import Submit
from everystop.tenants import Tenant, Tenants

COMPLETIONS = "/v1/completions"
GOLD = Tenants(by_name={"gold": Tenant(keys=("k1", "k2")), "tin": Tenant()}, header="x-tenant", user=True)


@contextmanager
def submitted(**options: Any) -> Iterator[tuple[ParrotServer, list[Submit]]]:
    """A server and what its engine is given."""
    seen: list[Submit] = []
    with parrot(**options) as server:
        submit = server.engine.submit
        server.engine.submit = lambda message: (seen.append(message), submit(message))[1]  # type: ignore[method-assign]
        yield server, seen


def post(server: ParrotServer, key: str | None = None, tenant: str | None = None, **fields: Any) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    headers |= {"x-tenant": tenant} if tenant else {}
    status, _ = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, **fields}, headers=headers)
    return int(status)


def test_key_names_the_tenant_whatever_else_is_said() -> None:
    with submitted(tenants=GOLD, api_keys=("plain",)) as (server, seen):
        assert post(server, "k2", "tin", user="tin") == 200
        assert post(server, "plain", "tin", user="lead") == 200
        assert post(server, "plain", user="lead") == 200
        assert post(server, "plain") == 200
        assert post(server, "k3", "gold") == 401
        assert post(server, None, "gold") == 401
    assert [message.tenant for message in seen] == ["gold", "tin", "lead", ""]


def test_nobody_is_believed_unless_the_file_says_so() -> None:
    with submitted(tenants=Tenants(by_name={"gold": Tenant(keys=("k1",))})) as (server, seen):
        assert post(server, "k1", "tin", user="tin") == 200
    with submitted() as (server, more):
        assert post(server, None, "tin", user="tin") == 200
        assert post(server, user=7) == 200, "without effect, so it may be anything"
    assert [message.tenant for message in seen + more] == ["gold", "", ""]


@pytest.mark.parametrize("fields", [{"user": 7}, {"user": "x" * 257}, {"tenant": "x" * 257}])
def test_name_of_a_tenant_is_a_short_text(fields: dict[str, Any]) -> None:
    with submitted(tenants=GOLD) as (server, seen):
        assert post(server, "k1", **fields) == 400
    assert not seen


def test_priority_reaches_the_engine_under_its_policy_only() -> None:
    with submitted(has_priorities=True) as (server, seen):
        assert post(server, priority=-3) == 200
        assert post(server) == 200
        assert post(server, priority=1001) == post(server, priority=1.5) == 400
    assert [message.priority for message in seen] == [-3, 0]
    with submitted() as (server, seen):
        assert post(server, priority=0) == 200
        status, body = server.post(COMPLETIONS, {"prompt": "a", "priority": 5})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_field", "priority")
    assert "--policy priority" in body["error"]["message"]
    assert [message.priority for message in seen] == [0]


def test_targets_reach_the_engine_under_their_policy_only() -> None:
    with submitted(has_targets=True) as (server, seen):
        assert post(server, ttft_target_ms=250, itl_target_ms=12.5) == 200
        assert post(server, ttft_target_ms=1) == 200
        assert post(server, itl_target_ms=None) == 200
        assert post(server, ttft_target_ms=0) == post(server, itl_target_ms="9") == 400
        assert post(server, ttft_target_ms=3_600_001) == 400
    targets = [(message.ttft_target_ns, message.itl_target_ns) for message in seen]
    assert targets == [(250_000_000, 12_500_000), (1_000_000, None), (None, None)]
    with submitted() as (server, seen):
        for name in ("ttft_target_ms", "itl_target_ms"):
            status, body = server.post(COMPLETIONS, {"prompt": "a", name: 50})
            assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_field", name)
            assert "--policy deadline" in body["error"]["message"]
    assert not seen
