"""How long a step takes on a GPU: every kernel by the slower of memory and arithmetic, above a floor.

product     floor + (memory³ + arithmetic³)^(1/3), times a factor between 65 and 256 tokens
attention   floor + KV bytes of decodes / bandwidth, or so much a KV head (the root of the sum of squares)
            + arithmetic of prompts, for which short ones use the GPU badly
the rest    norms, rotary embedding, cache write and activation: a floor each + bytes / bandwidth
output      the last product and the sampler, for the rows that sample
host        runs beside the GPU: a step takes the longer of the two
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import fsum, hypot
from pathlib import Path

from everystop.core.plan import StepPlan
from everystop.core.step_time import StepFeatures
from everystop.sim.cost import CostError
from everystop.sim.gpus import BF16_BYTES, GPUS, SHAPES, Gpu, ModelShape

NS_PER_S = 1e9
MIDDLE_TOKENS = range(65, 257)
SMALL_KERNELS_A_LAYER = 5  # two norms with their residuals, rotary embedding, cache write, activation
SMALL_KERNEL_NS = 2_500.0
SMALL_KERNEL_MEMORY_SHARE = 0.8
SAMPLER_NS = 25_000.0
LOGIT_BYTES = 4
SAMPLER_PASSES = 1.5
HOST_STEP_NS = 126_000.0
HOST_ROW_NS = 4_000.0
REQUEST_NS = 15_600_000.0
VALIDATED = "3 and 10 % median"  # the largest of TTFT, TPOT and E2E in each run; benchmarks/validate_vllm.py


def product_ns(gpu: Gpu, num_tokens: int, outputs: int, inputs: int) -> float:
    """Time of [num_tokens, inputs] times [inputs, outputs] in bf16."""
    num_values = num_tokens * inputs + inputs * outputs + num_tokens * outputs
    memory = BF16_BYTES * num_values / (gpu.bytes_per_s * gpu.gemm_memory_share)
    arithmetic = 2 * num_tokens * inputs * outputs / (gpu.flops_per_s * gpu.gemm_compute_share)
    seconds: float = (memory**3 + arithmetic**3) ** (1 / 3)
    if num_tokens in MIDDLE_TOKENS:
        seconds *= gpu.gemm_middle_factor
    return gpu.gemm_floor_ns + NS_PER_S * seconds


def decode_attention_ns(gpu: Gpu, shape: ModelShape, num_rows: int, context: int) -> float:
    """Time beyond the floor, in one layer, of `num_rows` rows of one token that together attend to `context` tokens."""
    num_bytes = BF16_BYTES * 2 * shape.kv_size * context
    memory_ns = NS_PER_S * num_bytes / (gpu.bytes_per_s * gpu.decode_memory_share)
    return hypot(memory_ns, gpu.decode_head_ns * num_rows * shape.num_kv_heads / shape.num_shards)


def prefill_attention_ns(gpu: Gpu, shape: ModelShape, pairs: int, num_tokens: int) -> float:
    """Time beyond the floor, in one layer, of `num_tokens` tokens that attend to `pairs` tokens in all."""
    flops = 4 * shape.q_size * (pairs + gpu.prefill_half_tokens * num_tokens)
    return NS_PER_S * flops / (gpu.flops_per_s * gpu.prefill_compute_share)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The step times of a model on a GPU; satisfies `everystop.sim.cost.StepCost`.

    `request_ns` is what the server's front end adds to every request's TTFT and E2E. `reduce_floor_ns` and
    `reduce_bytes_per_s` are for a model in shards: two sums over the GPUs a layer.
    """

    gpu: Gpu
    shape: ModelShape
    source: str = ""
    host_step_ns: float = HOST_STEP_NS
    host_row_ns: float = HOST_ROW_NS
    request_ns: float = REQUEST_NS
    reduce_floor_ns: float = 0.0
    reduce_bytes_per_s: float = 0.0

    @cached_property
    def _known_ns(self) -> dict[tuple[bool, int], float]:
        """Times that depend on a number of tokens alone (True) or of rows that sample (False)."""
        return {}

    def plan_ns(self, plan: StepPlan) -> int:
        """Time from one step to the next for this plan; one that computes nothing takes none."""
        if not plan.rows:
            return 0
        num_tokens, context, pairs, num_rows = StepFeatures.of(plan)
        num_samples = num_decodes = 0
        for n, logits_from in zip(plan.rows.nums_tokens, plan.rows.logits_from, strict=True):
            num_samples += logits_from < n
            num_decodes += n == 1
        known = self._known_ns
        layers_ns = known.get((True, num_tokens))
        if layers_ns is None:
            layers_ns = known[True, num_tokens] = self.layers_ns(num_tokens)
        output_ns = known.get((False, num_samples))
        if output_ns is None:
            output_ns = known[False, num_samples] = self.output_ns(num_samples)
        attention_ns = self.shape.num_layers * self.attention_ns(num_decodes, context, num_tokens - num_decodes, pairs)
        host_ns = self.host_step_ns + self.host_row_ns * num_rows
        return max(1, round(max(layers_ns + attention_ns + output_ns, host_ns)))

    def layers_ns(self, num_tokens: int) -> float:
        """All layers but for attention."""
        gpu, shape = self.gpu, self.shape
        layer_ns = fsum(product_ns(gpu, num_tokens, outputs, inputs) for outputs, inputs in shape.layer_products)
        values = 8 * shape.hidden_size + 3 * shape.intermediate_size // shape.num_shards
        values += 2 * shape.q_size + 6 * shape.kv_size
        small_bytes = BF16_BYTES * num_tokens * values
        layer_ns += SMALL_KERNELS_A_LAYER * SMALL_KERNEL_NS
        layer_ns += NS_PER_S * small_bytes / (gpu.bytes_per_s * SMALL_KERNEL_MEMORY_SHARE)
        if shape.num_shards > 1:
            assert self.reduce_bytes_per_s > 0
            sum_bytes = BF16_BYTES * num_tokens * shape.hidden_size
            layer_ns += 2 * (self.reduce_floor_ns + NS_PER_S * sum_bytes / self.reduce_bytes_per_s)
        return shape.num_layers * layer_ns

    def attention_ns(self, num_decodes: int, context: int, num_prefill: int, pairs: int) -> float:
        """Attention of one layer, in one kernel: `num_decodes` rows of one token, and longer ones of `num_prefill`."""
        gpu, shape = self.gpu, self.shape
        decode_ns = decode_attention_ns(gpu, shape, num_decodes, context)
        if not num_prefill:
            return gpu.decode_floor_ns + decode_ns
        prefill_ns = prefill_attention_ns(gpu, shape, pairs, num_prefill)
        return gpu.prefill_floor_ns + prefill_ns + gpu.mixed_decode_factor * decode_ns

    def output_ns(self, num_samples: int) -> float:
        """Output product and sampler; nothing where no row samples."""
        if not num_samples:
            return 0.0
        gpu, shape = self.gpu, self.shape
        product = product_ns(gpu, num_samples, shape.vocab_size // shape.num_shards, shape.hidden_size)
        logit_bytes = LOGIT_BYTES * SAMPLER_PASSES * num_samples * shape.vocab_size
        return product + SAMPLER_NS + NS_PER_S * logit_bytes / gpu.bytes_per_s


def describe_source(gpu: Gpu) -> str:
    """Where the numbers of a preset come from, and what is known of their errors."""
    return (
        f"a roofline; single kernels on this GPU are off by {gpu.gemm_error:.0%} (products), {gpu.decode_error:.0%} "
        f"(attention of decodes) and {gpu.prefill_error:.0%} (of prompts) median; no whole run on it was compared, but "
        f"with other GPUs' peaks requests of vLLM are off by {VALIDATED} (docs/simulator.md, Validation)"
    )


def find_preset(name: str) -> Roofline | None:
    """The preset of that name, in any case; None where the name is a file's. Raises CostError for "gpu:model", or a GPU
    alone, that is neither.
    """
    gpu, colon, shape = name.lower().partition(":")
    if gpu in GPUS and shape in SHAPES:
        return Roofline(gpu=GPUS[gpu], shape=SHAPES[shape], source=f"{gpu}:{shape}, {describe_source(GPUS[gpu])}")
    if (colon or gpu in GPUS) and not Path(name).exists():
        raise CostError(
            f"there is no preset {name!r}; presets are GPU:MODEL, of {', '.join(GPUS)} and {', '.join(SHAPES)}"
        )
    return None
