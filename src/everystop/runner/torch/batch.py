"""What kernels are told of a step beside its tensors: who attends to what, and how each row is sampled.

All tensors lie on the device; sizes that kernels need to know in advance are plain integers, upper bounds that do not
change while a captured step is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

FAILED = -2
"""What `sample` gives for a row whose logits hold a NaN or an infinity, or of which no token is left."""

MASKED = -3
"""What the runner makes of `FAILED` where the logits were sound, so that all tokens are masked."""

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of a step, their rows packed one after the other.

    Row r of sequence s, of `query_starts[s + 1] - query_starts[s]` rows, stands at position
    `context_lens[s] - rows + r` and attends to positions 0 up to its own. Position p lies in block
    `block_tables[s, p // block_size]` at offset p % block_size.

    Example, two sequences: 3 rows of a prompt of 5 tokens, and 1 row that decodes at position 40.

        query_starts [0, 3, 4]    context_lens [5, 41]    positions of the rows 2, 3, 4, 40

    A captured step is padded with sequences of one row and one position of context in a spare block. Beyond a
    sequence's context, and behind the end of the table, tables hold anything.
    """

    block_tables: Tensor  # int32 [num_seqs, max_blocks]
    query_starts: Tensor  # int32 [num_seqs + 1]
    context_lens: Tensor  # int32 [num_seqs], the step's own rows included
    max_query_len: int
    max_context_len: int

    @property
    def num_seqs(self) -> int:
        """Sequences, the padding included."""
        return self.context_lens.shape[0]


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Numbers to be added to single logits, -inf to forbid a token; one pair of row and id may come several times."""

    rows: Tensor  # int64 [E]
    ids: Tensor  # int64 [E]
    values: Tensor  # float32 [E]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """How each of R rows is sampled, in the order: edits, penalties, mask, then greedy or temperature, top-k, top-p,
    min-p and one draw.

    The draw of a row is keyed by (seed, choice, position). Penalties look at `output_counts` (how often a token is in
    the output) and `is_in_prompt`, tables of all seats in which `seats` says where each row's request sits.
    """

    temperatures: Tensor  # float32 [R]
    top_ks: Tensor  # int32 [R], 0 for all
    top_ps: Tensor  # float64 [R]
    min_ps: Tensor  # float64 [R]
    repetition_penalties: Tensor  # float32 [R]
    presence_penalties: Tensor  # float32 [R]
    frequency_penalties: Tensor  # float32 [R]
    seeds: Tensor  # int64 [R], the 64 bits of the seed
    choices: Tensor  # int32 [R]
    positions: Tensor  # int64 [R], tokens of output before this one
    seats: Tensor  # int64 [R]
    output_counts: Tensor | None  # int32 [num_seats, vocab]; None where nobody has penalties
    is_in_prompt: Tensor | None  # bool [num_seats, vocab]; likewise
    allowed: Tensor | None  # int32 [R, ceil(vocab / 32)], bit i % 32 of word i / 32; None allows all
    edits: LogitEdits | None
    is_greedy: bool  # all rows are
    has_cuts: bool  # some row has top-k, top-p or min-p
