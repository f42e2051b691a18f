"""The roofline of a GPU: its parts by hand, and presets that predict what they should."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from everystop.core.plan import StepPlan
from everystop.core.rows import Row
from everystop.sim.cost import CostError
from everystop.sim.gpus import GPUS, SHAPES, Gpu, ModelShape
from everystop.sim.roofline import Roofline, find_preset, prefill_attention_ns, product_ns

PLAIN = Gpu(
    name="plain",
    memory_bytes=80e9,
    bytes_per_s=1e12,
    flops_per_s=1e14,
    gemm_floor_ns=3_000,
    gemm_memory_share=0.5,
    gemm_compute_share=0.5,
    gemm_middle_factor=1.25,
    decode_floor_ns=10_000,
    decode_memory_share=0.5,
    decode_head_ns=20,
    prefill_floor_ns=12_000,
    prefill_compute_share=0.5,
    prefill_half_tokens=400,
)
TINY = ModelShape(
    name="tiny",
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    vocab_size=1_000,
)


def decodes(num: int, context: int) -> StepPlan:
    """Rows of one token, each attending to `context` tokens."""
    return StepPlan(0, [Row(i, context - 1, 1, 0, 0) for i in range(num)])


def prompt(num_tokens: int, start: int = 0) -> StepPlan:
    """One chunk that samples."""
    return StepPlan(0, [Row(0, start, num_tokens, 0, num_tokens - 1)])


def test_product_of_one_token_takes_floor_and_weights() -> None:
    """4096 × 4096 weights of 2 bytes at half of 1 TB/s take 67 µs; arithmetic is nothing beside it."""
    assert product_ns(PLAIN, 1, 4096, 4096) == pytest.approx(3_000 + 2 * 4096 * 4096 / 0.5e12 * 1e9, rel=0.001)


def test_large_product_takes_its_arithmetic() -> None:
    assert product_ns(PLAIN, 8192, 4096, 4096) == pytest.approx(2 * 8192 * 4096**2 / 0.5e14 * 1e9, rel=0.02)


def test_products_of_65_to_256_tokens_are_slower_by_a_factor() -> None:
    below, inside, above = (product_ns(PLAIN, m, 4096, 4096) - 3_000 for m in (64, 65, 257))
    assert inside == pytest.approx(1.25 * below, rel=0.01)
    assert above == pytest.approx((product_ns(PLAIN, 256, 4096, 4096) - 3_000) / 1.25, rel=0.01)


def test_short_prompts_use_the_gpu_badly() -> None:
    """At an average of `prefill_half_tokens` tokens attended to, half of the best rate is reached."""
    ns = prefill_attention_ns(PLAIN, TINY, 400 * 800, 800)
    assert ns == pytest.approx(2 * 4 * TINY.q_size * 400 * 800 / 0.5e14 * 1e9)


def test_step_is_the_sum_of_its_parts() -> None:
    roofline = Roofline(gpu=PLAIN, shape=TINY, host_step_ns=0, host_row_ns=0)
    parts = roofline.layers_ns(3) + 2 * roofline.attention_ns(3, 300, 0, 0) + roofline.output_ns(3)
    assert roofline.plan_ns(decodes(3, 100)) == round(parts)
    assert roofline.plan_ns(decodes(3, 100)) == round(parts), "a known time is the same"


def test_host_runs_beside_the_gpu() -> None:
    roofline = Roofline(gpu=PLAIN, shape=TINY, host_step_ns=1e9, host_row_ns=1e6)
    assert roofline.plan_ns(decodes(3, 100)) == 1_003_000_000
    assert roofline.plan_ns(StepPlan(0, released=[1])) == 0


def test_chunk_that_samples_nothing_skips_the_output() -> None:
    roofline = Roofline(gpu=PLAIN, shape=TINY, host_step_ns=0, host_row_ns=0)
    silent = StepPlan(0, [Row(0, 0, 100, 0, 100)])
    assert roofline.plan_ns(prompt(100)) - roofline.plan_ns(silent) == pytest.approx(roofline.output_ns(1), abs=1)


def test_decodes_beside_a_prompt_can_be_slower() -> None:
    slower = Roofline(gpu=replace(PLAIN, mixed_decode_factor=2), shape=TINY)
    usual = Roofline(gpu=PLAIN, shape=TINY)
    assert slower.attention_ns(4, 5_000, 0, 0) == usual.attention_ns(4, 5_000, 0, 0)
    alone_ns = usual.attention_ns(4, 5_000, 0, 0) - PLAIN.decode_floor_ns
    assert slower.attention_ns(4, 5_000, 5, 20) - usual.attention_ns(4, 5_000, 5, 20) == pytest.approx(alone_ns)


def test_shards_divide_the_weights_and_add_the_sums() -> None:
    half = replace(TINY, num_shards=2)
    assert half.weight_bytes == pytest.approx(TINY.weight_bytes / 2)
    near = Roofline(gpu=PLAIN, shape=half, reduce_bytes_per_s=1e30)
    far = replace(near, reduce_floor_ns=20_000, reduce_bytes_per_s=16e9)
    assert far.layers_ns(10) - near.layers_ns(10) == pytest.approx(2 * 2 * (20_000 + 2 * 10 * 256 / 16))


@pytest.mark.parametrize("name", [f"{gpu}:{shape}" for gpu in GPUS for shape in SHAPES])
def test_preset_reads_its_weights_once_a_step_at_a_plausible_rate(name: str) -> None:
    """One decode row takes the weights' bytes at 30 to 100 % of the bandwidth, or is bound by floors or the host."""
    preset = find_preset(name)
    assert preset is not None
    gpu, shape = preset.gpu, preset.shape
    assert shape.weight_bytes < gpu.memory_bytes
    read_ns = shape.weight_bytes / gpu.bytes_per_s * 1e9
    floors_ns = 45_000 * shape.num_layers + 200_000
    assert read_ns < preset.plan_ns(decodes(1, 100)) < read_ns / 0.3 + floors_ns
    assert preset.plan_ns(decodes(64, 1_000)) > preset.plan_ns(decodes(1, 1_000))
    assert preset.plan_ns(prompt(4_096)) > preset.plan_ns(prompt(512)) > preset.plan_ns(decodes(1, 512))


