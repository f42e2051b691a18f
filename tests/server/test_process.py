"""What operators do to a running server: signals, a dying or stalled engine, full disks, readers who stop reading."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.server.parrot import wait_until
from tests.server.parrot_process import ROOT, ParrotProcess
from tests.server.test_lifecycle import Stream

from everystop.sim.record import Record


def test_drain_refuses_new_requests_and_finishes_those_that_run_and_wait() -> None:
    with ParrotProcess(max_num_seqs=3, shutdown_timeout=600, step_s=0.05) as server:
        streams = [Stream(server, ignore_eos=True, max_tokens=80) for _ in range(6)]
        server.waits_for(3, 3)
        server.signal(signal.SIGUSR2)  # nobody ends before the newcomer has its answer
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health/ready") == (503, b'{"status":"draining"}'))
        assert server.get("/health/live") == (200, b'{"status":"draining"}')
        connection = server.connect()
        connection.request("POST", "/v1/completions", b'{"prompt": "a"}')
        answer = connection.getresponse()
        assert (answer.status, int(answer.headers["retry-after"]) > 0) == (503, True)
        connection.close()
        server.signal(signal.SIGUSR2)
        for stream in streams:
            events = stream.events()
            assert len(events) == 80 + 2
            assert events[-1] == "[DONE]"
        assert server.join() == 0
        assert any("draining; open requests: 6" in line for line in server.log)


def test_a_second_signal_ends_what_runs_and_what_waits_with_an_error_each() -> None:
    with ParrotProcess(max_num_seqs=3, shutdown_timeout=600) as server:
        streams = [Stream(server, ignore_eos=True) for _ in range(6)]
        server.waits_for(3, 3)
        wait_until(lambda: sum(stream.started.is_set() for stream in streams) == 3)
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health/ready")[0] == 503)
        server.signal(signal.SIGTERM)
        assert server.join() == 0
        for stream in streams:
            stream.join(60)
        for stream in streams:
            if stream.status == 200:
                assert stream.events()[-2]["error"]["code"] == "draining"
            else:
                assert (stream.status, json.loads(stream.body)["error"]["code"]) == (503, "draining")
        assert sorted(stream.status for stream in streams) == [200] * 3 + [503] * 3


def test_a_dead_engine_ends_the_process_with_1_after_everybody_was_told(tmp_path: Path) -> None:
    with ParrotProcess(on_engine_failure="exit", crash_dir=str(tmp_path), shutdown_timeout=600) as server:
        stream = Stream(server, ignore_eos=True)
        assert stream.started.wait(60)
        server.signal(signal.SIGUSR1)
        assert stream.events()[-2]["error"]["code"] == "engine_failed"
        assert server.join() == 1, "a supervisor waits for this"
        [file] = tmp_path.iterdir()
        head = json.loads(file.read_text().splitlines()[0])
        assert head["reason"] == "engine_failed"
        assert any(str(file) in line for line in server.log)
        assert any("on fire" in line for line in server.log)


def test_a_dead_engine_is_told_for_ever_where_the_process_stays() -> None:
    with ParrotProcess() as server:
        stream = Stream(server, ignore_eos=True)
        assert stream.started.wait(60)
        server.signal(signal.SIGUSR1)
        stream.join(60)
        for path in ("/health", "/health/ready", "/health/live"):
            assert server.get(path) == (503, b'{"status":"failed"}')
        assert server.complete("a")[0] == 503
        server.signal(signal.SIGTERM)
        assert server.join() == 1


def test_an_engine_that_dies_while_draining_ends_the_process_with_1() -> None:
    with ParrotProcess() as server:
        stream = Stream(server, ignore_eos=True)
        assert stream.started.wait(60)
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health/ready")[0] == 503)
        server.signal(signal.SIGUSR1)
        assert stream.events()[-2]["error"]["code"] == "engine_failed"
        assert server.join() == 1


def test_a_stopped_process_goes_on_where_it_was() -> None:
    """SIGSTOP is what a snapshot, a debugger or a starved host does: no stall, since nobody could get on."""
    with ParrotProcess(stall_timeout=1.0) as server:
        stream = Stream(server, ignore_eos=True, max_tokens=300)
        assert stream.started.wait(60)
        server.signal(signal.SIGSTOP)
        time.sleep(2.5)
        server.signal(signal.SIGCONT)
        assert len(stream.events()) == 300 + 2
        assert server.complete("abc")[1]["choices"][0]["text"] == "abc"
        assert server.get("/health/live") == (200, b'{"status":"ok"}')
        assert not [line for line in server.log if "no step" in line or "event loop" in line]


def test_a_full_disk_ends_the_record_and_nothing_else(tmp_path: Path) -> None:
    record = tmp_path / "run.gz"
    with ParrotProcess(record=str(record), max_file_bytes=3000, step_s=0) as server:
        for _ in range(60):
            assert server.complete("x" * 100, ignore_eos=True, max_tokens=100)[0] == 200
        wait_until(lambda: any("the record" in line for line in server.log))
        assert server.complete("ab")[1]["choices"][0]["text"] == "ab"
        assert server.get("/health/live")[0] == 200
        server.signal(signal.SIGTERM)
        assert server.join() == 0
        assert len([line for line in server.log if "ends here, the run goes on: File too large" in line]) == 1
        assert not [line for line in server.log if "Traceback" in line]
    read = Record.read(record)
    assert read.is_truncated
    assert len(read.calls) > 100


def test_a_full_disk_under_the_log_costs_lines_only(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with ParrotProcess(stderr=full) as server:
            for _ in range(20):
                assert server.complete("ab")[0] == 200
            server.signal(signal.SIGTERM)
            assert server.join() == 0
    finally:
        os.close(full)


def test_a_reader_of_the_log_who_stops_reading_stops_nobody() -> None:
    """The pipe holds 4 KiB: a dozen of the lines that come."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    try:
        with ParrotProcess(stderr=writing, step_s=0) as server:
            for _ in range(100):
                assert server.complete("a")[0] == 200
            assert server.get("/health/live")[0] == 200
            server.signal(signal.SIGTERM)
            assert server.join() == 0
    finally:
        os.close(writing)
        os.close(reading)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_every_line_of_the_log_has_one_format(log_format: str) -> None:
    with ParrotProcess(log_format=log_format) as server:
        assert server.complete("a secret prompt", user="a\nb")[0] == 200
        assert server.complete(7)[0] == 400  # type: ignore[arg-type]
        stream = Stream(server, ignore_eos=True, prompt="another secret")
        assert stream.started.wait(60)
        server.signal(signal.SIGUSR1)
        stream.join(60)
        server.signal(signal.SIGTERM)
        server.join()
    assert not [line for line in server.log if "secret" in line]
    if log_format == "json":
        lines = [json.loads(line) for line in server.log]
        assert all({"time", "level", "message"} <= line.keys() for line in lines)
        assert {"request", "refused", "the engine has failed"} <= {line["message"] for line in lines}
        [failed] = [line for line in lines if line["message"] == "the engine has failed"]
        assert failed["error"] == "RuntimeError: the roof is on fire"
        assert any("parrot" in place for place in failed["stack"])
    else:
        heads = [line for line in server.log if not line.startswith("    ")]
        assert all(line[:4].isdecimal() and line[23] == "Z" for line in heads), heads


def test_a_taken_port_is_found_before_the_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = [sys.executable, "-m", "everystop", "serve", "no-such-model", "--port", port]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2
    assert "is taken" in ended.stderr
    assert "no-such-model" not in ended.stderr
