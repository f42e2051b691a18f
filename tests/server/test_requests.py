"""Requests by their ids: names, times and states, as asked over HTTP."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

import pytest
from tests.server.parrot import ParrotServer, parrot, parse_events, wait_until
from tests.server.test_live import watching

from everystop.core.plan import StepPlan
from everystop.observe.history import Client
from everystop.server.state import ServerState

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MS = 1_000_000


def ask(server: ParrotServer, name: str, what: str = "/explain", **headers: str) -> tuple[int, Any]:
    """Status and JSON of a question about a request."""
    status, body = server.get(f"/v1/requests/{quote(name, safe='')}{what}", headers)
    return status, json.loads(body)


def send(server: ParrotServer, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> tuple[int, str, bytes]:
    """Status, x-request-id ("" for none) and body of an answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, answer_headers, answer = server.request("POST", path, body, named)
    return status, answer_headers.get("x-request-id", ""), answer


def client_of(server: ParrotServer, name: str) -> Client:
    """What is remembered of a request whose answer has come; its end is noted a moment later."""
    client = server.service.state.history.clients[name]
    wait_until(lambda: client.delivered_ns is not None)
    return client


def check_sum(told: dict[str, Any]) -> None:
    """Causes and segments make up all of the time, and next to nothing of it is unexplained."""
    assert sum(cause["ns"] for cause in told["causes"]) == told["e2e_ns"]
    end_ns = 0
    for segment in told["segments"]:
        assert segment["start_ns"] == end_ns
        end_ns = segment["end_ns"]
    assert end_ns == told["e2e_ns"]
    unknown_ns = sum(cause["ns"] for cause in told["causes"] if cause["cause"] == "unattributed")
    assert unknown_ns <= max(2 * MS, told["e2e_ns"] // 100)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_answer_carries_its_id_and_is_found_by_it(server: ParrotServer, path: str, stream: bool) -> None:
    prompt = {"prompt": "abc"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "abc"}]}
    status, name, answer = send(server, {**prompt, "stream": stream}, path)
    assert status == 200
    assert name == (parse_events(answer)[0] if stream else json.loads(answer))["id"]
    status, told = ask(server, name)
    assert (status, told["id"]) == (200, name)
    assert ask(server, name, "")[1]["state"] == "finished"


@pytest.mark.parametrize("stream", [False, True])
def test_times_of_a_request_are_in_order_and_within_what_the_client_saw(server: ParrotServer, stream: bool) -> None:
    before_ns = time.monotonic_ns()
    _, name, _ = send(server, {"prompt": "abcdef", "stream": stream})
    after_ns = time.monotonic_ns()
    client = client_of(server, name)
    wait_until(lambda: server.service.state.history.trails[client.first_request_id].finish is not None)
    trail = server.service.state.history.trails[client.first_request_id]
    assert trail.arrival is not None
    assert trail.finish is not None
    times = [
        before_ns,
        client.received_ns,
        client.submitted_ns,
        trail.arrival.now_ns,
        trail.admits[0].now_ns,
        client.first_sent_ns,
        client.delivered_ns,
    ]
    assert times == sorted(times)
    assert trail.finish.now_ns < client.delivered_ns
    assert client.first_sent_ns is not None
    assert client.first_sent_ns < after_ns  # its end is stamped once written, which may have been read by then
    assert not client.has_left


def test_first_byte_is_that_of_the_first_output() -> None:
    def wait_for_first_byte(plan: StepPlan) -> None:
        if plan.rows and plan.rows[0].start == 8:
            clients = server.service.state.history.clients
            wait_until(lambda: len(clients) == 2)
            streamed = list(clients.values())[1]
            wait_until(lambda: streamed.first_sent_ns is not None)

    with parrot() as server:
        trails = server.service.state.history.trails
        for stream in (False, True):
            client = client_of(server, send(server, {"prompt": "abcdef", "stream": stream})[1])
            assert client.first_sent_ns is not None
            wait_until(lambda i=client.first_request_id: trails[i].finish is not None)  # type: ignore[misc]
            finish = trails[client.first_request_id].finish
            assert finish is not None
            assert (client.first_sent_ns < finish.now_ns) is stream
            server.runner.before_step = wait_for_first_byte  # of the next one, which is streamed


def test_body_that_comes_slowly_is_received_with_its_last_byte(server: ParrotServer) -> None:
    body = json.dumps({"prompt": "abc"}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}X-Request-Id: slow-body\r\n\r\n".encode() + body[:5])
        time.sleep(0.1)
        last_byte_ns = time.monotonic_ns()
        connection.sendall(body[5:])
        while connection.recv(65536):
            pass
    [client] = server.service.state.history.clients_called("slow-body")
    assert client.received_ns >= last_byte_ns


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": ["abc", "defghi"], "n": 2}, {"max_tokens": 1}])
def test_explanation_accounts_for_all_of_the_time(server: ParrotServer, fields: dict[str, Any], stream: bool) -> None:
    _, name, _ = send(server, {"prompt": "abcdefgh", "stream": stream, **fields})
    client = client_of(server, name)
    status, told = ask(server, name)
    assert status == 200
    check_sum(told)
    assert told["e2e_ns"] == (client.delivered_ns or 0) - client.received_ns
    assert told["sentence"]
    assert told["num_choices"] == client.num
    assert len(told["choices"]) == (client.num if client.num > 1 else 0)
    for choice in told["choices"]:
        check_sum(choice)


