"""How the KV cache of a GPU is sized, on a device that stands in for one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.runner.models import random_transformer
from tests.runner.torch.models import torch_model
from tests.runner.torch.stand_in import BoundedKernels, StandIn

from everystop import assembly
from everystop.backend import Backend
from everystop.config import Config
from everystop.core.errors import ConfigError
from everystop.runner.torch.memory import (
    MIB,
    Footprint,
    check_kv_memory,
    largest_step,
    measure_footprint,
    num_blocks_that_fit,
)
from everystop.runner.torch.runner import RunnerLimits, TorchRunner, allocate_kv, bytes_per_block
from everystop.runner.torch.steps import Room
from everystop.runner.torch.tables import Tables

FOOTPRINT = Footprint(
    total_bytes=1000 * MIB, used_bytes=300 * MIB, table_bytes=10 * MIB, activation_bytes=80 * MIB, graph_bytes=10 * MIB
)


def test_cache_takes_what_the_share_leaves_but_no_more_than_requests_could_fill() -> None:
    assert FOOTPRINT.left_bytes(0.9) == 500 * MIB
    assert num_blocks_that_fit(FOOTPRINT, 0.9, 2 * MIB, usable=10_000) == 250 - 1  # one is spare
    assert num_blocks_that_fit(FOOTPRINT, 0.9, 2 * MIB, usable=100) == 100


def test_model_that_does_not_fit_is_refused_with_all_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        num_blocks_that_fit(FOOTPRINT, 0.4, 2 * MIB, usable=100)
    for words in ("1,000 MiB", "40%", "300 MiB", "10 MiB", "80 MiB", "leaves 0 MiB", "2 MiB", "--gpu-memory-util"):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="does not fit"):
        num_blocks_that_fit(FOOTPRINT, 0.9, 251 * MIB, usable=100)


def test_given_size_of_the_cache_must_fit_beside_the_rest() -> None:
    check_kv_memory(FOOTPRINT, 600 * MIB)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory is 601 MiB.*leaves 600 MiB"):
        check_kv_memory(FOOTPRINT, 601 * MIB)


def test_bytes_per_block_and_of_tables_are_those_of_the_tensors() -> None:
    model = torch_model(random_transformer("llama"))
    kv = allocate_kv(model.spec, 7, 32, model.torch_dtype, model.device.torch_device)
    assert kv.nbytes == 7 * bytes_per_block(model.spec, 32, model.torch_dtype)
    room = Room(
        num_blocks=9, block_size=16, max_num_batched_tokens=8, max_num_seqs=5, max_tokens=101, vocab_size=150,
        num_valid_tokens=140,
    )  # fmt: skip
    tensors = [t for t in vars(Tables(room, model.device.torch_device)).values() if hasattr(t, "nbytes")]
    assert len(tensors) == 7
    assert sum(t.nbytes for t in tensors) == Tables.num_bytes(room)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "longest"), [(100, 4, 1000), (256, 64, 50), (8, 20, 1000), (1, 1, 9)]
)
def test_largest_step_has_all_tokens_and_rows_and_the_longest_context(
    num_tokens: int, num_rows: int, longest: int
) -> None:
    plan = largest_step(num_tokens, num_rows, longest, 16)
    assert plan.num_tokens == num_tokens
    assert len(plan.rows) == min(num_rows, num_tokens)
    ends = [row.start + row.num_tokens for row in plan.rows]
    assert ends[0] == longest - 1
    assert max(ends) < longest
    for request, end in zip(plan.admitted, ends, strict=True):
        assert len(request.token_ids) == end
        assert len(request.block_table) * 16 > end
    assert largest_step(100, 4, 1000, 16).rows.nums_tokens.tolist() == [97, 1, 1, 1]


def make_model(**memory: Any) -> Any:
    return torch_model(random_transformer("llama"), device=StandIn(**memory), kernels=BoundedKernels())


@pytest.mark.parametrize("graphs", ["lazy", "off"])
def test_footprint_is_measured_by_steps_of_the_runner(graphs: str) -> None:
    model = make_model(total_bytes=900 * MIB, free_bytes=700 * MIB, peaks=(50 * MIB, 20 * MIB))
    limits = RunnerLimits(num_blocks=1, block_size=32, max_num_batched_tokens=64, max_num_seqs=5, graphs=graphs)
    footprint = measure_footprint(model, limits, 500)
    assert (footprint.total_bytes, footprint.used_bytes) == (900 * MIB, 200 * MIB)
    assert footprint.activation_bytes == 50 * MIB
    static = 8 * (2 * 8 + 4 * 150) + 4 * 9  # seats and positions, logits, starts, for 8 rows
    assert footprint.graph_bytes == (20 * MIB + static if graphs == "lazy" else 0)
    assert footprint.table_bytes > 0


class Opened:
    """`_build_torch_runner` as on a GPU, with a device that stands in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: Config, **memory: Any) -> None:
        monkeypatch.setattr(assembly, "choose_backend", lambda _: Backend("cuda", "float32", is_deterministic=False))
        model = make_model(peaks=(50 * MIB, 20 * MIB), **memory)
        runner, self.capacity = assembly.build_runner(config, model, 150)
        assert isinstance(runner, TorchRunner)
        self.runner = runner


def test_cache_is_sized_by_what_the_gpu_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    block = bytes_per_block(make_model().spec, 32, make_model().torch_dtype)
    opened = Opened(
        monkeypatch, Config(max_num_seqs=4, max_num_batched_tokens=64), free_bytes=200 * MIB, total_bytes=201 * MIB
    )
    assert opened.capacity.num_blocks == 4 * 1024 // 32  # all that four requests can use
    assert opened.capacity.max_model_len == 1024
    assert opened.runner.has_graphs
    tight = Opened(
        monkeypatch,
        Config(max_num_seqs=4, max_num_batched_tokens=64, gpu_memory_utilization=1.0, cuda_graphs="off"),
        free_bytes=50 * MIB + 400_000,
        total_bytes=200 * MIB,
    )
    assert 1 <= tight.capacity.num_blocks < 400_000 // block
    assert tight.capacity.max_model_len == min(1024, tight.capacity.num_blocks * 32)
    assert not tight.runner.has_graphs
    given = Opened(monkeypatch, Config(max_num_seqs=4, max_num_batched_tokens=64, kv_cache_memory=10 * block))
    assert given.capacity.num_blocks == 9
    with pytest.raises(ConfigError, match="does not fit"):
        Opened(
            monkeypatch, Config(max_num_seqs=4, max_num_batched_tokens=64), free_bytes=60 * MIB, total_bytes=200 * MIB
        )
