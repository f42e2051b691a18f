"""What claims are measured with: runs of workloads under policies, in turns, on servers or in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from everystop.claims.model_work import ModelWork
from everystop.config import Config
from everystop.core.errors import EverystopError
from everystop.observe.comparison import Run
from everystop.sim.cost import CostModel, StepCost
from everystop.sim.workloads import Workload
from everystop.trial.machine_limits import MachineLimits
from everystop.trial.repeats import in_turn
from everystop.trial.virtual import VirtualRun

NUM_SLOTS = 16
KV_CACHE_TOKENS = 46_592  # a GiB of SmolLM2-135M in float16, whatever the block size
PREFILL_UNBOUNDED = {"max_prefill_per_decode": 0}  # prompts take what a step may hold, whatever decodes and waits
FILL_WAIT_MS = 1000  # a static batch of requests that are all there is full long before
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Trial:
    """A workload under a policy; `flags` are the fields of `Config` that differ from 16 slots, a static batch that gets
    time to fill, and the defaults. `kv_tokens` fit into the KV cache, whatever the model.
    """

    workload: Workload
    policy: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    kv_tokens: int = KV_CACHE_TOKENS

    def config(self, base: Config) -> Config:
        """The configuration of its server; raises ConfigError."""
        usual = {"max_num_seqs": NUM_SLOTS} | ({"batch_wait_ms": FILL_WAIT_MS} if self.policy == "static" else {})
        return replace(base, **{**usual, **self.flags}, policy=self.policy)


class Watcher(Protocol):
    """Hears how far the measurements have come."""

    def begin(self, words: str) -> None:
        """Something begins."""
        ...

    def advance(self, num_over: int, num_all: int) -> None:
        """So many of its requests are over."""
        ...


class Lab(Protocol):
    """What claims measure with."""

    @property
    def num_repeats(self) -> int:
        """How often each trial runs."""
        ...

    @property
    def client_cpu_s(self) -> float:
        """What all clients so far have computed."""
        ...

    def runs(self, trials: Mapping[str, Trial], *, once: bool = False) -> dict[str, list[Run]]:
        """Each trial so often, or once, in turns (A B B A …), so that what else the machine does meets all of them."""
        ...

    def simulate(self, trial: Trial, cost: StepCost, num_blocks: int | None = None) -> Run:
        """A trial in virtual time, with the real scheduler and the real allocator of KV blocks."""
        ...

    def limits(self) -> MachineLimits:
        """What the machine can do at most."""
        ...

    def work(self) -> ModelWork:
        """What a step of the model asks of the machine."""
        ...

    def describe(self) -> dict[str, Any]:
        """Model and machine."""
        ...


class LabError(EverystopError):
    """A run from which nothing can be concluded: a request failed, or outputs differ between runs of one workload."""


def in_turns(trials: Mapping[str, Trial], num_repeats: int, play: Callable[[str, Trial, int], T]) -> dict[str, list[T]]:
    """All trials, then all of them again, backwards in each second repeat."""
    found: dict[str, list[T]] = {name: [] for name in trials}
    for repeat in range(num_repeats):
        for name in in_turn(list(trials), repeat):
            found[name].append(play(name, trials[name], repeat))
    return found


def check_outputs(trials: Mapping[str, Trial], runs: Mapping[str, Sequence[Run]], *, same_texts: bool = True) -> None:
    """Raise LabError unless no request failed, and each had the same output in all runs of its workload; without
    `same_texts`, one of the same length.
    """
    first: dict[int, tuple[str, list[str | int]]] = {}
    for name, trial in trials.items():
        for run in runs[name]:
            check_no_errors(name, run)
            outputs = [line.digest if same_texts else line.num_output_tokens for line in run.requests]
            other, expected = first.setdefault(id(trial.workload), (name, outputs))
            if outputs != expected:
                raise LabError(
                    f"outputs of the same requests differ between {other} and {name}, so they did not do equal work; "
                    "please report this"
                )


def check_no_errors(name: str, run: Run) -> None:
    """Raise LabError if a request failed."""
    for line in run.requests:
        if line.error is not None:
            raise LabError(f"{name}: request {line.index} failed ({line.error}), so nothing can be concluded")


def simulate(trial: Trial, cost: StepCost, num_blocks: int | None = None, base: Config | None = None) -> Run:
    """A trial in virtual time; by default with the blocks that a server would have. `base` is what its server has in
    common with all others.
    """
    config = trial.config(base or Config())
    num_blocks = num_blocks or trial.kv_tokens // config.block_size
    return VirtualRun(trial.workload, config, cost, num_blocks=num_blocks).play(trial.policy, 0)


class VirtualLab:
    """Runs in virtual time with a given cost; what is sent at once arrives at once, so what a claim counts is exact."""

    client_cpu_s = 0.0

    def __init__(self, cost: CostModel, num_repeats: int = 2) -> None:
        self.num_repeats = num_repeats
        self._cost = cost

    def runs(self, trials: Mapping[str, Trial], *, once: bool = False) -> dict[str, list[Run]]:
        """As `Lab.runs`; all repeats would be alike, so each trial runs once."""
        played = {name: simulate(trial, self._cost) for name, trial in trials.items()}
        repeats = range(1 if once else self.num_repeats)
        return {name: [replace(run, repeat=repeat) for repeat in repeats] for name, run in played.items()}

    def simulate(self, trial: Trial, cost: StepCost, num_blocks: int | None = None) -> Run:
        """As `Lab.simulate`."""
        return simulate(trial, cost, num_blocks)

    def limits(self) -> MachineLimits:
        """Of a machine that does not exist."""
        return MachineLimits(
            operations_per_s=1e12, bytes_per_s=3e10, operations="GOP/s", bytes="GB/s", how="as they were given"
        )

    def work(self) -> ModelWork:
        """About what SmolLM2-135M asks for."""
        return ModelWork(operations_per_row=2.7e8, bytes_per_step=1.43e8)

    def describe(self) -> dict[str, Any]:
        """Nothing was measured."""
        return {"model_id": "none", "cpu": "virtual time"}
