"""Estimates of how long a request would have taken otherwise, from a server that records."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.server.parrot import ParrotServer, parrot, wait_until

from everystop.cli import main
from everystop.core.policy import PolicySettings
from everystop.observe.recorder import Recorder
from everystop.server import estimates

ADMIN, TENANT = {"authorization": "Bearer boss"}, {"authorization": "Bearer ann"}


@contextmanager
def recording(path: Path, **options: Any) -> Iterator[ParrotServer]:
    with parrot(recorder=Recorder(path, "continuous", PolicySettings()), **options) as server:
        yield server


def answered(server: ParrotServer, headers: dict[str, str] | None = None) -> str:
    """The id of the last of a few answers, which took enough steps for a fit."""
    server.runner.step_s = 0.001
    for _ in range(3):
        status, answer = server.post("/v1/completions", {"prompt": "abcdefghijkl", "max_tokens": 12}, headers)
        assert status == 200
    return str(answer["id"])


def address(name: str) -> str:
    return f"/v1/requests/{name}/explain?what_if=true"


def asked(server: ParrotServer, name: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    status, body = server.get(address(name), headers)
    return status, json.loads(body)


def told(answer: tuple[int, Any]) -> tuple[int, str, str]:
    status, body = answer
    return status, body["error"]["code"], body["error"]["message"]


def test_the_answer_is_what_the_command_says_of_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.gz"
    with recording(path) as server:
        name = answered(server)
        status, by_server = asked(server, name)
        assert status == 200, by_server
        url = f"http://127.0.0.1:{server.port}"
        assert main(["explain", name, "--url", url, "--what-if"]) == 0
        by_url = capsys.readouterr().out
        assert json.loads(server.get(f"/v1/requests/{name}/explain")[1])["why_no_what_if"] is None
    assert main(["explain", name, "--record", str(path), "--what-if", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == by_server
    assert main(["explain", name, "--record", str(path), "--what-if"]) == 0
    assert capsys.readouterr().out == by_url
    assert "what if? Estimates" in by_url
    labels = [each["label"] for each in by_server["what_if"]["estimates"]]
    assert [label.removesuffix(" *") for label in labels] == [
        "alone on the server",
        "--policy static (was continuous)",
        "--max-num-batched-tokens 32 (was 64)",
    ]


def test_a_request_of_which_others_still_run_can_be_estimated(tmp_path: Path) -> None:
    with recording(tmp_path / "run.gz") as server, server.held(prompt="abcdefgh" * 5):
        status, answer = asked(server, answered(server))
        assert status == 200, answer


def test_without_a_record_it_says_how_to_have_one() -> None:
    with parrot() as server:
        name = answered(server)
        status, code, message = told(asked(server, name))
        assert (status, code) == (409, "not_recorded")
        assert "start it with --record FILE" in message
        assert json.loads(server.get(f"/v1/requests/{name}/explain")[1])["why_no_what_if"] == message
        status, _ = server.get(f"/v1/requests/{name}/explain?what_if=false")
        assert status == 200


@pytest.mark.parametrize("query", ["what_if=yes", "what_if=", "what_if=true&what_if=true", "whatif=true", "x=1"])
def test_other_parameters_are_refused(query: str) -> None:
    with parrot() as server:
        status, body = server.get(f"/v1/requests/{answered(server)}/explain?{query}")
        assert status == 400
        message = json.loads(body)["error"]["message"]
        assert "what_if must be true or false" in message or "is not served here" in message


def test_with_keys_only_administrators_may_ask(tmp_path: Path) -> None:
    with recording(tmp_path / "run.gz", api_keys=["ann"], admin_keys=["boss"]) as server:
        name = answered(server, TENANT)
        status, code, message = told(asked(server, name, TENANT))
        assert (status, code) == (403, "admin_key_needed")
        assert told(asked(server, "nobody", TENANT))[1] == "admin_key_needed"
        own = json.loads(server.get(f"/v1/requests/{name}/explain", TENANT)[1])
        assert own["why_no_what_if"] == message
        assert asked(server, name, ADMIN)[0] == 200
        assert asked(server, name)[0] == 401


def test_what_is_unknown_unfinished_or_without_an_end_of_its_own_is_refused(tmp_path: Path) -> None:
    with recording(tmp_path / "run.gz") as server:
        assert told(asked(server, "nobody"))[:2] == (404, "request_not_found")
        with server.held({"x-request-id": "held"}):
            status, code, message = told(asked(server, "held"))
            assert (status, code) == (409, "no_estimate")
            assert "is not over" in message
        wait_until(lambda: not server.scheduler.requests)
        status, code, message = told(asked(server, "held"))
        assert (status, code) == (409, "no_estimate")
        assert message.startswith("in the record the request has no end of its own (its client left)")


def test_a_record_that_ended_early_is_told_of() -> None:
    with recording(Path("/dev/full")) as server:
        name = answered(server)
        assert told(asked(server, name))[1] == "not_recorded"


def test_a_full_disk_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with recording(tmp_path / "run.gz") as server:
        name = answered(server)
        recorder = server.service.state.model.recorder
        assert recorder is not None
        monkeypatch.setattr(recorder, "_write", fail)
        assert not recorder.flush(60.0)
        status, code, message = told(asked(server, name))
        assert (status, code) == (409, "not_recorded")
        assert "ended early" in message


class Child:
    """A process that is asked for an estimate and never gives one; it says who it is."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = folder / "child"
        hidden = folder / "child.new"
        script = (
            f"import os, time; file = open({str(hidden)!r}, 'w'); file.write(str(os.getpid())); file.close(); "
            f"os.rename({str(hidden)!r}, {str(self._file)!r}); time.sleep(600)"
        )
        monkeypatch.setattr(estimates, "COMMAND", (sys.executable, "-c", script))

    def wait(self) -> int:
        """Its number, once it runs."""
        wait_until(self._file.exists)
        return int(self._file.read_text())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_is_made_at_a_time_by_a_process_of_the_lowest_priority_that_ends_with_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child(tmp_path, monkeypatch)
    with recording(tmp_path / "run.gz") as server:
        name = answered(server)
        with closing(server.connect()) as connection:
            connection.request("GET", address(name))
            pid = child.wait()
            wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == 19)
            limits = Path(f"/proc/{pid}/limits")
            if limits.exists():
                wait_until(lambda: str(estimates.MAX_BYTES) in limits.read_text())
            status, headers, body = server.request("GET", address(name))
            assert (status, json.loads(body)["error"]["code"]) == (429, "estimate_running")
            assert int(headers["retry-after"]) > 0
            assert server.get("/health")[0] == 200
        wait_until(lambda: not is_alive(pid))
        wait_until(lambda: not is_busy(server))


