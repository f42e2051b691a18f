"""Llama-shaped models with random weights: speed needs no meaning."""

from __future__ import annotations

from everystop.model.spec import DecoderSpec
from everystop.runner.torch.device import Device
from everystop.runner.torch.kernel_set import KernelSet
from everystop.runner.torch.loading import TorchModel, random_weights


def _spec(layers: int, hidden: int, inner: int, heads: tuple[int, int], vocab: int, *, tied: bool) -> DecoderSpec:
    return DecoderSpec(
        architecture="llama",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=hidden // heads[0],
        vocab_size=vocab,
        max_position=8192,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        tied_embeddings=tied,
    )


SPECS = {
    "tiny": _spec(2, 128, 256, (4, 2), 512, tied=False),
    "1B": _spec(16, 2048, 8192, (32, 8), 128_256, tied=True),
    "8B": _spec(32, 4096, 14_336, (32, 8), 128_256, tied=False),
}


def random_model(name: str, dtype: str, device: Device, kernels: KernelSet) -> TorchModel:
    """One of `SPECS` with random weights on the device."""
    spec = SPECS[name]
    weights = random_weights(spec, dtype, device.torch_device)
    return TorchModel(spec=spec, dtype=dtype, weights=weights, device=device, kernels=kernels)


def step_flops(spec: DecoderSpec, num_tokens: int, num_logits: int, context: int) -> float:
    """Floating-point operations of a step: two a weight and token, four a head dimension, query and position seen."""
    layers = spec.num_parameters - spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)
    attention = 4 * spec.num_layers * spec.q_size * num_tokens * context
    return 2.0 * layers * num_tokens + 2.0 * spec.vocab_size * spec.hidden_size * num_logits + attention


def kv_bytes_per_token(model: TorchModel) -> int:
    """Bytes of keys and values of one token in all layers."""
    return model.spec.num_layers * 2 * model.spec.kv_size * model.torch_dtype.itemsize