def test_explanation_of_many_choices_is_of_the_last_ones(server: ParrotServer) -> None:
    """All 60 would take seconds and be too long to read."""
    prompts = ["a" * (1 + i % 7) for i in range(20)]
    _, name, _ = send(server, {"prompt": prompts, "n": 3})
    client = client_of(server, name)
    told = ask(server, name)[1]
    trails = server.service.state.history.trails
    ends = {i: trails[i].finish.now_ns for i in client.request_ids}  # type: ignore[union-attr]
    assert (told["num_choices"], len(told["choices"])) == (60, 8)
    last_ns = min(sorted(ends.values())[-8:])
    assert all(choice["received_ns"] + choice["e2e_ns"] >= last_ns for choice in told["choices"])
    assert told["e2e_ns"] == max(choice["e2e_ns"] for choice in told["choices"])


def test_request_that_runs_or_waits_can_be_asked_about() -> None:
    with parrot(max_num_seqs=1) as server, ExitStack() as stack:
        server.runner.step_s = 0.01
        for i in range(3):
            stack.enter_context(server.held({"x-request-id": f"mine-{i}"}))
        wait_until(lambda: server.scheduler.num_waiting == 2)
        wait_until(lambda: ask(server, "mine-2", "")[1]["waiting"] is not None)
        running, waiting = ask(server, "mine-0", "")[1], ask(server, "mine-2", "")[1]
        assert (running["state"], running["waiting"]) == ("running", None)
        assert waiting["state"] == "waiting"
        assert waiting["x_request_id"] == "mine-2"
        assert (waiting["num_sequences"], waiting["num_waiting_sequences"]) == (1, 1)
        assert (waiting["waiting"]["position"], waiting["waiting"]["num_waiting"]) == (2, 2)
        for name in ("mine-0", "mine-2"):
            told = ask(server, name)[1]
            check_sum(told)
            assert told["is_live"]
        stack.close()
        wait_until(lambda: ask(server, "mine-2", "")[1]["state"] == "aborted")
        told = ask(server, "mine-2")[1]
        check_sum(told)
        assert (told["state"], told["is_live"]) == ("aborted", False)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_ends_its_request_when_the_server_sees_it_go(stream: bool) -> None:
    with parrot() as server:
        server.runner.step_s = 0.005
        with server.held({"x-request-id": "leaver"}, stream=stream):
            [client] = server.service.state.history.clients_called("leaver")
            assert client.delivered_ns is None
            left_ns = time.monotonic_ns()
        wait_until(lambda: client.delivered_ns is not None)
        assert client.has_left
        assert client.delivered_ns is not None
        assert left_ns <= client.delivered_ns <= time.monotonic_ns()
        wait_until(lambda: ask(server, "leaver", "")[1]["state"] == "aborted")
        told = ask(server, "leaver")[1]
        assert told["e2e_ns"] == client.delivered_ns - client.received_ns
        check_sum(told)


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_can_never_fit_is_refused_before_it_is_one(server: ParrotServer, stream: bool) -> None:
    status, name, answer = send(server, {"prompt": "abc", "stream": stream, "max_tokens": 5000})
    assert (status, name) == (400, ""), "there is nothing to ask about: the answer has all the numbers"
    assert "5,000" in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_the_engine_refuses_is_explained_too(server: ParrotServer, stream: bool) -> None:
    fields = {"min_tokens": 2, "max_tokens": 9, "allowed_token_ids": [256]}
    counted = server.service.state.metrics.refused  # type: ignore[union-attr]
    server.get("/metrics")  # for which all is counted that has been before
    num_before = counted.total()
    status, name, answer = send(server, {"prompt": "abc", "stream": stream, **fields})
    assert (status, "error" in json.loads(answer)) == (400, True)
    client = client_of(server, name)
    assert client.first_sent_ns is None
    assert ask(server, name, "")[1]["state"] == "refused"
    status, told = ask(server, name)
    assert (status, told["state"], told["is_live"]) == (200, "refused", False)
    check_sum(told)
    assert server.service.state.history.trails[client.first_request_id].is_over, "else it would be kept for ever"
    wait_until(lambda: counted.total() == num_before + 1)


def test_failed_row_is_explained() -> None:
    with parrot() as server:
        server.runner.spoil = lambda request_id, at: "non-finite logits" if at == 2 else None
        for stream, expected in ((False, 500), (True, 200)):
            status, name, _ = send(server, {"prompt": "abcd", "stream": stream})
            assert status == expected
            client_of(server, name)
            told = ask(server, name)[1]
            assert told["state"] == "failed"
            check_sum(told)