def is_busy(server: ParrotServer) -> bool:
    return server.request("GET", address("nobody"))[0] == 429


def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(tmp_path, monkeypatch)
    monkeypatch.setattr(estimates, "LIMIT_S", 1.0)
    with recording(tmp_path / "run.gz") as server:
        name = answered(server)
        status, code, message = told(asked(server, name))
        assert (status, code) == (504, "estimate_timeout")
        assert f"everystop explain {name} --record FILE --what-if" in message
        wait_until(lambda: not is_alive(child.wait()))


def test_one_that_is_killed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "COMMAND", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    with recording(tmp_path / "run.gz") as server:
        status, code, message = told(asked(server, answered(server)))
        assert (status, code) == (409, "no_estimate")
        assert "where memory runs out" in message


def test_what_one_that_fails_has_said_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(estimates, "COMMAND", (sys.executable, "-c", "raise SystemExit('no such module')"))
    with recording(tmp_path / "run.gz") as server:
        status, code, message = told(asked(server, answered(server)))
        assert (status, code) == (409, "no_estimate")
        assert "has failed" in message
        assert "no such module" not in message
    assert any("(exit code 1): no such module" in record.getMessage() for record in caplog.records)


def test_a_server_that_drains_waits_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(tmp_path, monkeypatch)
    answers: list[tuple[int, Any]] = []
    with recording(tmp_path / "run.gz") as server:
        name = answered(server)
        with server.held():  # so that it drains
            thread = threading.Thread(target=lambda: answers.append(asked(server, name)))
            thread.start()
            pid = child.wait()
            server.stop()
            thread.join()
        assert not is_alive(pid)
        assert told(answers[0])[:2] == (503, "draining")
