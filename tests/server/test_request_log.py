"""One line a request, with the right numbers, and not too many of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until
from tests.server.test_lifecycle import Stream

from everystop.observe.causes import Cause
from everystop.observe.history import Answer, Client, History
from everystop.observe.thread_share import ThreadShare
from everystop.server.request_log import COST_SHARE, MAX_REFUSALS, MAX_SAVED_NS, SUMMARY_NS, Refusal, RequestLog
from everystop.tenants import Tenants

MS, S = 1_000_000, 1_000_000_000


class Lines(list[tuple[str, dict[str, Any]]]):
    """What was written."""

    def write(self, message: str, fields: Mapping[str, Any]) -> None:
        self.append((message, dict(fields)))

    def called(self, message: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self if name == message]

    def wait_for(self, message: str, num: int = 1) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.called(message)) >= num)
        return self.called(message)


def test_a_request_is_told_with_its_names_tokens_times_and_cause() -> None:
    lines = Lines()
    with parrot(log_request=lines.write, tenants=Tenants(user=True)) as server:
        server.runner.step_s = 0.01
        body = {"prompt": "a secret " * 4, "max_tokens": 20, "ignore_eos": True, "user": "ann", "stream": True}
        headers = {"x-request-id": "job-7", "authorization": "Bearer sk-secret"}
        status, _, answer = server.request("POST", "/v1/completions", body, headers)
        assert status == 200
        [line] = lines.wait_for("request")
        server.request("POST", "/v1/completions", body, headers)
        again = lines.wait_for("request", 2)[1]
    name = json.loads(answer.split(b"\n")[0].removeprefix(b"data: "))["id"]
    shown = {"id": name, "client_id": "job-7", "tenant": "ann", "status": 200, "finish": "length"}
    assert {key: line[key] for key in shown} == shown
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (36, 0, 20)
    assert again["cached_tokens"] == 32
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["e2e_ms"]
    assert line["cause"] in set(Cause)
    assert "secret" not in json.dumps(list(lines))


def test_choices_are_one_request_and_reasons_are_joined() -> None:
    lines = Lines()
    with parrot(log_request=lines.write) as server:
        assert server.complete(["ab", "abcdef"], n=2, max_tokens=3)[0] == 200
        [line] = lines.wait_for("request")
    assert (line["prompt_tokens"], line["output_tokens"], line["finish"]) == (8, 2 * 3 + 2 * 3, "length+stop")


def test_a_client_that_leaves_is_told_as_aborted() -> None:
    lines = Lines()
    with parrot(log_request=lines.write) as server:
        server.runner.step_s = 0.005
        with server.held(stream=True) as connection:
            connection.getresponse().readline()
        [line] = lines.wait_for("request")
    assert (line["status"], line["finish"]) == (200, "abort")
    assert line["output_tokens"] >= 1


def test_failures_and_refusals_of_the_engine_carry_their_code() -> None:
    lines = Lines()
    with parrot(log_request=lines.write) as server:
        assert server.complete("a" * 2000)[0] == 400
        server.runner.spoil = lambda request_id, at: "non-finite logits" if at == 2 else None
        assert server.complete("abcd")[0] == 500
        assert server.events("/v1/completions", {"prompt": "abcd"})[-2]["error"]
        told = lines.wait_for("request", 2)
    assert [line["code"] for line in lines.called("refused")] == ["context_length_exceeded"]
    assert [(line["status"], line["code"], line["finish"]) for line in told] == [
        (500, "generation_failed", "error"),
        (200, "generation_failed", "error"),
    ]


def test_refusals_at_the_edge_are_told_with_what_was_asked() -> None:
    lines = Lines()
    with parrot(log_request=lines.write, api_keys=("k",)) as server:
        own = {"authorization": "Bearer k"}
        assert server.get("/v1/models")[0] == 401
        assert server.get("/nothing?q=secret", own)[0] == 404
        assert server.request("POST", "/v1/completions", b"{", own)[0] == 400
        assert server.request("POST", "/v1/completions", {"prompt": "a", "model": "x"}, own)[0] == 404
        assert server.get("/v1/models", {"x-request-id": "a b"})[0] == 400
        told = lines.wait_for("refused", 5)
    assert [(line["path"], line["status"], line["code"]) for line in told] == [
        ("/v1/models", 401, "invalid_api_key"),
        ("/nothing", 404, "not_found"),
        ("/v1/completions", 400, told[2]["code"]),
        ("/v1/completions", 404, "model_not_found"),
        ("/v1/models", 400, "invalid_request_id"),
    ]
    assert "secret" not in json.dumps(list(lines))


def test_health_that_is_polled_while_loading_fills_no_log() -> None:
    lines = Lines()
    with parrot(log_request=lines.write, hold_loading=True) as server:
        wait_until(lambda: server.get("/health/ready")[0] == 503)
        assert server.complete("a")[0] == 503
        [line] = lines.wait_for("refused")
        assert line["code"] == "loading"


def test_refusals_of_a_long_loading_are_told_on() -> None:
    lines = Lines()
    with parrot(log_request=lines.write, hold_loading=True) as server:

        def refuse_one() -> bool:
            assert server.complete("a")[0] == 503
            return len(lines.called("refused")) > MAX_REFUSALS

        wait_until(refuse_one)


def test_an_unforeseen_error_is_told_as_500(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines()
    with parrot(log_request=lines.write) as server:

        def explode(*args: object, **options: object) -> None:
            raise ValueError("secret")

        monkeypatch.setattr(server.service.state.board, "open", explode)
        assert server.complete("a")[0] == 500
        [line] = lines.wait_for("refused")
        assert (line["status"], line["code"]) == (500, "server_error")


def test_a_client_that_leaves_inside_its_body_is_told_once() -> None:
    lines = Lines()
    with parrot(log_request=lines.write) as server:
        connection = server.connect()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-length", "1000")
        connection.endheaders(b'{"prompt": "')
        wait_until(lambda: server.service.state.num_open == 1)
        connection.close()
        [line] = lines.wait_for("refused")
        assert (line["status"], line["code"]) == (499, "client_gone")


def test_with_nothing_remembered_the_line_has_what_the_answer_knows() -> None:
    lines = Lines()
    with parrot(log_request=lines.write, explain_history=0) as server:
        assert server.complete("abcd", max_tokens=3)[0] == 200
        [line] = lines.wait_for("request")
    assert (line["prompt_tokens"], line["output_tokens"], line["finish"]) == (4, 3, "length")
    assert line["cause_estimated"] is True


def test_a_drain_tells_of_its_last_requests() -> None:
    lines = Lines()
    with parrot(log_request=lines.write) as server:
        server.runner.step_s = 0.005
        stream = Stream(server, ignore_eos=True, max_tokens=30)
        assert stream.started.wait(60)
        server.stop()
        server.join()
        assert [line["output_tokens"] for line in lines.called("request")] == [30]


# ---------------------------------------------------------------- without a server


def make_log(lines: Lines) -> RequestLog:
    return RequestLog(History(), lines.write)


def answered(i: int, **fields: Any) -> Client:
    client = Client(f"cmpl-{i}", "", i, 1, 0, 1 * MS, first_sent_ns=5 * MS, delivered_ns=20 * MS)
    client.answer = Answer(**({"status": 200, "num_output_tokens": 4, "finish_reason": "stop"} | fields))
    return client


def test_of_a_flood_of_refusals_some_are_told_and_all_are_counted() -> None:
    lines = Lines()
    log = make_log(lines)
    began_ns = time.monotonic_ns()
    log.tick(began_ns)
    for i in range(1000):
        log.refused(Refusal("POST", "/v1/completions", "", 429, "tenant_queue_full" if i % 10 == 9 else "queue_full"))
    assert len(lines) == MAX_REFUSALS
    log.tick(began_ns + SUMMARY_NS // 2)
    assert len(lines) == MAX_REFUSALS
    log.tick(began_ns + 2 * SUMMARY_NS)
    [summary] = lines.called("refused, not listed")
    assert summary["requests"] == 1000 - MAX_REFUSALS
    assert summary["kinds"] == "891 x 429 queue_full, 99 x 429 tenant_queue_full"
    log.refused(Refusal("POST", "/v1/completions", "", 429, "queue_full"))
    assert len(lines) == MAX_REFUSALS + 2, "after a while single ones are told again"


def test_requests_that_were_computed_are_all_told() -> None:
    lines = Lines()
    log = make_log(lines)
    for i in range(500):
        log.note(answered(i))
    log.tick(time.monotonic_ns())
    assert len(lines.called("request")) == 500


def test_clients_that_left_before_the_first_token_count_as_a_flood() -> None:
    lines = Lines()
    log = make_log(lines)
    for i in range(500):
        log.note(answered(i, status=0, num_output_tokens=0, finish_reason="abort"))
    log.tick(time.monotonic_ns(), is_last=True)
    assert len(lines.called("request")) == MAX_REFUSALS
    assert lines.called("refused, not listed")[0]["requests"] == 500 - MAX_REFUSALS


@pytest.mark.parametrize(
    ("first_ms", "fields", "cause"),
    [
        (5, {"is_streamed": True}, "decode"),
        (17, {"is_streamed": True}, "first_token"),
        (19, {}, "running"),
        (19, {"num_output_tokens": 0}, "queue"),
    ],
)
def test_without_steps_the_longest_stretch_is_the_estimated_cause(
    first_ms: int, fields: dict[str, Any], cause: str
) -> None:
    lines = Lines()
    client = answered(1, **fields)
    client.first_sent_ns = first_ms * MS
    log = make_log(lines)
    log.note(client)
    log.tick(time.monotonic_ns())
    [line] = lines.called("request")
    assert (line["cause"], line["cause_estimated"]) == (cause, True)


def test_causes_cost_no_more_than_their_share() -> None:
    """Each look costs 30 ms of a clock that gives 5 ms a second: two at the start, then one in six seconds."""
    lines, clock = Lines(), {"ns": 0}

    def cpu_ns() -> int:
        clock["ns"] += 15 * MS
        return clock["ns"]

    log = RequestLog(History(), lines.write, ThreadShare(COST_SHARE, MAX_SAVED_NS, cpu_ns))
    looked = []
    log._exact_cause = lambda client, life, now_ns: looked.append(client) or "decode"  # type: ignore[method-assign]
    began_ns = time.monotonic_ns()
    for seconds, expected in ((0, 4), (1, 0), (60, 4)):
        looked.clear()
        for i in range(10):
            log.note(answered(i))
        log.tick(began_ns + seconds * S)
        assert len(looked) == expected, seconds


def test_two_threads_of_noise_lose_no_line(server: ParrotServer) -> None:
    lines = Lines()
    with parrot(log_request=lines.write) as own:
        threads = [
            threading.Thread(target=lambda: [own.complete("ab") for _ in range(20)], daemon=True) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(lines.wait_for("request", 80)) == 80
        assert len({line["id"] for line in lines.called("request")}) == 80