def test_request_before_which_the_engine_died_is_not_live_for_ever() -> None:
    with parrot() as server:

        def fail(plan: object) -> None:
            raise RuntimeError("the roof is on fire")

        server.runner.before_step = fail
        status, name, _ = send(server, {"prompt": "abcd"})
        assert status == 503
        client_of(server, name)
        told = ask(server, name)[1]
        check_sum(told)
        assert (told["state"], told["is_live"]) == ("failed", False)
        assert ask(server, name, "")[1]["state"] == "failed"


def test_given_id_is_echoed_on_every_answer_and_found(server: ParrotServer) -> None:
    own = "job/7?#%"
    status, name, answer = send(server, {"prompt": "a"}, x_request_id=own)
    assert (status, name) == (200, own)
    assert ask(server, own)[1]["id"] == json.loads(answer)["id"]
    assert ask(server, own, "")[1]["x_request_id"] == own
    for method, path, expected in (("GET", "/health", 200), ("GET", "/nothing", 404), ("POST", COMPLETIONS, 400)):
        status, headers, _ = server.request(method, path, headers={"x-request-id": own})
        assert (status, headers["x-request-id"]) == (expected, own)
    assert "x-request-id" not in server.request("GET", "/health")[1]


def test_id_given_twice_means_the_last_request_and_a_number_means_a_sequence(server: ParrotServer) -> None:
    for prompt in ("a", "b"):
        _, _, answer = send(server, {"prompt": prompt, "n": 2}, x_request_id="again")
    last = json.loads(answer)["id"]
    assert ask(server, "again")[1]["id"] == last
    first_id = server.service.state.history.clients[last].first_request_id
    for number in (first_id, first_id + 1):
        assert ask(server, str(number), "")[1]["id"] == last
    send(server, {"prompt": "c"}, x_request_id=str(first_id))
    assert ask(server, str(first_id), "")[1]["id"] != last, "a name that was given goes before a number"


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 129, "größe".encode(), b"a\tb"])
def test_given_id_must_be_short_and_printable(server: ParrotServer, given: bytes) -> None:
    lines = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: " + given + b"\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(lines)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid_request_id" in answer
    assert b"x-request-id:" not in answer.lower()


def test_two_given_ids_are_refused(server: ParrotServer) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: a\r\nX-Request-Id: a\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "name",
    ["chatcmpl-0", "../../etc/passwd", "..", "a/../b", "\x00", "x" * 5000, "ü🙂\u202e", "-1", "1e3", "٣", "9" * 40,
     "9" * 18, "'; drop table", "<script>", "%2e%2e%2f", "explain", "a/explain", "None", "rr0", "r", "r-0", "R0"],
)  # fmt: skip
@pytest.mark.parametrize("what", ["", "/explain"])
def test_ids_that_nobody_has_are_not_found(server: ParrotServer, name: str, what: str) -> None:
    status, body = ask(server, name, what)
    assert status == 404
    assert body["error"]["code"] == "request_not_found"
    assert "--explain-history" in body["error"]["message"]
    assert len(body["error"]["message"]) < 400


def test_only_the_last_requests_are_remembered() -> None:
    with parrot(explain_history=2) as server:
        names = [send(server, {"prompt": "a"})[1] for _ in range(4)]
        for name in names:
            wait_until(lambda one=name: ask(server, one, "")[1].get("state", "finished") == "finished")
        assert [ask(server, name)[0] for name in names] == [404, 404, 200, 200]
        assert "the last 2 that are over" in ask(server, names[0])[1]["error"]["message"]


def test_nothing_that_is_over_is_remembered_if_so_asked() -> None:
    with parrot(explain_history=0) as server:
        server.runner.step_s = 0.005
        _, name, _ = send(server, {"prompt": "a"})
        wait_until(lambda: ask(server, name)[0] == 404)
        assert "none that is over" in ask(server, name)[1]["error"]["message"]
        with server.held({"x-request-id": "live"}), watching(server) as watcher:
            watcher.wait(lambda _: any(one["state"] == "running" for one in watcher.requests().values()))
            assert ask(server, "live", "")[1]["state"] in ("waiting", "running")
            num_before = len(watcher.requests())
            for _ in range(3):
                send(server, {"prompt": "a"})
            watcher.wait(lambda _: len(watcher.requests()) >= num_before + 3)
        wait_until(lambda: not server.service.state.history.trails)


def test_without_a_history_nothing_is_kept() -> None:
    """As in `everystop batch`, where nobody tells the history how requests end."""
    state = ServerState()
    state.came(Client("cmpl-1", "", 0, 1, 0, 0))
    assert not state.history.trails
    assert not state.history.clients


def test_old_clients_of_http_get_explanations(server: ParrotServer) -> None:
    _, name, _ = send(server, {"prompt": "abc"})
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"GET /v1/requests/{name}/explain HTTP/1.0\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"200"
    assert json.loads(body)["id"] == name
