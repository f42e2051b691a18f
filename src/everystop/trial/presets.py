"""The workloads that `everystop compare` brings along, each with the number of slots at which it tells something.

They are smaller than those of the same name in `sim.workloads`, so that five repeats of two policies take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everystop.sim.workloads import Dice, Job, Kind, Workload, poisson

DEFAULT = "straggler"


@dataclass(frozen=True, slots=True)
class Preset:
    """A workload of a seed, and the slots to run it on; `title` is what it asks."""

    title: str
    make: Callable[[Dice], Workload]
    max_num_seqs: int = 16

    def workload(self, name: str, seed: int) -> Workload:
        """Another seed makes other prompts, and other lengths where these are drawn."""
        return self.make(Dice(name, seed))


def _straggler(dice: Dice) -> Workload:
    """64 clients at once; the first of each 16 wants 300 tokens, the others 20."""
    jobs = []
    for i in range(64):
        group, max_tokens = ("long", 300) if i % 16 == 0 else ("short", 20)
        jobs.append(Job(prompt=dice.prompt(dice.between(20, 28)), max_tokens=max_tokens, group=group))
    return Workload("straggler", 64, tuple(jobs))


def _chat(dice: Dice) -> Workload:
    """32 clients with 2 requests each, prompts uniform and answers log-normal between 40 and 200 tokens."""
    jobs = (Job(prompt=dice.prompt(dice.between(40, 200)), max_tokens=dice.log_normal(40, 200)) for _ in range(64))
    return Workload("chat", 32, tuple(jobs))


def _uniform(dice: Dice) -> Workload:
    """64 requests of equal lengths at once."""
    return Workload("uniform", 64, tuple(Job(prompt=dice.prompt(64), max_tokens=64) for _ in range(64)))


def _stall(dice: Dice) -> Workload:
    """8 clients that chat, and somebody else's prompt of 1,500 tokens every second and a half."""
    chats = (Job(prompt=dice.prompt(64), max_tokens=dice.between(100, 150), group="chat") for _ in range(24))
    intruders = (Job(prompt=dice.prompt(1500), max_tokens=8, group="intruder", at_s=0.5 + 1.5 * i) for i in range(3))
    return Workload("stall", 8, (*chats, *intruders))


def _shared(dice: Dice) -> Workload:
    """48 requests from 32 clients with the same first 512 tokens and 16 to 64 of their own."""
    prefix = dice.prompt(512)
    jobs = (Job(prompt=prefix + dice.prompt(dice.between(16, 64)), max_tokens=32) for _ in range(48))
    return Workload("shared", 32, tuple(jobs))


def _prefill(dice: Dice) -> Workload:
    """12 prompts of about 700 tokens from 8 clients, next to no answer."""
    jobs = (Job(prompt=dice.prompt(dice.between(650, 750)), max_tokens=4) for _ in range(12))
    return Workload("prefill", 8, tuple(jobs))


def _low_load(dice: Dice) -> Workload:
    """Requests that come one by one, about two a second for six seconds: mostly nobody waits."""
    kind = Kind(prompt=(20, 60), output=(20, 60))
    return Workload("low-load", 0, tuple(poisson(dice, kind, "", per_s=2.0, seconds=6.0)))


PRESETS: Mapping[str, Preset] = {
    "straggler": Preset("one long answer in each sixteen", _straggler),
    "chat": Preset("answers of all lengths", _chat),
    "uniform": Preset("equal lengths: static batching loses next to nothing", _uniform),
    "stall": Preset("long prompts among chats", _stall),
    "shared": Preset("one long common prefix", _shared),
    "prefill": Preset("long prompts, next to no answers", _prefill, max_num_seqs=8),
    "low-load": Preset("requests one by one: nobody to batch with", _low_load),
}
