"""`everystop batch`: every request answered once, whatever interrupts it."""

from __future__ import annotations

import gc
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from tests.server.parrot import ParrotRunner, ParrotServer

from everystop.config import Config
from everystop.core.errors import ConfigError
from everystop.core.events import ArrivalEvent
from everystop.engine.engine import Engine
from everystop.observe.history import Client
from everystop.server import batch
from everystop.server.batch import run_batch
from everystop.server.batch_files import open_answers
from everystop.server.board import Board
from everystop.server.state import ServedModel


def write_requests(path: Path, bodies: list[dict[str, Any]], url: str = "/v1/completions") -> Path:
    lines = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_answers(path: Path) -> dict[str, dict[str, Any]]:
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert len(by_id) == len(answers), "a request was answered twice"
    return by_id


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "must be an object"),
        ('{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "is not served"),
        ('{"custom_id": 7, "url": "/v1/completions", "body": {}}', "custom_id 7"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n' * 2, "line 2: custom_id 'a'"),
        ('{"custom_id": "\\ud800", "url": "/v1/completions", "body": {}}', "line 1: custom_id"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"custom_id": "a", "custom_id": "b", "url": "/v1/completions", "body": {}}', "line 1 .* a key twice"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"n": 1, "n": 2}}', "line 1 .* a key twice"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}, "bdy": 1}', "line 1 has 'bdy', which is unknown"),
    ],
)
def test_bad_input_is_refused_before_anything_runs_naming_the_line(tmp_path: Path, text: str, says: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(ConfigError, match=says):
        run_batch(Config(), source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "text",
    [
        "dear diary\n",
        "dear diary",
        '{"custom_id": "a"}\n',
        '{"custom_id": "a", "url": "/v1/completions", "body": {}}\n',
        '{"custom_id": "a", "response": {"status_code": 200}}\ndear diary',
    ],
)
def test_a_file_that_is_no_batch_answer_is_not_touched(tmp_path: Path, text: str) -> None:
    source = write_requests(tmp_path / "in.jsonl", [{"prompt": "a"}])
    target = tmp_path / "notes.txt"
    target.write_text(text)
    with pytest.raises(ConfigError, match="is not an answer of a batch"):
        run_batch(Config(), source, target)
    assert target.read_text() == text


def test_requests_are_not_taken_for_answers(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", [{"prompt": "a"}])
    source.write_text(source.read_text().rstrip())
    before = source.read_text()
    (tmp_path / "link").symlink_to(source)
    for target in (source, tmp_path / "link"):
        with pytest.raises(ConfigError, match="holds the requests"):
            run_batch(Config(), source, target)
    assert source.read_text() == before


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", [{"prompt": "a"}])
    os.mkfifo(tmp_path / "pipe")
    for one, other in ((tmp_path / "pipe", tmp_path / "out"), (source, tmp_path / "pipe"), (source, tmp_path)):
        with pytest.raises(ConfigError, match="is no file"):
            run_batch(Config(), one, other)


class ParrotOpening:
    """Opens the parrot in the place of a model."""

    max_num_queued_reqs = 4096
    runner: ParrotRunner

    def __init__(self, config: Config) -> None:
        pass

    def load(self) -> ServedModel:
        server = ParrotServer(max_num_queued_reqs=self.max_num_queued_reqs)
        server._sock.close()
        type(self).runner = server.runner
        return server._load()


@pytest.fixture
def parrot_model(monkeypatch: pytest.MonkeyPatch) -> type[ParrotOpening]:
    monkeypatch.setattr(batch, "Opening", ParrotOpening)
    return ParrotOpening


def test_a_torn_answer_is_given_again(tmp_path: Path, parrot_model: type[ParrotOpening]) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", [{"prompt": f"p{i}"} for i in range(3)]), tmp_path / "out"
    assert run_batch(Config(), source, target) == 0
    whole = target.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for size in (last + 1, last + 14, last + 30, len(whole) - 1):
        target.write_bytes(whole[:size])
        assert run_batch(Config(), source, target) == 0
        assert len(read_answers(target)) == 3


def test_a_file_of_windows_is_read(tmp_path: Path, parrot_model: type[ParrotOpening]) -> None:
    source = write_requests(tmp_path / "in.jsonl", [{"prompt": "a"}])
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes().replace(b"\n", b"\r\n"))
    assert run_batch(Config(), source, tmp_path / "out") == 0
    assert len(read_answers(tmp_path / "out")) == 1


def test_more_choices_than_the_queue_holds_wait_for_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parrot_model: type[ParrotOpening]
) -> None:
    monkeypatch.setattr(parrot_model, "max_num_queued_reqs", 24)  # beside 16 places
    source = write_requests(tmp_path / "in.jsonl", [{"prompt": f"p{i}", "n": 30} for i in range(5)])
    assert run_batch(Config(), source, tmp_path / "out") == 0
    answers = read_answers(tmp_path / "out")
    assert [answer["response"]["status_code"] for answer in answers.values()] == [200] * 5


