"""Tenants with a limit on what waits: what the edge refuses the policy would refuse, and nothing is rendered for it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.core.harness import Harness, make_scheduler
from tests.server.parrot import parrot, wait_until

from everystop.core.errors import RequestError, TooManyChoices
from everystop.core.policy import PolicySettings, Share, make_policy
from everystop.server import prompts
from everystop.server.errors import Overloaded
from everystop.server.opening import tenant_limits
from everystop.server.queue import QueueAccount, QueueLimits
from everystop.server.tenant_queue import SAID_FULL_NS, TenantLimits, TenantQueues
from everystop.tenants import Tenant, Tenants, read_tenants

S = 10**9
GOLD = TenantLimits(max_queued=2, max_running=1)


def queues(num_places: int = 4, **limits: TenantLimits) -> TenantQueues:
    return TenantQueues(limits or {"gold": GOLD}, num_places)


def fill(tenants: TenantQueues, num_running: int, num_waiting: int) -> None:
    tenants.enter("gold", range(num_running + num_waiting), 0)
    for request_id in range(num_running):
        tenants.board(request_id, 0)


def is_refused(tenants: TenantQueues, tenant: str = "gold", n: int = 1, on_board: int = 1, now_ns: int = 0) -> bool:
    try:
        tenants.check(tenant, n, 1, on_board, now_ns)
    except Overloaded:
        return True
    return False


def test_one_more_than_may_wait_is_refused_with_the_numbers() -> None:
    tenants = queues()
    fill(tenants, 1, 2)
    with pytest.raises(Overloaded) as refusal:
        tenants.check("gold", 1, 1, 1, S)
    assert (refusal.value.code, refusal.value.retry_after_s >= 1) == ("tenant_queue_full", True)
    assert "waiting requests: 2; with one more there would be more than 2 (max_queued)" in str(refusal.value)
    assert not is_refused(tenants, "tin")
    assert tenants.num_refused == {"gold": 1}


@pytest.mark.parametrize(("end", "then_on_board"), [("leave", 1), ("board", 2)])
def test_there_is_room_again_when_one_ends_or_boards(end: str, then_on_board: int) -> None:
    tenants = queues(gold=TenantLimits(max_queued=2))
    fill(tenants, 4, 2)
    assert is_refused(tenants, on_board=4)
    if end == "leave":
        tenants.leave(5)
    else:
        tenants.board(5, S)
    assert not is_refused(tenants, on_board=4)


def test_free_places_count_as_room_but_not_beyond_what_the_tenant_may_run() -> None:
    tenants = queues(4, gold=TenantLimits(max_queued=0, max_running=2))
    fill(tenants, 1, 0)
    assert not is_refused(tenants, n=1, on_board=1)
    assert is_refused(tenants, n=2, on_board=1)
    assert is_refused(tenants, n=1, on_board=4)


def test_more_choices_than_an_idle_server_would_take_are_no_matter_of_waiting() -> None:
    with pytest.raises(TooManyChoices, match="at most 3 choices"):
        queues().check("gold", 4, 1, 0, 0)


def test_what_the_policy_has_said_holds_for_a_moment_or_until_something_changes() -> None:
    """It may know more, such as a rate that is used up."""
    tenants = queues(gold=TenantLimits(max_queued=1))
    fill(tenants, 0, 2)
    tenants.refused(1, 40, 0)
    assert is_refused(tenants, on_board=0, now_ns=SAID_FULL_NS - 1)
    with pytest.raises(Overloaded) as refusal:
        tenants.check("gold", 1, 1, 0, 0)
    assert refusal.value.retry_after_s == 40
    assert not is_refused(tenants, on_board=0, now_ns=SAID_FULL_NS)
    tenants.enter("gold", [7], 0)
    tenants.refused(7, 40, 0)
    tenants.leave(0)
    assert not is_refused(tenants, on_board=0)


def test_preempted_ones_wait_again() -> None:
    tenants = queues()
    fill(tenants, 1, 1)
    tenants.wait_again(0, 0)
    assert is_refused(tenants, n=2, on_board=0)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_refused_here_the_policy_would_refuse(seed: int) -> None:
    """With all events seen; the other way round it need not be."""
    dice = random.Random(seed)
    shares = {
        "gold": Share(max_running=2, max_queued=3),
        "tin": Share(max_queued=1),
        "lead": Share(token_rate=50.0, max_queued=2),
    }
    limits = {name: TenantLimits(share.max_queued or 0, share.max_running) for name, share in shares.items()}
    policy = make_policy("fair", PolicySettings(shares=shares))
    harness = Harness(make_scheduler(policy=policy, num_blocks=40, max_num_seqs=4, max_model_len=96))
    queue = QueueAccount(QueueLimits(1024, 1 << 20, limits), 4)
    num_seen = next_id = num_both = num_early = 0
    for _ in range(400):
        if dice.random() < 0.6:
            tenant, n, length = (
                dice.choice(["gold", "tin", "lead", "other"]),
                dice.choice((1, 1, 2)),
                dice.randrange(1, 40),
            )
            try:
                queue.check_tenant(tenant, n, 1, harness.now_ns)
                is_early = False
            except (Overloaded, RequestError):
                is_early = True
            try:
                harness.add_group(next_id, length, n, max_tokens=dice.randrange(1, 20), seed=1, tenant=tenant)
                assert not is_early, "the policy takes it"
                queue.enter(dict.fromkeys(range(next_id, next_id + n), 1), harness.now_ns, tenant)
            except RequestError:
                num_both += 1
                num_early += is_early
            next_id += n
        harness.turn()
        events = harness.events[num_seen:]
        num_seen = len(harness.events)
        queue.receive(events)
        queue.catch_up()
        queue.leave([request_id for request_id in harness.finished if request_id in queue._held])
    assert num_both > 20
    assert num_early > num_both / 3


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
@pytest.mark.parametrize("size", [1, 3000])
def test_nothing_is_rendered_or_encoded_for_them(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    share = Share(max_running=1, max_queued=2)
    policy = make_policy("fair", PolicySettings(shares={"gold": share}))
    tenants = Tenants(by_name={"gold": Tenant(max_running=1, max_queued=2)}, user=True)
    body: dict[str, Any] = {"user": "gold", "max_tokens": 1}
    text = "abc " * size
    body |= {"prompt": text} if kind == "completions" else {"messages": [{"role": "user", "content": text}]}
    room = {"max_model_len": 32768, "num_blocks": 2048}
    with parrot(tenants=tenants, policy=policy, **room) as server, ThreadPoolExecutor() as pool:
        server.runner.step_s = 0.02
        long = {"prompt": "a", "user": "gold", "max_tokens": 400, "ignore_eos": True}
        running = [pool.submit(server.post, "/v1/completions", long) for _ in range(3)]
        wait_until(lambda: server.scheduler.num_waiting == 2 and server.scheduler.num_running == 1)
        server.let_tick(1)
        with monkeypatch.context() as patch:
            patch.setattr(prompts, "encode", lambda *_: pytest.fail("encoded"))
            status, answer = server.post(f"/v1/{kind}", body)
        assert (status, answer["error"]["code"]) == (429, "tenant_queue_full")
        server.runner.step_s = 0
        assert [future.result()[0] for future in running] == [200] * 3
        assert server.post(f"/v1/{kind}", body)[0] == 200
        assert server.metric("tenant_requests_turned_away_total", 'tenant="gold"') == 1


def test_the_file_says_whose_limits_the_edge_must_know(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text("[tenant.gold]\nmax_queued = 0\nmax_running = 3\n[tenant.tin]\nweight = 2\n")
    assert tenant_limits(read_tenants(str(path))) == {"gold": TenantLimits(0, 3)}
