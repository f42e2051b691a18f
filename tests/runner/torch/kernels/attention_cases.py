"""Steps of sequences over a paged cache, for tests of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from everystop.runner.torch.batch import AttentionBatch

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Step:
    """Query rows and caches of a step."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    batch: AttentionBatch

    @property
    def scale(self) -> float:
        """As decoders scale."""
        return float(self.query.shape[2]) ** -0.5

    def only(self, *seqs: int) -> Step:
        """The step with some of its sequences, in the order given."""
        starts = self.batch.query_starts.tolist()
        rows = [self.query[starts[s] : starts[s + 1]] for s in seqs]
        lens = [starts[s + 1] - starts[s] for s in seqs]
        contexts = self.batch.context_lens[list(seqs)]
        batch = replace(
            self.batch,
            block_tables=self.batch.block_tables[list(seqs)],
            query_starts=_starts(lens, self.query.device),
            context_lens=contexts,
            max_query_len=max(lens),
            max_context_len=int(contexts.max()),
        )
        return replace(self, query=torch.cat(rows), batch=batch)

    def rows(self, seq: int) -> slice:
        """Where a sequence's rows are."""
        starts = self.batch.query_starts
        return slice(int(starts[seq]), int(starts[seq + 1]))


def make_step(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    head_dim: int = 64,
    group: int = 2,
    num_kv_heads: int = 2,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Step:
    """A step over shuffled blocks of caches that are views, as the runner's are.

    Whatever must not be read is NaN: the ends of last blocks, and block 0, which tables name beyond a context.
    """
    random = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // block_size) for length in context_lens]
    total = sum(num_blocks) + 3
    order = torch.randperm(total - 1, generator=random) + 1
    caches = torch.full((total, 2, block_size, num_kv_heads, head_dim), torch.nan)
    tables = torch.zeros((len(context_lens), max(num_blocks) + 2), dtype=torch.int32)
    used = 0
    for seq, (length, count) in enumerate(zip(context_lens, num_blocks, strict=True)):
        blocks = order[used : used + count]
        tables[seq, :count] = blocks.int()
        used += count
        for i in range(length):
            cell = caches[blocks[i // block_size], :, i % block_size]
            cell.copy_(torch.randn(cell.shape, generator=random))
    num_heads = group * num_kv_heads
    fused = torch.randn((sum(query_lens), num_heads + 2 * num_kv_heads, head_dim), generator=random)
    caches, fused = caches.to(device, dtype), fused.to(device, dtype)
    batch = AttentionBatch(
        tables.to(device),
        _starts(query_lens, device),
        torch.tensor(context_lens, dtype=torch.int32, device=device),
        max(query_lens),
        max(context_lens),
    )
    return Step(fused[:, :num_heads], caches[:, 0], caches[:, 1], batch)


def _starts(lens: Sequence[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int().to(device)
