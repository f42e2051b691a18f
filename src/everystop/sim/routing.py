"""Routers: which replica gets a request, and when. A router sees what the replicas hold at that moment, no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from everystop.core.errors import ConfigError
from everystop.core.events import Event
from everystop.core.limits import Limits
from everystop.core.policy import Share
from everystop.core.request import Request

AFFINITY_SLACK = 8


class Station(Protocol):
    """What a router may ask of a replica."""

    def num_present(self, now_ns: int) -> int:
        """Requests that have been sent to it and have not ended by then."""
        ...

    def num_matched(self, keys: Sequence[bytes]) -> int:
        """How many of these block keys, from the first on, its prefix cache holds."""
        ...


Sending = tuple[int, Request]  # index of a replica, and who goes there


class Router(Protocol):
    """Sends each request to a replica: at once, or when one has a place for it.

    Only a router with `is_late` keeps requests; it hears what comes out of the replicas, at the time when it does.
    What it yields is sent before it is asked for the next.
    """

    is_late: bool

    def take(self, request: Request, stations: Sequence[Station], now_ns: int) -> Iterable[Sending]:
        """A request arrives: who is sent now."""
        ...

    def hear(self, index: int, events: Sequence[Event], stations: Sequence[Station], now_ns: int) -> Iterable[Sending]:
        """A step of that replica has ended: who is sent now."""
        ...

    def refused(self, index: int, request: Request) -> None:
        """The replica would not take a request that was sent there."""
        ...

    def waiting_tenants(self) -> Iterable[str]:
        """Whose requests it keeps."""
        ...


class AtOnce:
    """A router that decides when a request arrives; `choose` gets the replicas, the block keys and the time."""

    is_late = False

    def __init__(self, choose: Callable[[Sequence[Station], Sequence[bytes], int], int]) -> None:
        self._choose = choose

    def take(self, request: Request, stations: Sequence[Station], now_ns: int) -> Iterable[Sending]:
        """It goes where `choose` says."""
        return ((self._choose(stations, request.block_keys, now_ns), request),)

    def hear(self, index: int, events: Sequence[Event], stations: Sequence[Station], now_ns: int) -> Iterable[Sending]:
        """Nobody is kept."""
        return ()

    def refused(self, index: int, request: Request) -> None:
        """It keeps no account."""

    def waiting_tenants(self) -> Iterable[str]:
        """Nobody is kept."""
        return ()


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
    loads = {i: station.num_present(now_ns) for i, station in enumerate(stations)}
    return nearest(stations, keys, loads)[0]


def nearest(stations: Sequence[Station], keys: Sequence[bytes], loads: Mapping[int, int]) -> tuple[int, int]:
    """Of the replicas in `loads` (requests by index) the one that `prefix_affinity` means, and its matched blocks."""
    limit = min(loads.values()) + AFFINITY_SLACK
    if not keys:
        return min(loads, key=lambda i: (loads[i], i)), 0
    matched = {i: stations[i].num_matched(keys) for i, load in loads.items() if load <= limit}
    chosen = min(matched, key=lambda i: (-matched[i], loads[i], i))
    return chosen, matched[chosen]


ROUTERS = ("round-robin", "least-loaded", "prefix-affinity", "fair")


def make_router(name: str, *, limits: Limits, block_size: int, shares: Mapping[str, Share]) -> Router:
    """The router of that name; raises ConfigError for another. What follows the name concerns `fair` only: the limits
    of each replica, the tokens of a block, and what tenants may use.
    """
    if name == "round-robin":
        return AtOnce(RoundRobin())
    if name == "least-loaded":
        return AtOnce(least_loaded)
    if name == "prefix-affinity":
        return AtOnce(prefix_affinity)
    if name == "fair":
        from everystop.sim.fair_router import FairRouter

        return FairRouter(limits=limits, block_size=block_size, shares=shares)
    raise ConfigError(f"--router is {name!r}; choose one of {', '.join(ROUTERS)}")
