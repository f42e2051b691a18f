"""Whose request it is, and how urgent: what reaches the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.core.policy import PolicySettings, Share, make_policy
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


@pytest.mark.parametrize("stream", [False, True])
def test_full_queue_of_a_tenant_is_429_with_the_numbers_and_when_to_come_back(stream: bool) -> None:
    policy = make_policy("fair", PolicySettings(shares={"gold": Share(max_running=1, max_queued=2)}))
    with parrot(tenants=GOLD, policy=policy) as server, ThreadPoolExecutor() as pool:
        server.runner.step_s = 0.02
        running = [pool.submit(post, server, "k1", max_tokens=400, ignore_eos=True) for _ in range(3)]
        wait_until(lambda: server.scheduler.num_waiting == 2 and server.scheduler.num_running == 1)
        body = {"prompt": "a", "max_tokens": 1, "stream": stream}
        status, headers, answer = server.request("POST", COMPLETIONS, body, {"authorization": "Bearer k2"})
        status_of_four = post(server, "k1", n=4)
        server.runner.step_s = 0
        error = json.loads(answer)["error"]
        assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "tenant_queue_full")
        assert 1 <= int(headers["retry-after"]) <= 600
        assert "waiting requests: 2;" in error["message"]
        assert "2 (max_queued)" in error["message"]
        assert status_of_four == 400, "no waiting makes room for so many"
        assert [future.result() for future in running] == [200] * 3
        assert post(server, "k2") == 200, "there is room again"
        key = {"authorization": "Bearer k1"}
        assert server.metric("tenant_requests_refused_total", 'tenant="gold"', key) == 1 + 4
        assert server.metric("requests_refused_total", 'error="TenantQueueFull"', key) == 1
        assert server.metric("tenant_generation_tokens_total", 'tenant="gold"', key) == 3 * 400 + 1
        assert server.metric("tenant_num_requests_waiting", headers=key) == 0


def test_refused_choices_leave_nothing_behind() -> None:
    policy = make_policy("fair", PolicySettings(shares={"gold": Share(max_running=1, max_queued=2)}))
    with parrot(tenants=GOLD, policy=policy) as server:
        assert post(server, "k1", n=4) == 400
        assert post(server, "k1", n=3) == 200
        wait_until(lambda: not server.scheduler.requests)
        assert server.num_free_blocks == server.num_blocks


def test_tenant_over_its_rate_is_served_when_it_has_paid_though_nothing_else_happens() -> None:
    """The engine sleeps meanwhile, and must wake by itself: 106 weighted tokens at 100 a second, 100 of them saved."""
    policy = make_policy("fair", PolicySettings(shares={"gold": Share(token_rate=100)}))
    with parrot(tenants=GOLD, policy=policy) as server:
        assert [post(server, "k1", prompt="x" * 104), post(server, "k1")] == [200, 200]