def test_faster_gpu_is_faster() -> None:
    presets = [find_preset(f"{gpu}:llama-3.1-8b") for gpu in ("a100", "h100", "h200")]
    a100, h100, h200 = (preset.plan_ns(decodes(64, 2_000)) for preset in presets if preset)
    assert a100 > h100 > h200


def test_weights_are_those_of_the_model() -> None:
    """Parameters as their model cards count them, without the input embedding and the norms."""
    assert SHAPES["llama-3.1-8b"].weight_bytes / 2 == pytest.approx(8.03e9 - 128_256 * 4_096, rel=0.001)
    assert SHAPES["qwen3-32b"].weight_bytes / 2 == pytest.approx(32.8e9 - 151_936 * 5_120, rel=0.005)


def test_preset_is_plain_data_and_says_where_it_comes_from() -> None:
    preset = find_preset("H200:Llama-3.1-8B")
    assert preset == find_preset("h200:llama-3.1-8b")
    assert preset is not None
    preset.plan_ns(decodes(1, 1))
    assert asdict(preset)["shape"]["num_layers"] == 32
    assert preset.source.startswith("h200:llama-3.1-8b, a roofline")


def test_name_that_is_neither_preset_nor_file_lists_the_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CostError, match=r"no preset 'h300:llama-3.1-8b'.*h200.*llama-3.1-8b"):
        find_preset("h300:llama-3.1-8b")
    with pytest.raises(CostError, match=r"no preset 'H200'"):
        find_preset("H200")
    assert find_preset("cost.json") is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd:name.json").touch()
    assert find_preset("odd:name.json") is None
