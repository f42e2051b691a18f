"""The table of all policies, on short made-up traces of the right names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import policies
from everystop.core.policy import POLICIES
from everystop.sim.cost import CostModel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sixty requests, ten a second, of two tenants or of nobody."""
    stamps = [f"2023-11-16 18:15:{i / 10:010.7f}" for i in range(60)]
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{at},400,60\n" for at in stamps)
    tenants = "".join(f"{i / 10},{'ab'[i % 3 > 0]},{50 + i},{20 + i % 7}\n" for i in range(60))
    (tmp_path / "vtc_lmsys_arena_1500.csv").write_text("req_time_s,client,prompt_tokens,output_tokens\n" + tenants)
    for name in ("conv", "code"):
        (tmp_path / f"AzureLLMInferenceTrace_{name}.csv").write_text(azure)
    CostModel(step_ns=5e6, token_ns=4e5, source="a test").write(tmp_path / "cost.json")
    return tmp_path


def test_every_policy_has_a_line_under_every_load_of_every_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--traces", str(folder), "--cost", str(folder / "cost.json"), "--out", str(folder / "out.json")]
    monkeypatch.setattr(sys, "argv", ["policies", *words, "--loads", "0.5", "2"])
    policies.main()
    text = capsys.readouterr().out
    runs = json.loads((folder / "out.json").read_text())
    assert "Step times: a test." in text
    for policy in POLICIES:
        assert text.count(f"`{policy}`") == 6
    assert text.count("`continuous`, `priority`") == 6, "nobody has a priority"
    assert len(runs) == 6 * len(POLICIES)
    assert all(run["num_finished"] == run["num_requests"] == 60 for run in runs)


def test_load_is_a_multiple_of_the_capacity(folder: Path) -> None:
    """All at once the trace takes so long; at a load of 2 its arrivals take half of that."""
    cost = CostModel.read(folder / "cost.json")
    traffic = policies.TRAFFIC[1]
    scale = policies.measure(folder / traffic.file, traffic, cost, kv_share=0.5, limit=None)
    assert scale.num_requests == 60
    assert scale.span_s * scale.dilation(2.0) == pytest.approx(scale.capacity_s / 2)
    assert scale.num_blocks == round(0.5 * 64 * 115 / 32)
