"""What one step of a model asks of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from everystop.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Operations (a multiplication and an addition are two) of the linear layers for one decoding row, and bytes of
    weights that a step reads, however many rows it has.
    """

    operations_per_row: float
    bytes_per_step: float


def model_work(spec: DecoderSpec, bytes_per_step: int) -> ModelWork:
    """Attention is left out: it grows with the context, and is small where contexts are short."""
    layer = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size)
    num_weights = spec.num_layers * layer + spec.vocab_size * spec.hidden_size
    return ModelWork(operations_per_row=2.0 * num_weights, bytes_per_step=float(bytes_per_step))
