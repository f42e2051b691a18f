"""The load generator counts what was on the wire, and says what was missing from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from benchmarks.loadgen import main
from tests.interrupts import interruptible
from tests.trial.fake_server import (
    HEAD,
    LAST_CHUNK,
    ending,
    event,
    fake_server,
    in_chunks,
    text_event,
    whole_answer,
)

from everystop.observe.distribution import distribution_ms, percentile
from everystop.sim.workloads import Job, Workload
from everystop.trial.http_client import ClientRecord, EventSplitter, Target
from everystop.trial.http_load import Load, LoadError, LoadRun, run_load, summarize
from everystop.trial.interrupts import ended_in_order

STREAM = b": a comment\n\ndata: one\n\ndata:two\r\n\r\nid: 7\ndata: three\ndata: lines\n\ndata: \xe2\x80\xa8\n\n"


def make_workload(num_jobs: int = 3, num_clients: int = 1, max_tokens: int = 4) -> Workload:
    jobs = (Job(prompt=tuple(range(100 + i, 110 + i)), max_tokens=max_tokens) for i in range(num_jobs))
    return Workload("made", num_clients, tuple(jobs))


def run(answer: Any, workload: Workload | None = None, **target: Any) -> LoadRun:
    with fake_server(answer) as server:
        return run_load(workload or make_workload(), Target(url=server.url, **target))


def answer_of(body: bytes) -> bytes:
    return HEAD + in_chunks(body, 1 << 20) + LAST_CHUNK


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_events_are_the_same_wherever_the_pieces_break(size: int) -> None:
    splitter = EventSplitter()
    pieces = (STREAM[i : i + size] for i in range(0, len(STREAM), size))
    events = [data for piece in pieces for data in splitter.feed(piece)]
    assert events == [b"one", b"two", b"three\nlines", "\u2028".encode()]


@pytest.mark.parametrize("chunk_size", [1, 3, 64, 1 << 20])
def test_tokens_events_and_usage_are_counted_across_chunk_borders(chunk_size: int) -> None:
    done = run(lambda request: whole_answer(request, chunk_size))
    figures = done.summary()
    assert (figures["requests"], figures["errors"], figures["exact_usage"], figures["without_usage"]) == (3, 0, 3, 0)
    assert (figures["prompt_tokens"], figures["output_tokens"], figures["events"]) == (30, 12, 12)
    assert figures["events_per_token"] == 1.0
    assert [record.text for record in done.records] == [" 100" * 4, " 101" * 4, " 102" * 4]
    for record in done.records:
        assert record.finish_reason == "length"
        assert 0 <= record.sent_s <= record.event_s[0] <= record.event_s[-1] <= record.end_s


def test_characters_cut_in_the_middle_arrive_whole() -> None:
    body = event('{"choices": [{"index": 0, "text": "é日本🚌"}]}') + ending(10, 4)
    done = run(lambda request: HEAD + in_chunks(body, 1) + LAST_CHUNK)
    assert {record.text for record in done.records} == {"é日本🚌"}
    assert done.summary()["events_per_token"] == 0.25


def test_digests_compare_answers_and_nothing_else() -> None:
    one = run(lambda request: whole_answer(request, 1), make_workload(num_clients=3))
    other = run(whole_answer, make_workload(num_clients=1))
    changed = run(lambda request: whole_answer(request | {"prompt": [request["prompt"][0] // 2] * 10}))
    assert one.digest == other.digest
    assert one.digest != changed.digest


def test_the_request_asks_for_what_the_job_says() -> None:
    with fake_server(whole_answer) as server:
        target = Target(url=server.url, model="m", seed=3, extra={"top_k": 5})
        run_load(make_workload(num_jobs=1), target)
    assert server.requests == [
        {
            "model": "m",
            "prompt": list(range(100, 110)),
            "max_tokens": 4,
            "temperature": 0.0,
            "seed": 3,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "top_k": 5,
        }
    ]


@pytest.mark.parametrize("num_clients", [1, 3, 8])
def test_each_client_has_one_request_at_a_time(num_clients: int) -> None:
    with fake_server(whole_answer, wait_for=num_clients) as server:
        done = run_load(make_workload(16, num_clients), Target(url=server.url))
    assert done.summary()["errors"] == 0
    assert server.most_open == num_clients
    assert server.num_connections == num_clients
    assert len(server.requests) == 16


def test_clients_without_a_request_to_send_do_not_connect() -> None:
    with fake_server(whole_answer) as server:
        done = run_load(make_workload(2, 50_000), Target(url=server.url))
    assert done.summary()["errors"] == 0
    assert server.num_connections == 2


def test_the_first_requests_are_sent_in_the_order_of_jobs() -> None:
    done = run(whole_answer, make_workload(8, 8))
    sent = [record.sent_s for record in done.records]
    assert sent == sorted(sent)


def test_the_first_requests_reach_the_server_in_the_order_of_jobs() -> None:
    workload = make_workload(64, 64)
    with orderly_server() as (url, order):
        done = run_load(workload, Target(url=url, max_run_s=60.0))
    assert done.summary()["errors"] == 64
    assert order == [job.prompt[0] for job in workload.jobs]


@contextlib.contextmanager
def orderly_server(num: int = 64) -> Iterator[tuple[str, list[int]]]:
    """Notes the first token of each prompt in the order in which so many requests come, then lets go of all clients."""
    order: list[int] = []
    with socket.create_server(("127.0.0.1", 0), backlog=num) as listener, select.epoll() as poll:

        def serve() -> None:
            clients = [listener.accept()[0] for _ in range(num)]
            by_number = {client.fileno(): client for client in clients}
            for number in by_number:
                poll.register(number, select.EPOLLIN | select.EPOLLET)
            while len(order) < num:
                for number, _ in poll.poll(60.0):  # in the order in which they became readable
                    body = by_number[number].recv(1 << 16).partition(b"\r\n\r\n")[2]
                    order.append(json.loads(body)["prompt"][0])
            listener.close()  # nobody comes again
            for client in clients:
                client.close()

        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield url, order
        finally:
            thread.join()


def test_timed_jobs_are_sent_at_their_time_beside_the_closed_loop() -> None:
    timed = Job(prompt=(1, 2), max_tokens=1, group="timed", at_s=0.05)
    workload = Workload("mixed", 1, (*make_workload(2).jobs, timed))
    done = run(whole_answer, workload)
    assert done.groups == ["all", "timed"]
    assert done.summary("timed")["exact_usage"] == 1
    assert done.records[2].sent_s >= 0.049  # the event loop counts in whole milliseconds
    assert done.summary("all")["requests"] == 2


def test_a_refusal_is_an_error_with_the_servers_words_and_the_next_job_goes_on() -> None:
    body = b'{"error": {"message": "too long"}}'
    refusal = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    done = run(lambda request: refusal if request["prompt"][0] == 101 else whole_answer(request))
    assert [record.status for record in done.records] == [200, 400, 200]
    assert done.records[1].error is not None
    assert "too long" in done.records[1].error
    figures = done.summary()
    assert (figures["errors"], figures["output_tokens"]) == (1, 8)


def test_an_error_event_is_an_error_although_the_stream_ends_well() -> None:
    body = text_event("a") + event({"error": {"message": "engine failed"}}) + event("[DONE]")
    done = run(lambda request: answer_of(body))
    assert all("engine failed" in (record.error or "") for record in done.records)


def test_a_stream_without_its_end_mark_is_an_error() -> None:
    done = run(lambda request: answer_of(text_event("a")))
    assert {record.error for record in done.records} == {"the stream ended without [DONE]"}


def test_a_lost_connection_is_an_error_and_the_client_connects_again() -> None:
    def answer(request: dict[str, Any]) -> bytes | None:
        return None if request["prompt"][0] == 100 else whole_answer(request)

    with fake_server(answer) as server:
        done = run_load(make_workload(), Target(url=server.url))
    assert "connection lost" in (done.records[0].error or "")
    assert [record.error for record in done.records[1:]] == [None, None]
    assert server.num_connections == 2


def test_a_server_that_closes_after_each_answer_is_served_by_new_connections() -> None:
    def answer(request: dict[str, Any]) -> bytes:
        return whole_answer(request).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)

    done = run(answer)
    assert done.summary()["errors"] == 0


def test_an_answer_that_is_no_json_is_an_error() -> None:
    done = run(lambda request: answer_of(b"data: {]\n\n"), make_workload(num_jobs=1))
    assert "unreadable" in (done.records[0].error or "")


def test_a_missing_usage_is_counted_apart_and_is_not_exact() -> None:
    done = run(lambda request: answer_of(text_event("a") * 4 + event("[DONE]")))
    figures = done.summary()
    assert (figures["errors"], figures["without_usage"], figures["exact_usage"]) == (0, 3, 0)
    assert figures["events"] == 12
    assert math.isnan(figures["events_per_token"])


def test_a_usage_that_disagrees_with_the_job_is_not_exact() -> None:
    done = run(lambda request: answer_of(text_event("a") * 3 + ending(10, 3)))
    figures = done.summary()
    assert (figures["without_usage"], figures["exact_usage"], figures["output_tokens"]) == (0, 0, 9)


def test_a_silent_server_ends_the_request_after_the_timeout() -> None:
    done = run(lambda request: HEAD, make_workload(num_jobs=1), timeout_s=0.1)
    assert done.records[0].error == "no end after 0.1 s"


def test_the_run_ends_after_its_own_limit() -> None:
    done = run(lambda request: HEAD, max_run_s=0.1)
    assert "not ended when the run was" in (done.records[0].error or "")
    assert done.summary()["errors"] == 3


def test_what_a_planned_end_cuts_off_is_no_error_and_counts_in_no_figure() -> None:
    late = Job(prompt=(7,), max_tokens=1, at_s=60.0)
    workload = Workload("made", 1, (*make_workload(2).jobs, late))

    def answer(request: dict[str, Any]) -> bytes:
        is_first = request["prompt"][0] == 100
        return whole_answer(request) if is_first else HEAD + in_chunks(text_event("a") * 2, 1 << 20)

    done = run(answer, workload, stop_s=4.0)  # long after the first ends and the second begins
    assert [(record.job, record.is_cut, record.error) for record in done.records] == [(0, False, None), (1, True, None)]
    assert len(done.records[1].event_s) == 2
    figures = done.summary()
    assert (figures["requests"], figures["errors"], figures["cut"], figures["output_tokens"]) == (2, 0, 1, 4)
    assert figures["e2e_ms"]["max"] == pytest.approx(1e3 * (done.records[0].end_s - done.records[0].sent_s))


def test_a_request_that_was_never_sent_makes_the_run_no_longer() -> None:
    whole = ClientRecord(0, "", 1, 1, sent_s=2.0, end_s=5.0)
    unsent = ClientRecord(1, "", 1, 1, error="no connection")
    cut = ClientRecord(2, "", 1, 1, sent_s=3.0, is_cut=True)
    assert summarize([whole, unsent, cut])["wall_s"] == 3.0
    assert summarize([unsent])["wall_s"] == summarize([cut])["wall_s"] == summarize([])["wall_s"] == 0.0


def test_a_run_that_ends_before_its_planned_end_is_whole() -> None:
    done = run(whole_answer, stop_s=30.0)
    assert (done.summary()["errors"], done.summary()["cut"]) == (0, 0)
    assert len(done.records) == 3


def test_the_header_names_the_tenant_of_a_job_that_has_one() -> None:
    target = Target(url="http://127.0.0.1:1", tenant_header="x-tenant")
    named = target.request(Job(prompt=(1,), max_tokens=1, tenant="gold"))
    nobody = target.request(Job(prompt=(1,), max_tokens=1))
    assert b"\r\nx-tenant: gold\r\n" in named.partition(b"\r\n\r\n")[0]
    assert b"x-tenant" not in nobody
    assert named.partition(b"\r\n\r\n")[2] == nobody.partition(b"\r\n\r\n")[2]
    assert b"gold" not in Target(url="http://127.0.0.1:1").request(Job(prompt=(1,), max_tokens=1, tenant="gold"))


def test_a_request_is_named_by_the_index_of_its_job_where_there_is_a_prefix() -> None:
    job = Job(prompt=(1,), max_tokens=1)
    head = Target(url="http://127.0.0.1:1", id_prefix="run-3-").request(job, 7).partition(b"\r\n\r\n")[0]
    assert b"\r\nx-request-id: run-3-7\r\n" in head
    assert b"x-request-id" not in Target(url="http://127.0.0.1:1").request(job, 7)


def test_a_servers_path_prefix_stands_before_the_route() -> None:
    head = Target(url="http://127.0.0.1:1/proxy/v1").request(Job(prompt=(1,), max_tokens=1))
    assert head.startswith(b"POST /proxy/v1/completions HTTP/1.1\r\nHost: 127.0.0.1:1\r\n")


def test_a_run_says_when_it_began() -> None:
    before_ns = time.monotonic_ns()
    done = run(whole_answer)
    assert before_ns <= done.start_ns <= time.monotonic_ns()


def test_a_server_that_is_gone_in_the_middle_is_one_sentence() -> None:
    with orderly_server(1) as (url, _), pytest.raises(LoadError, match="takes no more connections"):
        run_load(make_workload(2, 1), Target(url=url))


def test_the_command_refuses_tenants_that_no_header_would_name(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("\n".join(Workload("two", 1, (Job(prompt=(1,), max_tokens=1, tenant="gold"),)).lines()))
    with pytest.raises(SystemExit, match="--tenant-header"):
        main(["--workload", str(path)])


def test_percentiles_interpolate_and_nothing_has_none() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([4.0, 1.0, 3.0, 2.0], 100) == 4.0
    assert percentile([10.0], 99) == 10.0
    assert math.isnan(percentile([], 50))
    assert distribution_ms([0.001, 0.003])["mean"] == pytest.approx(2.0)
    assert math.isnan(distribution_ms([])["max"])


def test_another_machine_is_not_loaded_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--workload", "chat", "--url", "http://192.0.2.1:8000"])
    assert exit_info.value.code == 2
    assert "--allow-remote" in capsys.readouterr().err


def test_no_server_is_one_sentence() -> None:
    with socket.socket() as taken:  # and nobody listens there
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(LoadError, match="no server at"):
            run_load(make_workload(), Target(url=f"http://127.0.0.1:{taken.getsockname()[1]}"))


def test_the_command_prints_and_writes_and_fails_where_a_request_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "w.jsonl", tmp_path / "out.json"
    path.write_text("\n".join(make_workload().lines()))
    with fake_server(whole_answer) as server:
        assert main(["--url", server.url, "--workload", str(path), "--out", str(out), "--limit", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 requests, 0 errors, 2 with exact usage" in printed
    written = json.loads(out.read_text())
    assert written["figures"]["all"]["output_tokens"] == 8
    assert [record["job"] for record in written["records"]] == [0, 1]
    assert written["records"][0]["usage"]["completion_tokens"] == 4
    assert written["answers"] in printed
    with fake_server(lambda request: answer_of(text_event("a"))) as server:
        assert main(["--url", server.url, "--workload", str(path)]) == 1


class PressingLoop(uvloop.Loop):  # type: ignore[misc]
    """Is interrupted when everything is over but its own end."""

    def close(self) -> None:
        signal.raise_signal(signal.SIGINT)
        super().close()
        signal.raise_signal(signal.SIGINT)


async def go_on(load: Load) -> LoadRun:
    signal.raise_signal(signal.SIGINT)
    await asyncio.sleep(300)
    raise AssertionError("the load went on")


async def end(load: Load) -> LoadRun:
    signal.raise_signal(signal.SIGINT)
    return load._run


async def end_undisturbed(load: Load) -> LoadRun:
    return load._run


@pytest.mark.parametrize(("play", "loop"), [(go_on, uvloop.Loop), (end, uvloop.Loop), (end_undisturbed, PressingLoop)])
def test_ctrl_c_ends_a_load_without_a_traceback_of_the_event_loop(
    play: Any, loop: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its midst, in the turn in which it ends, and while its loop is put away."""
    monkeypatch.setattr(Load, "run", play)
    monkeypatch.setattr("everystop.trial.http_load.uvloop.new_event_loop", loop)
    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            run_load(make_workload(), Target(url="http://127.0.0.1:1"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capfd.readouterr().err == ""


def test_a_signal_that_ends_processes_ends_a_load_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def answer(request: dict[str, Any]) -> bytes:
        os.kill(os.getpid(), signal.SIGTERM)
        return HEAD  # and never an end

    with ended_in_order():
        handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit, match="143"):
            run(answer, timeout_s=30.0)
        assert signal.getsignal(signal.SIGTERM) is handler
    assert capfd.readouterr().err == ""
