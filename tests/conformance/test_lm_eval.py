"""lm-eval on the embedded model: what it makes of the answers is what the server says when it is asked by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.clients import CLIENTS, HERE, Site
from tests.conformance.environments import environment
from tests.conformance.record import MODEL, kinds, recorded, sent, write_tokenizer
from tests.conformance.trial import Trial, try_client
from tests.server.test_model import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]
QUESTIONS = [json.loads(line) for line in (HERE / "lm_eval_tasks" / "capitals.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    kind = CLIENTS["lm-eval"]
    environment(kind)  # before the wait for a server
    with ServerProcess() as server:
        yield server


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lm-eval")


@pytest.fixture(scope="module")
def trial(served: ServerProcess, scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    done = try_client(CLIENTS["lm-eval"], environment(CLIENTS["lm-eval"]), Site(served.url, MODEL, tokenizer, scratch))
    assert done.passed, done.report()
    return done


def ask(served: ServerProcess, **fields: Any) -> Any:
    status, _, body = served.request("POST", "/v1/completions", {"temperature": 0, **fields})
    assert status == 200, body
    return json.loads(body)["choices"][0]


def log_likelihood(served: ServerProcess, question: str, choice: str) -> float:
    """The sum over the tokens of the choice, which begins at a token's border."""
    logprobs = ask(served, prompt=question + choice, echo=True, logprobs=1, max_tokens=0)["logprobs"]
    assert len(question) in logprobs["text_offset"]
    pairs = zip(logprobs["text_offset"], logprobs["token_logprobs"], strict=True)
    return sum(logprob for offset, logprob in pairs if offset >= len(question))


def samples(scratch: Path, task: str) -> list[Any]:
    (path,) = scratch.glob(f"*/samples_{task}_[0-9]*.jsonl")
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])


def score(scratch: Path, task: str, metric: str) -> float:
    (path,) = scratch.glob("*/results_*.json")
    return float(json.loads(path.read_text())["results"][task][f"{metric},none"])


def test_it_sends_what_was_recorded(trial: Trial) -> None:
    assert kinds(sent(trial.exchanges)).keys() == kinds(recorded("lm-eval")["requests"]).keys()


@pytest.mark.usefixtures("trial")
def test_texts_that_it_judges_are_those_of_the_server(served: ServerProcess, scratch: Path) -> None:
    for question, sample in zip(QUESTIONS, samples(scratch, "capitals"), strict=True):
        text = ask(served, prompt=question["question"], max_tokens=8, stop=["\n", "."])["text"]
        assert text
        assert sample["resps"] == [[text]]


@pytest.mark.usefixtures("trial")
def test_log_likelihoods_and_accuracy_are_those_of_the_server(served: ServerProcess, scratch: Path) -> None:
    num_right = 0
    for question, sample in zip(QUESTIONS, samples(scratch, "capitals_choice"), strict=True):
        ours = [log_likelihood(served, question["question"], choice) for choice in question["choices"]]
        assert [float(response[0][0]) for response in sample["resps"]] == ours
        num_right += ours.index(max(ours)) == question["label"]
    assert score(scratch, "capitals_choice", "acc") == num_right / len(QUESTIONS)
