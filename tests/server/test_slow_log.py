"""One line for each slow request, and not many of them."""

from __future__ import annotations

import json
import time

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.config import Config
from everystop.core.errors import ConfigError
from everystop.observe.history import Client, History
from everystop.server.slow_log import MAX_LINES, SlowLog

MS = 1_000_000


def slow_lines(server: ParrotServer) -> list[str]:
    return [line for line in server.says if line.startswith("slow request")]


def test_slow_requests_are_explained_in_a_line_each() -> None:
    with parrot(slow_log_ms=100, stats_interval_s=0) as server:
        assert server.complete("fast")[0] == 200
        server.runner.step_s = 0.03
        body = {"prompt": "a secret\nprompt"}
        status, _, answer = server.request(
            "POST", "/v1/completions", body, {"x-request-id": "job-7", "authorization": "Bearer sk-1"}
        )
        assert status == 200
        wait_until(lambda: bool(slow_lines(server)))
        [line] = slow_lines(server)
        assert line.startswith(f"slow request {json.loads(answer)['id']} (job-7), 0.")
        assert not [word for word in ("secret", "sk-1", "\n") if word in line]
        assert len(line.partition(" s: ")[2]) > 10


def test_slow_request_whose_client_left_is_said_too_and_the_last_before_the_end() -> None:
    with parrot(slow_log_ms=50, stats_interval_s=0) as server:
        server.runner.step_s = 0.01
        with server.held():
            time.sleep(0.1)
        wait_until(lambda: server.service.state.num_open == 0)
        server.stop()
        server.join()
        assert len(slow_lines(server)) == 1


def test_many_slow_requests_cost_few_explanations(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    says: list[str] = []
    log = SlowLog(history, 10.0, says.append)
    for i in range(50):
        log.note(Client(f"cmpl-{i}", "", i, 1, 0, 0, delivered_ns=(i * 7 % 50 + 1) * MS))
    log.tick()
    assert len(says) == MAX_LINES + 1
    assert sorted(line.split(", ")[1][:4] for line in says[:-1]) == ["0.05"] * MAX_LINES
    assert says[-1] == "slow requests beside these: 35, each above 10 ms"
    assert all("raise --explain-history" in line for line in says[:-1])
    log.tick()
    assert len(says) == MAX_LINES + 1


def test_slow_log_needs_a_history() -> None:
    with pytest.raises(ConfigError, match="--explain-history"):
        Config(slow_log=5.0, explain_history=0)
