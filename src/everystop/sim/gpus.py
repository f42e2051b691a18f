"""GPUs and model shapes as numbers: what the roofline needs to know of them. No step and no plan here.

The constants of `GPUS` are fitted by `python -m benchmarks.fit_gpu_kernels` to kernel times that NVIDIA measured with
vLLM and published in aiconfigurator (github.com/ai-dynamo/aiconfigurator at 095f58a5, Apache-2.0, copyright NVIDIA
CORPORATION & AFFILIATES); the two peaks and the memory's size are from the same source.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Peaks of one GPU, and the share of them that its kernels reach; a floor is what the smallest kernel takes.

    A matrix product has `gemm_*`, attention of rows of one token `decode_*`, of longer ones `prefill_*`. Between 65 and
    256 tokens a product takes `gemm_middle_factor` times as long as memory and arithmetic say. A KV head of a decoding
    row takes `decode_head_ns`, unless reading takes longer; in a step with a prompt decodes take `mixed_decode_factor`
    times as long. A prompt reaches half of `prefill_compute_share` where each of its tokens attends to
    `prefill_half_tokens` tokens on average. Errors are the medians of the shares by which single kernels are off.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float
    gemm_floor_ns: float
    gemm_memory_share: float
    gemm_compute_share: float
    gemm_middle_factor: float
    decode_floor_ns: float
    decode_memory_share: float
    decode_head_ns: float
    prefill_floor_ns: float
    prefill_compute_share: float
    prefill_half_tokens: float
    mixed_decode_factor: float = 1.0
    gemm_error: float = 0.0
    decode_error: float = 0.0
    prefill_error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder of the Llama kind, of which one of `num_shards` equal parts is on a GPU."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_shards: int = 1

    @property
    def q_size(self) -> int:
        """Query features on one GPU."""
        return self.num_heads * self.head_dim // self.num_shards

    @property
    def kv_size(self) -> int:
        """Key features on one GPU, and as many value features."""
        return self.num_kv_heads * self.head_dim // self.num_shards

    @property
    def layer_products(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of a layer's matrices on one GPU: qkv, o, gate and up, down."""
        inner = self.intermediate_size // self.num_shards
        return (
            (self.q_size + 2 * self.kv_size, self.hidden_size),
            (self.hidden_size, self.q_size),
            (2 * inner, self.hidden_size),
            (self.hidden_size, inner),
        )

    @property
    def weight_bytes(self) -> int:
        """Matrices of all layers and of the output, in bf16, on one GPU."""
        layer = sum(outputs * inputs for outputs, inputs in self.layer_products)
        return BF16_BYTES * (self.num_layers * layer + self.vocab_size * self.hidden_size // self.num_shards)


GPUS = {
    "h100": Gpu(
        name="h100",
        memory_bytes=85_899_345_920,
        bytes_per_s=3.35e12,
        flops_per_s=9.89e14,
        gemm_floor_ns=3721,
        gemm_memory_share=0.8881,
        gemm_compute_share=0.8166,
        gemm_middle_factor=1.002,
        decode_floor_ns=11_310,
        decode_memory_share=0.8757,
        decode_head_ns=25.44,
        prefill_floor_ns=13_270,
        prefill_compute_share=0.5875,
        prefill_half_tokens=493.3,
        gemm_error=0.0494,
        decode_error=0.0758,
        prefill_error=0.0975,
    ),
    "h200": Gpu(
        name="h200",
        memory_bytes=151_397_597_184,
        bytes_per_s=4.8e12,
        flops_per_s=9.89e14,
        gemm_floor_ns=4046,
        gemm_memory_share=0.8456,
        gemm_compute_share=0.8131,
        gemm_middle_factor=0.9893,
        decode_floor_ns=11_270,
        decode_memory_share=0.8112,
        decode_head_ns=26.06,
        prefill_floor_ns=13_120,
        prefill_compute_share=0.5821,
        prefill_half_tokens=477.2,
        gemm_error=0.0533,
        decode_error=0.0809,
        prefill_error=0.0964,
    ),
    "a100": Gpu(
        name="a100",
        memory_bytes=85_899_345_920,
        bytes_per_s=2.039e12,
        flops_per_s=3.12e14,
        gemm_floor_ns=6050,
        gemm_memory_share=0.7499,
        gemm_compute_share=0.8074,
        gemm_middle_factor=1.13,
        decode_floor_ns=17_920,
        decode_memory_share=0.6853,
        decode_head_ns=35.39,
        prefill_floor_ns=11_150,
        prefill_compute_share=0.5955,
        prefill_half_tokens=285.5,
        gemm_error=0.067,
        decode_error=0.0732,
        prefill_error=0.1032,
    ),
}

SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="llama-3.2-1b",
            num_layers=16,
            hidden_size=2048,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            intermediate_size=8192,
            vocab_size=128_256,
        ),
        ModelShape(
            name="llama-3.1-8b",
            num_layers=32,
            hidden_size=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=14_336,
            vocab_size=128_256,
        ),
        ModelShape(
            name="qwen3-0.6b",
            num_layers=28,
            hidden_size=1024,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=3072,
            vocab_size=151_936,
        ),
        ModelShape(
            name="qwen3-32b",
            num_layers=64,
            hidden_size=5120,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=25_600,
            vocab_size=151_936,
        ),
    )
}
