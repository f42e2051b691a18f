"""All claims, in the order of the page."""

from __future__ import annotations

from everystop.claims import (
    fragmentation,
    full_batch,
    head_of_line,
    larger_batch,
    no_gain,
    price,
    quiet_tenant,
    refill,
    straggler,
    trade,
)
from everystop.claims.claim import Claim

CLAIMS: tuple[Claim, ...] = (
    full_batch.CLAIM,
    straggler.CLAIM,
    head_of_line.CLAIM,
    larger_batch.CLAIM,
    refill.CLAIM,
    trade.CLAIM,
    price.CLAIM,
    fragmentation.CLAIM,
    quiet_tenant.CLAIM,
    no_gain.CLAIM,
)
