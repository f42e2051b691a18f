"""What the machine can do at most, where a configuration computes, and what it is called."""

from __future__ import annotations

import pytest

from everystop.config import Config
from everystop.core.errors import ConfigError
from everystop.trial import machine_limits
from everystop.trial.machine_limits import MachineLimits, measure_limits, product_rate, read_bandwidth


def test_reading_memory_has_a_speed_of_this_century() -> None:
    assert 1e8 < read_bandwidth(1, 1 << 24) < 1e13


def test_a_product_counts_two_operations_for_each_pair() -> None:
    assert 1e7 < product_rate(1, (16, 64, 64)) < 1e14


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    from everystop.trial.gpu import device_limits

    monkeypatch.setattr(machine_limits, "NUM_READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine_limits, "PRODUCT_SHAPE", (16, 64, 64))
    monkeypatch.setattr(device_limits, "ON_CPU", device_limits.Extent(1 << 20, 64, 2))


@pytest.mark.parametrize(
    ("settings", "operations"),
    [
        ({"device": "cpu"}, "int8 GOP/s in registers"),
        ({"device": "cpu", "dtype": "float32"}, "float32 GFLOP/s in the kernels' own product of large matrices"),
        ({"device": "torch"}, "float32 GFLOP/s in products of 64 × 64 matrices by PyTorch"),
        ({"device": "torch", "dtype": "bfloat16"}, "bfloat16 GFLOP/s in products of 64 × 64 matrices by PyTorch"),
        ({"device": "torch", "dtype": "fp8"}, "fp8 GFLOP/s in products of 64 × 64 matrices by the runner's kernel"),
    ],
)
def test_limits_are_those_of_what_computes_and_say_so(small: None, settings: dict[str, str], operations: str) -> None:
    found = measure_limits(Config(threads=1, **settings))  # type: ignore[arg-type]
    assert found.operations == operations
    assert found.operations_per_s >= 0
    assert 1e7 < found.bytes_per_s < 1e13


def test_limits_in_words() -> None:
    found = MachineLimits(
        operations_per_s=2.5e12, bytes_per_s=1.23e12, operations="GFLOP/s", bytes="GB/s", how="each once"
    )
    assert found.describe() == "2,500 GFLOP/s and 1,230.0 GB/s, each once"


def test_limits_of_a_gpu_that_is_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="--device cuda"):
        measure_limits(Config(device="cuda"))
