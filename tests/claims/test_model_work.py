from __future__ import annotations

from everystop.claims.model_work import model_work
from everystop.model.spec import DecoderSpec

SPEC = DecoderSpec(
    architecture="llama",
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=100,
    max_position=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)


def test_work_counts_two_operations_for_each_weight_of_a_linear_layer() -> None:
    attention = 8 * (8 + 4 + 4) + 8 * 8  # queries, keys and values, then the output
    work = model_work(SPEC, 1234)
    assert work.operations_per_row == 2 * (2 * (attention + 3 * 8 * 16) + 100 * 8)
    assert work.bytes_per_step == 1234