def test_two_runs_at_once_do_not_answer_twice(tmp_path: Path, parrot_model: type[ParrotOpening]) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out"
    with open_answers(target, source), pytest.raises(ConfigError, match="another run is writing"):
        run_batch(Config(), source, target)
    assert run_batch(Config(), source, target) == 0


def test_a_full_disk_is_one_sentence(tmp_path: Path, parrot_model: type[ParrotOpening]) -> None:
    source = write_requests(tmp_path / "in.jsonl", [{"prompt": "abc" * 30}] * 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ConfigError, match="name a file that can be written"):
            run_batch(Config(), source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run_batch(Config(), source, tmp_path / "out") == 0
    assert len(read_answers(tmp_path / "out")) == 5


def test_a_request_that_fails_for_its_own_reasons_is_answered_by_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parrot_model: type[ParrotOpening]
) -> None:
    """Tried again it would fail again, so no run would ever end with 0."""
    endless = {"prompt": "ef", "timeout": 0.001, "ignore_eos": True}
    source, target = (
        write_requests(tmp_path / "in.jsonl", [{"prompt": "ab"}, {"prompt": "cd"}, endless]),
        tmp_path / "o",
    )
    original = ParrotRunner.__init__

    def spoiled(runner: ParrotRunner) -> None:
        original(runner)
        runner.spoil = lambda request_id, position: "logits_not_finite" if request_id == 0 else None

    monkeypatch.setattr(ParrotRunner, "__init__", spoiled)
    assert run_batch(Config(), source, target) == 0
    answers = read_answers(target)
    assert {name: answer["response"]["status_code"] for name, answer in answers.items()} == {
        "r0": 500,
        "r1": 200,
        "r2": 504,
    }
    assert answers["r0"]["error"]["code"] == "generation_failed"
    assert answers["r1"]["error"] is None
    assert answers["r2"]["error"]["code"] == "request_timeout"


def test_a_request_that_met_a_fault_of_ours_is_tried_again_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parrot_model: type[ParrotOpening]
) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", [{"prompt": "ab"}, {"prompt": "cd"}]), tmp_path / "out"

    original = Board.open

    def fail_once(board: Board, prompts: Any, *arguments: Any, **options: Any) -> Any:
        if tuple(prompts[0]) == tuple(b"ab"):
            raise ZeroDivisionError
        return original(board, prompts, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Board, "open", fail_once)
        assert run_batch(Config(), source, target) == 1
    assert list(read_answers(target)) == ["r1"]
    assert run_batch(Config(), source, target) == 0
    assert sorted(read_answers(target)) == ["r0", "r1"]


def num_remembered() -> int:
    gc.collect()
    return sum(type(each) in (Client, ArrivalEvent) for each in gc.get_objects())


def test_nothing_is_kept_of_requests_that_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parrot_model: type[ParrotOpening]
) -> None:
    """A file may have millions of lines; nobody reads metrics of a batch, so nothing would ever leave them."""
    source = write_requests(tmp_path / "in.jsonl", [{"prompt": "ab", "n": 2}] * 5)
    original, counts = Engine.stop, [num_remembered()]

    def stop(engine: Engine, *arguments: Any) -> None:
        counts.append(num_remembered())
        original(engine, *arguments)

    monkeypatch.setattr(Engine, "stop", stop)
    assert run_batch(Config(), source, tmp_path / "out") == 0
    before, after = counts
    assert after <= before


@pytest.mark.model
def test_requests_are_answered_once_and_a_torn_run_goes_on(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": f"Number {i} is", "max_tokens": 3 + i, "temperature": 0, "ignore_eos": True} for i in range(6)
    ]
    bodies.append({"prompt": "x", "max_tokens": -1})
    bodies.append({"prompt": "x", "stream": True})
    source, target = write_requests(tmp_path / "in.jsonl", bodies), tmp_path / "out.jsonl"
    assert run_batch(Config(), source, target) == 0
    answers = read_answers(target)
    assert sorted(answers) == sorted(f"r{i}" for i in range(len(bodies)))
    for i in range(6):
        assert answers[f"r{i}"]["response"]["status_code"] == 200
        assert answers[f"r{i}"]["response"]["body"]["usage"]["completion_tokens"] == 3 + i
    assert answers["r6"]["response"]["status_code"] == 400
    assert "max_tokens" in answers["r6"]["error"]["message"]
    assert answers["r7"]["error"]["param"] == "stream"

    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(lines[:4]) + lines[4][:20])  # killed inside the fifth line
    assert run_batch(Config(), source, target) == 0
    assert {k: v["response"]["body"].get("choices") for k, v in read_answers(target).items()} == {
        k: v["response"]["body"].get("choices") for k, v in answers.items()
    }
