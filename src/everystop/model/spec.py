"""`DecoderSpec`: the numbers and kinds that describe a decoder; knows nothing of files or tensors' contents."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from everystop.core.errors import UnsupportedModel

Float32Array = npt.NDArray[np.float32]

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("none", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the rotary frequencies are stretched; fields that a kind does not use keep their defaults.

    `linear` divides all frequencies by `factor`. `llama3` divides those whose wavelength passes
    `original_max_position / low_freq_factor` and blends up to `high_freq_factor`. `yarn` blends by rotations (arXiv
    2309.00071). `factors` divides each frequency by its own number, as GGUF files of Llama 3.1 bring them
    (`rope_freqs.weight`).
    """

    kind: str = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """One pre-norm decoder: RMSNorm, rotary attention with grouped KV heads, SiLU-gated MLP.

    `max_position` is the longest sequence in tokens, `vocab_size` the rows of the embedding, which may exceed the
    tokenizer's ids.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope: RopeScaling = RopeScaling()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def q_size(self) -> int:
        """Outputs of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights that are stored: a tied embedding counts once."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size) + self.qkv_bias * (
            self.q_size + 2 * self.kv_size
        )
        layer = (
            attention
            + 3 * self.hidden_size * self.intermediate_size
            + 2 * self.hidden_size
            + 2 * self.qk_norm * self.head_dim
        )
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def check_spec(spec: DecoderSpec, source: str) -> DecoderSpec:
    """Return `spec`; raise UnsupportedModel, naming `source`, where its numbers cannot belong to a decoder of this
    kind.
    """
    sizes = (
        "num_layers",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab_size",
        "max_position",
    )
    limits = {"num_layers": 1024, "vocab_size": 1 << 22, "max_position": 1 << 30}
    for name in sizes:
        value = getattr(spec, name)
        if not 1 <= value <= limits.get(name, 1 << 20):
            raise UnsupportedModel(f"{source}: {name} is {value:,}; expected 1 to {limits.get(name, 1 << 20):,}")
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModel(
            f"{source}: {spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly"
        )
    if spec.head_dim % 2:
        raise UnsupportedModel(f"{source}: head_dim is {spec.head_dim}; rotary embeddings need an even number")
    if not 0 < spec.rms_norm_eps < 1 or not 1 < spec.rope_theta < math.inf:
        raise UnsupportedModel(
            f"{source}: rms_norm_eps {spec.rms_norm_eps} or rope_theta {spec.rope_theta} is out of range"
        )
    _check_rope(spec, source)
    return spec


def _check_rope(spec: DecoderSpec, source: str) -> None:
    rope = spec.rope
    if rope.kind not in ROPE_KINDS:
        raise UnsupportedModel(
            f"{source}: rope scaling of kind {rope.kind!r} is not supported; supported: {', '.join(ROPE_KINDS[:4])}"
        )
    if not 0 < rope.factor < math.inf:
        raise UnsupportedModel(f"{source}: rope scaling factor is {rope.factor}; it must be above 0")
    if rope.kind in ("llama3", "yarn") and not 1 <= rope.original_max_position <= 1 << 30:
        raise UnsupportedModel(f"{source}: rope scaling {rope.kind} without its original context length")
    if rope.kind == "yarn" and not 0 < rope.beta_slow <= rope.beta_fast < 1e6:
        raise UnsupportedModel(
            f"{source}: rope beta_slow {rope.beta_slow} and beta_fast {rope.beta_fast} are no bounds"
        )
    if rope.kind == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        raise UnsupportedModel(
            f"{source}: rope low_freq_factor {rope.low_freq_factor} must be below "
            f"high_freq_factor {rope.high_freq_factor}"
        )
    if rope.kind == "factors" and (
        len(rope.factors) != spec.head_dim // 2 or not all(0 < f < math.inf for f in rope.factors)
    ):
        raise UnsupportedModel(
            f"{source}: {len(rope.factors)} rope factors; expected {spec.head_dim // 2} numbers above 0"
        )


def rope_frequencies(spec: DecoderSpec) -> tuple[Float32Array, float]:
    """The inverse frequencies, float32 [head_dim / 2], and the factor on cos and sin.

    Computed in the order of operations of transformers (`modeling_rope_utils.py`), so that both rotate alike: channel
    i of the first half of a head turns with channel i of the second by `position · inv_freq[i]`.
    """
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    # In float64, rounded once: numpy's own float32 power is off by a bit in a third of the cases.
    wave: Float32Array = np.power(spec.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    inv_freq: Float32Array = np.float32(1.0) / wave
    rope = spec.rope
    if rope.kind == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.kind == "factors":
        factors: Float32Array = np.array(rope.factors, dtype=np.float32)
        return inv_freq / factors, 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(inv_freq, rope), 1.0
    if rope.kind == "yarn":
        return _yarn_frequencies(wave, spec), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def _llama3_frequencies(inv_freq: Float32Array, rope: RopeScaling) -> Float32Array:
    """Long waves are divided by the factor, short ones kept, those between blended (Llama 3.1 model card)."""
    context, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelength = np.float32(2 * math.pi) / inv_freq
    scaled = np.where(wavelength > context / low, inv_freq / np.float32(rope.factor), inv_freq)
    smooth = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * scaled / np.float32(rope.factor) + smooth * scaled
    medium = (wavelength >= context / high) & (wavelength <= context / low)
    return np.where(medium, blended, scaled).astype(np.float32)


def _yarn_frequencies(wave: Float32Array, spec: DecoderSpec) -> Float32Array:
    """Channels that turn often keep their frequency, slow ones are interpolated, a linear ramp between (arXiv
    2309.00071).
    """
    rope, dim = spec.rope, spec.head_dim

    def channel(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(spec.rope_theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp: Float32Array = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep: Float32Array = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    extrapolated = np.float32(1) / wave
    interpolated = np.float32(1) / (np.float32(rope.factor) * wave)
    blended: Float32Array = interpolated * (np.float32(1) - keep) + extrapolated * keep
    return blended


def _yarn_attention_factor(rope: RopeScaling) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
