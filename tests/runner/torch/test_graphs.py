"""Captured decode steps, on a device that stands in for a GPU: which there are, when they are made, what they give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.runner.invariance import make_prompts
from tests.runner.models import random_transformer
from tests.runner.test_native import admitted, generate
from tests.runner.torch.models import plain_model, torch_model
from tests.runner.torch.stand_in import BoundedKernels, StandIn

from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan
from everystop.core.policy import Continuous
from everystop.core.request import Request, SamplingParams
from everystop.core.rows import Row
from everystop.core.scheduler import Scheduler
from everystop.engine.loop import StepLoop
from everystop.runner.torch.graphs import DecodeGraphs, Shape, context_bounds, graph_sizes
from everystop.runner.torch.runner import RunnerLimits, TorchRunner

LIMITS = RunnerLimits(num_blocks=64, block_size=32, max_num_batched_tokens=256, max_num_seqs=10, graphs="lazy")


def captured_runner(device: StandIn, limits: RunnerLimits = LIMITS) -> TorchRunner:
    model = torch_model(random_transformer("qwen3"), device=device, kernels=BoundedKernels())
    return TorchRunner(model, limits)


def eager_runner() -> TorchRunner:
    return TorchRunner(plain_model("qwen3"), replace(LIMITS, graphs="off"))


def test_sizes_reach_the_most_rows_that_a_step_can_have() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(5) == (1, 2, 4, 8)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 24)
    assert graph_sizes(256) == (1, 2, 4, *range(8, 257, 8))
    assert graph_sizes(1000) == graph_sizes(256)


def test_bounds_end_at_the_longest_context() -> None:
    assert context_bounds(100) == (100,)
    assert context_bounds(4096) == (4096,)
    assert context_bounds(40_000) == (4096, 16_384, 40_000)


def test_a_step_takes_the_smallest_shape_that_it_fits() -> None:
    graphs = DecodeGraphs(StandIn(), lambda shape: None, (1, 2, 4, 8), (4096, 9000))
    assert graphs.shape_for(3, 100) == Shape(4, 4096)
    assert graphs.shape_for(8, 4097) == Shape(8, 9000)
    assert graphs.shape_for(9, 1) is None
    assert graphs.shape_for(1, 9001) is None
    assert graphs.shapes[0] == Shape(8, 9000)
    assert graphs.shapes[-1] == Shape(1, 4096)


def test_each_shape_is_captured_once_and_replayed_with_the_numbers_of_each_step() -> None:
    """Three requests decode together, then two: a shape of 4 rows, then one of 2; all as without captures."""
    device = StandIn()
    runner, eager = captured_runner(device), eager_runner()
    prompts = [tuple(range(1 + i, 20 + 7 * i)) for i in range(3)]
    for each in (runner, eager):
        requests = [admitted(i, prompt, [2 * i, 2 * i + 1]) for i, prompt in enumerate(prompts)]
        rows = [Row(i, 0, len(p), 0, len(p) - 1) for i, p in enumerate(prompts)]
        each.execute(StepPlan(0, rows=rows, admitted=requests))
    assert runner.num_graphs == 0
    for step in range(12):
        ids = range(3) if step < 8 else range(2)
        rows = [Row(i, len(prompts[i]) + step, 1, 0, 0) for i in ids]
        assert runner.execute(StepPlan(step, rows=rows)).rows == eager.execute(StepPlan(step, rows=rows)).rows
    assert runner.num_graphs == 2
    assert [graph.num_replays for graph in device.graphs] == [8, 4]
    assert device.log.count("capture") == 2


def test_logits_of_a_replay_are_those_of_the_step() -> None:
    """The log-probabilities, to rounding, of every step."""
    device = StandIn()
    params = SamplingParams(temperature=0.0, logprobs=5)
    for runner in (captured_runner(device), eager_runner()):
        plan = StepPlan(0, rows=[Row(1, 0, 4, 0, 3)], admitted=[admitted(1, [5, 6, 7, 8], [3], params)])
        entries = [runner.execute(plan).logprobs[1][0]]
        for i in range(10):
            entries += runner.execute(StepPlan(i, rows=[Row(1, 4 + i, 1, 0, 0)])).logprobs[1]
        if runner.num_graphs:
            captured = entries
    np.testing.assert_allclose([e.logprob for e in captured], [e.logprob for e in entries], atol=1e-5)
    assert [[i for i, _ in e.top] for e in captured] == [[i for i, _ in e.top] for e in entries]


def test_all_shapes_are_captured_at_the_start_largest_first() -> None:
    device = StandIn()
    runner = captured_runner(device, replace(LIMITS, graphs="start"))
    assert runner.num_graphs == len(graph_sizes(10)) == 5
    before = list(device.log)
    expected = generate(eager_runner(), admitted(1, [5, 17, 42], [0]), 6)
    assert generate(runner, admitted(1, [5, 17, 42], [0]), 6) == expected
    assert device.log.count("capture") == before.count("capture") == 5


def test_steps_that_do_more_than_decode_are_not_captured() -> None:
    device = StandIn()
    runner = captured_runner(device)
    requests = [admitted(1, [1, 2, 3], [0]), admitted(2, range(1, 30), [1])]
    runner.execute(StepPlan(0, rows=[Row(1, 0, 3, 0, 2)], admitted=requests))
    runner.execute(StepPlan(1, rows=[Row(1, 3, 1, 0, 0), Row(2, 0, 10, 0, 10)]))
    assert runner.num_graphs == 0
    runner.execute(StepPlan(2, rows=[Row(2, 10, 1, 0, 1)]))  # samples nothing
    assert runner.num_graphs == 0
    runner.execute(StepPlan(3, rows=[Row(1, 4, 1, 0, 0)]))
    assert runner.num_graphs == 1


def test_waiting_for_the_device_in_a_capture_is_found() -> None:
    """The plain kernels read numbers on the host; so a device would refuse to capture them, as the stand-in does."""

    class Peeking(BoundedKernels):
        def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
            float(gate_up.sum())
            return super().silu_mul(gate_up)

    model = torch_model(random_transformer("llama"), device=StandIn(), kernels=Peeking())
    runner = TorchRunner(model, LIMITS)
    with pytest.raises(RuntimeError, match="waits for the device"):
        generate(runner, admitted(1, [1, 2, 3], [0]), 2)


# ------------------------------------------------------------------------------ one step ahead


def serve(runner: TorchRunner, depth: int, max_num_seqs: int = 6) -> tuple[dict[int, list[int]], int]:
    """Tokens of ten requests with stop tokens, penalties and draws, in a tight pool, and rows computed in vain."""
    scheduler = Scheduler(
        Limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=1024),
        KVCache(num_blocks=18, block_size=32, enable_prefix_caching=True),
        Continuous(),
    )
    loop = StepLoop(scheduler, runner, iter(range(10**9)).__next__, depth=depth)
    received: dict[int, list[int]] = {}
    prompts = make_prompts((60, 33, 90, 17, 48, 75, 20, 64, 5, 40), 150, max_tokens=50)
    for i, prompt in enumerate(prompts):
        params = replace(prompt.params, stop_token_ids=tuple(range(i, 150, 29)), logprobs=None)
        scheduler.add(Request(i, prompt.token_ids, params), 0)
        received[i] = []
    num_wasted = num_preempted = 0
    while scheduler.has_work:
        turn = loop.turn()
        for event in turn.events:
            if hasattr(event, "num_wasted_rows"):
                num_wasted += event.num_wasted_rows
                num_preempted += len(event.plan.preempted)
                for row, tokens in zip(event.plan.rows, event.tokens, strict=True):
                    received[row.request_id] += tokens
        scheduler.check_integrity()
    loop.turn()
    assert num_preempted
    return received, num_wasted


@pytest.mark.parametrize("graphs", ["off", "lazy"])
def test_one_step_ahead_gives_the_same_tokens_and_wastes_a_row_for_each_stop(graphs: str) -> None:
    """Work is done as late as a GPU may do it: what a step reads on the host has been written over by then."""
    device = StandIn()
    limits = replace(LIMITS, num_blocks=18, graphs=graphs)
    ahead, num_wasted = serve(captured_runner(device, limits), depth=1)
    model = torch_model(random_transformer("qwen3"), kernels=BoundedKernels())
    expected, none_wasted = serve(TorchRunner(model, replace(limits, graphs="off")), depth=0)
    assert ahead == expected
    assert none_wasted == 0
    assert 0 < num_wasted <= 10
    assert device.max_waiting == 2
    assert (device.log.count("capture") > 0) == (graphs == "lazy")


def test_staging_is_not_written_over_before_it_has_landed() -> None:
    """With one buffer instead of two, the test above would fail: this shows that it could."""
    device = StandIn()
    runner = captured_runner(device, replace(LIMITS, num_blocks=18, graphs="off"))
    runner._uploads._staging[1] = runner._uploads._staging[0]
    expected, _ = serve(eager_for(18), depth=0)
    try:
        received, _ = serve(runner, depth=1)
    except (ValueError, IndexError, RuntimeError, AssertionError):
        return
    assert received != expected


def eager_for(num_blocks: int) -> TorchRunner:
    model = torch_model(random_transformer("qwen3"), kernels=BoundedKernels())
    return TorchRunner(model, replace(LIMITS, num_blocks=num_blocks, graphs="off"))
