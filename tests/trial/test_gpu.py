"""`everystop bench gpu`, tried out on the CPU with a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everystop.cli import main
from everystop.trial.gpu.clock import Budget
from everystop.trial.gpu.models import SPECS, step_flops
from everystop.trial.gpu.serving import chat_jobs

ROOT = Path(__file__).parents[2]
BARE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "everystop._native" or (path is None and name in ABSENT):
            raise ModuleNotFoundError(f"{name} is not there")

import importlib.metadata
ABSENT = set(importlib.metadata.packages_distributions()) & {
    "fastapi", "gguf", "h11", "httptools", "llguidance", "matplotlib", "msgspec", "prometheus_client", "pydantic",
    "starlette", "uvicorn", "uvloop",
}
assert len(ABSENT) > 5
sys.meta_path.insert(0, Absent())
from everystop.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""The command line where there is no native module and no server, as on a machine that is lent for minutes."""


def test_all_parts_run_on_the_cpu_with_nothing_but_pytorch(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ["bench", "gpu", "--device", "torch", "--minutes", "5", "--json", str(file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", BARE, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(file.read_text())
    text = done.stdout
    assert results["notes"] == [], done.stderr
    assert results["correctness"]["bfloat16_agreement"] > 0.9
    assert results["correctness"]["float32_error"] == 0.0
    assert results["correctness"]["replayed_as_eager"]
    assert results["correctness"]["invariant"]
    for name in ("tiny: decode, 4 rows", "tiny: prefill", "tiny: chat, 6 requests, static"):
        assert f"| {name} |" in text
        assert all(value is not None for value in results[name].values())


@pytest.mark.parametrize(("words", "said"), [(["--minutes", "0"], "--minutes"), ([], "--device cuda")])
def test_what_cannot_be_measured_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """This machine has no GPU."""
    assert main(["bench", "gpu", *words]) == 2
    assert said in capsys.readouterr().err


def test_parts_that_do_not_fit_or_fail_are_named_and_the_rest_is_measured() -> None:
    said: list[str] = []
    kept: list[int] = []
    budget = Budget(100.0, said.append, lambda: kept.append(len(budget.results)))

    def fail() -> None:
        raise ValueError("no such thing")

    assert budget.run("long", 1000.0, lambda: 1) is None
    assert budget.run("broken", 1.0, fail) is None
    assert budget.run("sound", 1.0, lambda: 2) == 2
    assert budget.results == {"long": None, "broken": None, "sound": 2}
    assert budget.notes[0].startswith("long was left out")
    assert budget.notes[1] == "broken failed: ValueError: no such thing"
    assert any("in fail" in text for text in said), "it is said where it came from"
    assert kept == [1, 2, 3], "after each part"


def test_models_have_the_sizes_of_their_names() -> None:
    assert 1.2e9 < SPECS["1B"].num_parameters < 1.3e9
    assert 8.0e9 < SPECS["8B"].num_parameters < 8.1e9
    spec = SPECS["8B"]
    assert step_flops(spec, 1, 1, 0) == 2.0 * (spec.num_parameters - spec.vocab_size * spec.hidden_size)


def test_chat_jobs_are_those_of_the_workload_in_longer() -> None:
    jobs = chat_jobs(200, 8)
    assert jobs == chat_jobs(200, 8)
    assert {job.num_prompt_tokens % 8 for job in jobs} == {0}
    assert all(320 <= job.num_prompt_tokens <= 1600 and 320 <= job.num_output_tokens <= 1600 for job in jobs)
