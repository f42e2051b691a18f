"""The decoder: one parametric forward pass for all families of `DecoderSpec`; owns no memory beside its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everystop.model.spec import DecoderSpec, rope_frequencies
from everystop.runner.torch.batch import AttentionBatch
from everystop.runner.torch.kernel_set import KernelSet
from everystop.runner.torch.linear import Linear, PlainLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer, with D = hidden_size, F = intermediate_size, Q = q_size, K = kv_size, H = head_dim."""

    attn_norm: Tensor  # [D]
    qkv: Linear  # D -> Q + 2K
    q_norm: Tensor | None  # [H]
    k_norm: Tensor | None  # [H]
    o: Linear  # Q -> D
    mlp_norm: Tensor  # [D]
    gate_up: Linear  # D -> 2F
    down: Linear  # F -> D


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights on one device; a tied `lm_head` is `embed_tokens` again."""

    embed_tokens: Tensor  # [V, D]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    lm_head: PlainLinear  # D -> V

    @property
    def is_tied(self) -> bool:
        """The head is the embedding."""
        return self.lm_head.weight is self.embed_tokens


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a step computes: T tokens of one sequence after the other, each with its position and its slot in the
    cache.
    """

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], block · block_size + offset
    attention: AttentionBatch


class Decoder:
    """A pre-norm decoder: RMSNorm, rotary attention with grouped KV heads, SiLU-gated MLP."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, kernels: KernelSet, max_position: int) -> None:
        self.spec = spec
        self.weights = weights
        self.kernels = kernels
        self._cos_sin = rope_table(spec, max_position).to(weights.norm.device)

    def forward(self, tokens: Tokens, kv: Tensor) -> Tensor:
        """The last layer's output after its norm [T, D]; writes K and V of all tokens to `kv`.

        `kv` is [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], keys at index 0.
        """
        kernels, eps = self.kernels, self.spec.rms_norm_eps
        layers = self.weights.layers
        next_norms = [*(layer.attn_norm for layer in layers[1:]), self.weights.norm]
        residual = self.weights.embed_tokens[tokens.ids]
        x = kernels.rms_norm(residual, layers[0].attn_norm, eps)
        for layer, cache, next_norm in zip(layers, kv, next_norms, strict=True):
            x = self._attend(layer, x, tokens, cache)
            x, residual = kernels.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = layer.down(kernels, kernels.silu_mul(layer.gate_up(kernels, x)))
            x, residual = kernels.add_rms_norm(x, residual, next_norm, eps)
        return x

    def _attend(self, layer: LayerWeights, x: Tensor, tokens: Tokens, cache: Tensor) -> Tensor:
        """Self-attention of x [T, D] over one layer's cache [2, num_blocks, block_size, num_kv_heads, head_dim]."""
        spec, kernels = self.spec, self.kernels
        keys, values = cache[0], cache[1]
        qkv = layer.qkv(kernels, x)
        heads = qkv.view(qkv.shape[0], -1, spec.head_dim)  # [T, H + 2K, head_dim]
        q, k, v = heads.tensor_split([spec.num_heads, spec.num_heads + spec.num_kv_heads], dim=1)
        kernels.rope_write(
            q,
            k,
            v,
            tokens.positions,
            tokens.slots,
            self._cos_sin,
            keys,
            values,
            query_norm=layer.q_norm,
            key_norm=layer.k_norm,
            eps=spec.rms_norm_eps,
        )
        attended = kernels.paged_attention(q, keys, values, tokens.attention, spec.head_dim**-0.5)
        return layer.o(kernels, attended.flatten(1))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of output rows [R, D]: float32 [R, V]."""
        return self.weights.lm_head(self.kernels, hidden).float()


def rope_table(spec: DecoderSpec, max_position: int) -> Tensor:
    """Cosines of each position's angles, then their sines: float32 [max_position, head_dim].

    Example, head_dim 4: row p is (cos pω₀, cos pω₁, sin pω₀, sin pω₁).
    """
    inv_freq, factor = rope_frequencies(spec)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), torch.from_numpy(inv_freq))
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * factor
