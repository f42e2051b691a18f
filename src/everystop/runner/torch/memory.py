"""How much of a GPU the KV cache may take: what is left of a share of it once all else that a step needs is there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from everystop.core.errors import ConfigError
from everystop.core.plan import Admitted, StepPlan
from everystop.core.request import SamplingParams
from everystop.core.rows import Row
from everystop.runner.torch.loading import TorchModel
from everystop.runner.torch.runner import RunnerLimits, TorchRunner
from everystop.runner.torch.tables import Tables

MIB = 1 << 20
_COSTLY = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a runner takes of a device beside its KV cache, in bytes; `used_bytes` counts weights and other programs."""

    total_bytes: int
    used_bytes: int
    table_bytes: int
    activation_bytes: int
    graph_bytes: int

    def left_bytes(self, utilization: float) -> int:
        """What that share of the device leaves for the KV cache; below 0 where the rest does not even fit."""
        taken = self.used_bytes + self.table_bytes + self.activation_bytes + self.graph_bytes
        return int(self.total_bytes * utilization) - taken

    def describe(self, utilization: float) -> str:
        """The numbers, for whoever has to change one."""
        return (
            f"of {_mib(self.total_bytes)} on the GPU {utilization:.0%} may be used; weights and other programs take "
            f"{_mib(self.used_bytes)}, tables {_mib(self.table_bytes)}, activations {_mib(self.activation_bytes)} and "
            f"graphs {_mib(self.graph_bytes)}"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"


def num_blocks_that_fit(footprint: Footprint, utilization: float, block_bytes: int, usable: int) -> int:
    """Blocks of the KV cache, at most the `usable` that requests could fill, beside the spare one.

    Raises ConfigError, with all the numbers, where there is room for none.
    """
    left = footprint.left_bytes(utilization)
    num_blocks = min(usable, left // block_bytes - 1)
    if num_blocks < 1:
        raise ConfigError(
            f"the model does not fit: {footprint.describe(utilization)}, which leaves {_mib(max(0, left))} for the KV "
            f"cache, and the least is two blocks of {_mib(block_bytes)}; raise --gpu-memory-utilization, lower "
            "--max-num-batched-tokens, --max-num-seqs or --max-model-len, or choose a smaller model or dtype"
        )
    return num_blocks


def check_kv_memory(footprint: Footprint, wanted_bytes: int) -> None:
    """Raise ConfigError where a KV cache of a given size cannot be had beside the rest."""
    left = footprint.left_bytes(1.0)
    if wanted_bytes > left:
        raise ConfigError(
            f"--kv-cache-memory is {_mib(wanted_bytes)}, but {footprint.describe(1.0)}, which leaves "
            f"{_mib(max(0, left))}; lower it"
        )


def measure_footprint(model: TorchModel, limits: RunnerLimits, max_model_len: int) -> Footprint:
    """Run the largest step there can be on a cache of a few blocks, and note what it takes; only the weights are on
    the device.
    """
    device, memory = model.device, model.device.memory()
    runner = TorchRunner(model, replace(limits, num_blocks=1, max_model_len=max_model_len))
    activation_bytes = device.measure_peak(lambda: _run_largest(runner, max_model_len))
    graph_bytes = runner.static_bytes
    if runner.has_graphs:
        graph_bytes += device.measure_peak(runner.decode_largest)
    table_bytes = Tables.num_bytes(runner.room)
    runner.close()
    return Footprint(
        total_bytes=memory.total_bytes,
        used_bytes=memory.total_bytes - memory.free_bytes,
        table_bytes=table_bytes,
        activation_bytes=activation_bytes,
        graph_bytes=graph_bytes,
    )


def _run_largest(runner: TorchRunner, max_model_len: int) -> None:
    plan = largest_step(
        runner.room.max_num_batched_tokens, runner.room.max_num_seqs, max_model_len, runner.room.block_size
    )
    runner.execute(plan)
    runner.execute(StepPlan(-1, released=[admitted.request_id for admitted in plan.admitted]))


def largest_step(num_tokens: int, num_rows: int, max_model_len: int, block_size: int) -> StepPlan:
    """A step of `num_tokens` tokens, or as many as fit, in `num_rows` rows, the first at the end of the longest
    context, each sampled at the greatest expense. All blocks are block 0: what is computed means nothing.

    Example, 100 tokens and 4 rows: rows of 97, 1, 1 and 1.
    """
    num_rows = min(num_rows, num_tokens)
    plan, left = StepPlan(-1), num_tokens
    for i in range(num_rows):
        longest = max_model_len - 1 if i == 0 else min(max_model_len - 1, left - (num_rows - i - 1))
        num = min(longest, left - (num_rows - i - 1))
        known = longest if i == 0 else num
        table = (0,) * -(-(known + 1) // block_size)
        plan.admitted.append(Admitted(-2 - i, (0,) * known, known, _COSTLY, 0, (), table, i, ""))
        plan.rows.append(Row(-2 - i, known - num, num, 0, num - 1))
        left -= num
    return plan
