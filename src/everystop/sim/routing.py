"""Routers: which replica gets an arriving request. A router sees what the replicas hold at that moment, no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from everystop.core.errors import ConfigError

AFFINITY_SLACK = 8


class Station(Protocol):
    """What a router may ask of a replica."""

    def num_present(self, now_ns: int) -> int:
        """Requests that have been sent to it and have not ended by then."""
        ...

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """How many of these block keys, from the first on, its prefix cache holds."""
        ...


Router = Callable[[Sequence[Station], Sequence[bytes], int], int]


class RoundRobin:
    """Each in turn, whatever it holds."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, stations: Sequence[Station], keys: Sequence[bytes], now_ns: int) -> int:
        chosen = self._next
        self._next = (chosen + 1) % len(stations)
        return chosen


def least_loaded(stations: Sequence[Station], keys: Sequence[bytes], now_ns: int) -> int:
    """The one with the fewest requests; the first of several."""
    loads = [station.num_present(now_ns) for station in stations]
    return loads.index(min(loads))


def prefix_affinity(stations: Sequence[Station], keys: Sequence[bytes], now_ns: int) -> int:
    """The one whose cache holds most of the prompt, among those with at most 8 requests more than the least loaded;
    of several the least loaded. It asks the caches themselves, which is the best that such a router can know.
    """
    loads = [station.num_present(now_ns) for station in stations]
    limit = min(loads) + AFFINITY_SLACK
    near = [i for i, load in enumerate(loads) if load <= limit]
    return min(near, key=lambda i: (-stations[i].num_matched(keys), loads[i], i))


ROUTERS = ("round-robin", "least-loaded", "prefix-affinity")


def make_router(name: str) -> Router:
    """The router of that name; raises ConfigError for another."""
    if name == "round-robin":
        return RoundRobin()
    if name == "least-loaded":
        return least_loaded
    if name == "prefix-affinity":
        return prefix_affinity
    raise ConfigError(f"--router is {name!r}; choose one of {', '.join(ROUTERS)}")
