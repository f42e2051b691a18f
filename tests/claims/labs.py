"""Labs of virtual time for tests, and what claims come to on them."""

from __future__ import annotations

from collections.abc import Mapping

from everystop.claims.findings import Figure, Findings
from everystop.claims.lab import VirtualLab
from everystop.sim.cost import CostModel

TWO_CORES = CostModel(step_ns=5.5e6, token_ns=3.86e5, host_ns=1e5)


def make_lab(num_repeats: int = 1, cost: CostModel = TWO_CORES) -> VirtualLab:
    return VirtualLab(cost, num_repeats)


def figures_of(findings: Findings) -> Mapping[str, Figure]:
    """All figures by name."""
    decisive = [condition.figure for condition in findings.conditions]
    return {figure.name: figure for figure in (*decisive, *findings.figures)}
