"""`everystop bench steps`: what it asks of `serve`, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from everystop.cli import main
from everystop.trial import own_server, steps
from everystop.trial.steps import Cpu, StepCost


class NoServer:
    """Notes the options that a server would get."""

    options: Sequence[str] = ()

    def __init__(self, options: Sequence[str]) -> None:
        NoServer.options = options

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


async def no_measurement(server: NoServer, num_rows: int, *, num_steps: int, context: int) -> StepCost:
    cpu = Cpu(native_ms=1.5, event_loop_ms=0.25, others_ms=0.25, clients_ms=0.5)
    return StepCost(
        num_rows=num_rows,
        num_steps=num_steps,
        first_context=context,
        engine_ms={"native": 0.75, "other": 0.25},
        event_loop_ms={"write": 0.5},
        cpu=cpu,
    )


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "OwnServer", NoServer)
    monkeypatch.setattr(steps, "measure", no_measurement)


def test_a_table_a_number_of_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    words = ["bench", "steps", "--rows", "1,100", "--steps", "9", "--context", "7", "--json", str(file)]
    assert main([*words, "--", "model.gguf", "--dtype", "float32"]) == 0
    assert list(NoServer.options) == [
        "--max-num-seqs", "100", "--max-num-batched-tokens", "256", "model.gguf", "--dtype", "float32",
    ]  # fmt: skip
    text = capsys.readouterr().out
    assert "1 rows: 9 steps of 1.000 ms, contexts from about 7 to 16 tokens, 1,000 tokens a second" in text
    assert "100 rows: 9 steps" in text
    assert [cost["num_rows"] for cost in json.loads(file.read_text())] == [1, 100]


@pytest.mark.parametrize("words", [["--rows", "0"], ["--rows", "1,x"], ["--steps", "0"], ["--context", "0"]])
def test_numbers_that_are_none_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "steps", *words]) == 2
    assert words[0] in capsys.readouterr().err
