"""All claims, in the order of the page."""

from __future__ import annotations

from everystop.claims import full_batch, head_of_line, larger_batch, refill, straggler
from everystop.claims.claim import Claim

CLAIMS: tuple[Claim, ...] = (
    full_batch.CLAIM,
    straggler.CLAIM,
    head_of_line.CLAIM,
    larger_batch.CLAIM,
    refill.CLAIM,
)
