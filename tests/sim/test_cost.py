"""Step times: what a plan costs, and models that are written and read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from everystop.core.plan import StepPlan
from everystop.core.rows import Row
from everystop.core.step_time import StepFeatures
from everystop.sim.cost import CostError, CostModel

MODEL = CostModel(
    step_ns=5e6, token_ns=20_000, decode_context_ns=30, prefill_pair_ns=2, row_ns=4_000, host_ns=1_000, source="here"
)


def test_features_count_contexts_and_pairs() -> None:
    """A decode at position 9 attends to 10 tokens; 3 tokens from position 4 on attend to 5 + 6 + 7."""
    plan = StepPlan(0, [Row(0, 9, 1, 0, 0), Row(1, 4, 3, 0, 3)])
    assert StepFeatures.of(plan) == (4, 10, 18, 2)
    assert MODEL.plan_ns(plan) == 5_000_000 + 4 * 20_000 + 10 * 30 + 18 * 2 + 2 * 4_000 + 1_000


def test_host_takes_its_time_for_each_row() -> None:
    plan = StepPlan(0, [Row(0, 9, 1, 0, 0), Row(1, 9, 1, 0, 0)])
    assert CostModel(host_ns=1_000, host_row_ns=30).plan_ns(plan) == 1_060


def test_plan_without_rows_takes_no_time() -> None:
    assert MODEL.plan_ns(StepPlan(0, released=[1])) == 0
    assert CostModel().plan_ns(StepPlan(0, [Row(0, 0, 1, 0, 0)])) == 1, "time must go on"


def test_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    model = replace(MODEL, host_row_ns=7.5, request_ns=1e6, errors={"ttft_p50": -0.02})
    model.write(tmp_path / "made" / "cost.json")
    assert CostModel.read(tmp_path / "made" / "cost.json") == model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("[]", "no cost model of version 1"),
        ('{"everystop_cost": 2}', "no cost model of version 1"),
        ('{"everystop_cost": 1, "tokens": 3}', "sets 'tokens'"),
        ('{"everystop_cost": 1, "token_ns": -3}', "token_ns is -3"),
        ('{"everystop_cost": 1, "token_ns": NaN}', "token_ns is nan"),
        ('{"everystop_cost": 1, "token_ns": "3"}', "token_ns is '3'"),
        ('{"everystop_cost": 1, "errors": {"ttft_p50": "3"}}', "errors is"),
        ('{"everystop_cost": 1, "errors": [1]}', "errors is"),
    ],
)
def test_file_that_is_no_model_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(CostError, match=message):
        CostModel.read(tmp_path / "cost.json")


def test_absent_model_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="everystop calibrate"):
        CostModel.read(tmp_path / "cost.json")
