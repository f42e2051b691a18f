"""One line for each slow request, and not many of them."""

from __future__ import annotations

import json
import re
import time

from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.observe.history import Client, History
from everystop.observe.thread_share import ThreadShare
from everystop.server.slow_log import COST_SHARE, MAX_LINES, MAX_SAVED_NS, SlowLog

MS = 1_000_000


def slow_lines(server: ParrotServer) -> list[str]:
    return [line for line in server.says if line.startswith("slow request")]


def test_slow_requests_are_explained_in_a_line_each() -> None:
    with parrot(slow_log=100, stats_interval=0) as server:
        server.runner.step_s = 0.03
        body = {"prompt": "a secret\nprompt"}
        status, _, answer = server.request(
            "POST", "/v1/completions", body, {"x-request-id": "job-7", "authorization": "Bearer sk-1"}
        )
        assert status == 200
        wait_until(lambda: bool(slow_lines(server)))
        [line] = slow_lines(server)
        assert re.match(rf"slow request {json.loads(answer)['id']} \(job-7\), \d+\.\d\d s: ", line) is not None
        assert not [word for word in ("secret", "sk-1", "\n") if word in line]
        assert len(line.partition(" s: ")[2]) > 10


def test_slow_request_whose_client_left_is_said_too_and_the_last_before_the_end() -> None:
    with parrot(slow_log=50, stats_interval=0) as server:
        server.runner.step_s = 0.01
        with server.held():
            time.sleep(0.1)
        wait_until(lambda: server.service.state.num_open == 0)
        server.stop()
        server.join()
        assert len(slow_lines(server)) == 1


def noted(log: SlowLog, num: int) -> None:
    """That many requests, of 1 ms, 2 ms, and so on, in a mixed order, are over."""
    for i in range(num):
        log.note(Client(f"cmpl-{i}", "", i, 1, 0, 0, delivered_ns=(i * 7 % num + 1) * MS))


def test_of_many_slow_requests_the_slowest_are_explained() -> None:
    says: list[str] = []
    log = SlowLog(History(), 10.0, says.append)
    noted(log, 50)
    log.tick(0)
    assert len(says) == MAX_LINES + 1
    assert [line.split(", ")[1][:4] for line in says[:-1]] == ["0.05"] * MAX_LINES
    assert [int(line.split("-")[1].split(",")[0]) * 7 % 50 for line in says[:-1]] == [49, 48, 47, 46, 45]
    assert says[-1] == "slow requests beside these: 35, each above 10 ms"
    assert all("raise --explain-history" in line for line in says[:-1])
    log.tick(0)
    assert len(says) == MAX_LINES + 1


def test_explanations_that_cost_too_much_are_left_out() -> None:
    """60 ms each: 100 ms are saved up in the beginning, 10 ms a second come in."""
    says: list[str] = []
    cpu_ns = 0

    def say(line: str) -> None:
        nonlocal cpu_ns
        says.append(line)
        cpu_ns += 60 * MS * line.startswith("slow request cmpl")

    log = SlowLog(History(), 0.0, say, ThreadShare(COST_SHARE, MAX_SAVED_NS, lambda: cpu_ns))
    for seconds, num_lines in ((0, 2), (1, 0), (4, 1), (60, 2), (61, 0)):
        says.clear()
        noted(log, 5)
        log.tick(seconds * 1000 * MS)
        assert len(says) == num_lines + 1, seconds
        assert says[-1] == f"slow requests beside these: {5 - num_lines}, each above 0 ms"
