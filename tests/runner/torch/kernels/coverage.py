"""Covering designs: few cases in which every pair of values of any two factors meets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases that cover all pairs, greedily: each new case takes, value by value, what covers most that is open.

    Deterministic; for f factors of at most v values somewhat above v² cases.
    """
    names = list(factors)
    is_open = {
        (a, i, b, j)
        for a, b in combinations(names, 2)
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
    }
    cases = []
    while is_open:
        a, i, b, j = min(is_open)
        chosen = {a: i, b: j}
        for name in sorted(set(names) - {a, b}):
            gains = [_gain(is_open, names, chosen, name, k) for k in range(len(factors[name]))]
            chosen[name] = gains.index(max(gains))
        is_open -= {(x, chosen[x], y, chosen[y]) for x, y in combinations(names, 2)}
        cases.append({name: factors[name][chosen[name]] for name in names})
    return cases


def _gain(is_open: set[Any], names: list[str], chosen: dict[str, int], name: str, value: int) -> int:
    """How many open pairs a value would cover together with those chosen."""
    pairs = 0
    for other, k in chosen.items():
        first = names.index(other) < names.index(name)
        pairs += ((other, k, name, value) if first else (name, value, other, k)) in is_open
    return pairs
