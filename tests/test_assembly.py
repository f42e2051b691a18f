"""What is decided when the parts are put together."""

from __future__ import annotations

import pytest

from everystop import assembly
from everystop.backend import CPU, CUDA, TORCH, Backend
from everystop.config import Config
from everystop.core.errors import ConfigError
from everystop.model.spec import DecoderSpec
from everystop.model.weights import LoadedModel
from everystop.runner.native import bytes_per_block

BLOCK_BYTES = 1 << 20


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> DecoderSpec:
    monkeypatch.setattr(assembly, "allowed_memory_bytes", lambda: 1 << 30)
    return DecoderSpec(
        architecture="llama", num_layers=1, hidden_size=64, intermediate_size=64, num_heads=1, num_kv_heads=1,
        head_dim=64, vocab_size=100, max_position=1024, rms_norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip


def test_cache_takes_a_quarter_of_the_memory_or_what_it_can_use(spec: DecoderSpec) -> None:
    assert assembly.plan_capacity(Config(), spec, BLOCK_BYTES).num_blocks == 256
    assert assembly.plan_capacity(Config(max_num_seqs=2), spec, BLOCK_BYTES).num_blocks == 2 * 1024 // 32


def test_cache_for_more_than_the_machine_allows_is_refused(spec: DecoderSpec) -> None:
    config = Config(kv_cache_memory=(1 << 30) + 1)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory is 1,073,741,825 bytes.* 1,073,741,824"):
        assembly.plan_capacity(config, spec, BLOCK_BYTES)
    with pytest.raises(ConfigError, match="no block of 32 tokens"):
        assembly.plan_capacity(Config(kv_cache_memory=BLOCK_BYTES - 1), spec, BLOCK_BYTES)
    assert assembly.plan_capacity(Config(kv_cache_memory=1 << 30), spec, BLOCK_BYTES).num_blocks == 1024


@pytest.mark.parametrize(
    ("dtype", "flag", "stored"),
    [("int8", "auto", "int8"), ("float32", "auto", "float32"), ("float32", "float16", "float16"),
     ("int8", "float16", "float16"), ("int8", "int8", "int8"), ("float32", "int8", "int8")],
)  # fmt: skip
def test_cache_stores_what_is_said_or_what_goes_with_the_weights(
    spec: DecoderSpec, dtype: str, flag: str, stored: str
) -> None:
    loaded = LoadedModel(spec=spec, dtype=dtype, layout="", weights={}, from_cache=False, notes=())
    assert assembly.kv_cache_dtype(Config(kv_cache_dtype=flag), loaded) == stored


def test_the_same_memory_holds_nearly_twice_the_tokens_in_int8(spec: DecoderSpec) -> None:
    """Heads of 64: 256 bytes a token in float16, 128 and two scales of 4 in int8."""
    num_tokens = {
        stored: assembly.plan_capacity(
            Config(kv_cache_memory=1 << 24), spec, bytes_per_block(spec, 32, stored)
        ).num_tokens
        for stored in ("float32", "float16", "int8")
    }
    assert num_tokens["float16"] == 2 * num_tokens["float32"] == (1 << 24) // 256
    assert num_tokens["int8"] == (1 << 24) // 136 // 32 * 32
    assert num_tokens["int8"] > 1.88 * num_tokens["float16"]


def test_what_the_cache_holds_is_known_from_headers_but_on_a_gpu(spec: DecoderSpec) -> None:
    pytest.importorskip("torch")
    config = Config(kv_cache_memory=1 << 24)
    of_cpu = assembly.known_capacity(config, spec, Backend(CPU, "int8", True))
    assert of_cpu == assembly.plan_capacity(config, spec, bytes_per_block(spec, 32, "int8"))
    of_torch = assembly.known_capacity(config, spec, Backend(TORCH, "bfloat16", False))
    of_gpu = assembly.known_capacity(config, spec, Backend(CUDA, "bfloat16", False))
    assert of_torch is not None
    assert of_gpu is not None
    assert of_torch.num_blocks == (1 << 24) // (2 * 32 * 64 * 2)
    assert of_gpu.num_blocks == of_torch.num_blocks - 1, "one is spare"
    assert assembly.known_capacity(Config(), spec, Backend(CUDA, "bfloat16", False)) is None
    for device, dtype in ((CPU, "int8"), (TORCH, "float32"), (CUDA, "bfloat16")):
        backend = Backend(device, dtype, False)
        with pytest.raises(ConfigError, match="no block of 32 tokens"):
            assembly.known_capacity(Config(kv_cache_memory=1), spec, backend)
        with pytest.raises(ConfigError, match=r"--max-model-len is 1,025"):
            assembly.known_capacity(Config(max_model_len=1025), spec, backend)


def test_longest_sequence_is_bounded_by_model_and_cache(spec: DecoderSpec) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len is 1,025.* 1,024 tokens"):
        assembly.plan_capacity(Config(max_model_len=1025), spec, BLOCK_BYTES)
    capacity = assembly.plan_capacity(Config(kv_cache_memory=2 * BLOCK_BYTES), spec, BLOCK_BYTES)
    assert (capacity.max_model_len, capacity.num_longest_requests) == (64, 1)
