"""`everystop batch`: every request answered once, whatever interrupts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everystop.config import Config
from everystop.core.errors import ConfigError
from everystop.server.batch import run_batch


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
    ],
)
def test_bad_input_is_refused_before_anything_runs_naming_the_line(tmp_path: Path, text: str, says: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    with pytest.raises(ConfigError, match=says):
        run_batch(Config(), source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_that_is_no_batch_answer_is_not_written_to(tmp_path: Path) -> None:
    source = write_requests(tmp_path / "in.jsonl", [{"prompt": "a"}])
    target = tmp_path / "notes.txt"
    target.write_text("dear diary\n")
    with pytest.raises(ConfigError, match="is not an answer of a batch"):
        run_batch(Config(), source, target)
    assert target.read_text() == "dear diary\n"


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
