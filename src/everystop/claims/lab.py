"""Where claims are measured: runs of workloads under policies, in turns, on an engine or in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from everystop.claims.machine_limits import MachineLimits, ModelWork, measure_limits, model_work
from everystop.config import Config
from everystop.core.errors import EverystopError
from everystop.observe.comparison import Run
from everystop.sim.cost import CostModel, StepCost
from everystop.sim.workloads import Workload, make_workload
from everystop.trial.bench import Bench, describe_machine
from everystop.trial.on_engine import EngineRun, Sampling, check_workload
from everystop.trial.repeats import warm_up_workload
from everystop.trial.virtual import VirtualRun

NUM_SLOTS = 16
MAX_SLOTS, MAX_STEP_TOKENS = 256, 2048  # what a bench has room for; each run has limits of its own below
KV_CACHE_BYTES = 1 << 30
KV_CACHE_TOKENS = 46_592  # what that holds of SmolLM2-135M, whatever the block size
NUM_WARM_UP_JOBS = 16
BENCH_FLAGS = ("block_size", "kv_cache_memory")  # other memory, so another bench; the weights are mapped again


@dataclass(frozen=True, slots=True)
class Trial:
    """A workload under a policy; `flags` are the fields of `Config` that differ from 16 slots and the defaults."""

    workload: Workload
    policy: str
    flags: Mapping[str, Any] = field(default_factory=dict)

    def config(self, base: Config) -> Config:
        """The configuration of its engine; raises ConfigError."""
        return replace(base, **{"max_num_seqs": NUM_SLOTS, **self.flags}, policy=self.policy)


def kv_bytes(num_tokens: int) -> int:
    """Memory of a KV cache that holds so many tokens of SmolLM2-135M, for the flag `kv_cache_memory`."""
    return -(-num_tokens * KV_CACHE_BYTES // KV_CACHE_TOKENS)


class Watcher(Protocol):
    """Hears how far the measurements have come."""

    def begin(self, words: str) -> None:
        """Something begins."""
        ...

    def advance(self, num_over: int, num_all: int) -> None:
        """So many of its requests are over."""
        ...


class Lab(Protocol):
    """What claims measure with; `num_repeats` is how often each trial runs where the claim does not say less."""

    num_repeats: int

    def runs(self, trials: Mapping[str, Trial], num_repeats: int | None = None) -> dict[str, list[Run]]:
        """Each trial so many times, in turns (A B A B …), so that whatever else the machine does meets all of them."""
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


def in_turns(
    trials: Mapping[str, Trial], num_repeats: int, play: Callable[[str, Trial, int], Run]
) -> dict[str, list[Run]]:
    """All trials, then all of them again."""
    found: dict[str, list[Run]] = {name: [] for name in trials}
    for repeat in range(num_repeats):
        for name, trial in trials.items():
            found[name].append(play(name, trial, repeat))
    return found


def check_outputs(trials: Mapping[str, Trial], runs: Mapping[str, Sequence[Run]]) -> None:
    """Raise LabError unless no request failed, and each had the same output in all runs of its workload."""
    first: dict[int, tuple[str, list[str]]] = {}
    for name, trial in trials.items():
        for run in runs[name]:
            for line in run.requests:
                if line.error is not None:
                    raise LabError(f"{name}: request {line.index} failed ({line.error}), so nothing can be concluded")
            digests = [line.digest for line in run.requests]
            other, expected = first.setdefault(id(trial.workload), (name, digests))
            if digests != expected:
                raise LabError(
                    f"outputs of the same requests differ between {other} and {name}, so they did not do equal work; "
                    "please report this"
                )


def simulate(trial: Trial, cost: StepCost, num_blocks: int | None = None) -> Run:
    """A trial in virtual time; by default with the blocks that an engine would have."""
    config = trial.config(Config())
    num_tokens = (config.kv_cache_memory or KV_CACHE_BYTES) * KV_CACHE_TOKENS // KV_CACHE_BYTES
    num_blocks = num_blocks or num_tokens // config.block_size
    return VirtualRun(trial.workload, config, cost, num_blocks=num_blocks).play(trial.policy, 0)


class EngineLab:
    """Runs on engines of this process, with the model loaded once for each size of KV block and cache."""

    def __init__(self, base: Config, num_repeats: int, watcher: Watcher) -> None:
        self.num_repeats = num_repeats
        self._base = base
        self._watcher = watcher
        self._benches: dict[tuple[Any, ...], Bench] = {}
        self._limits: MachineLimits | None = None

    def runs(self, trials: Mapping[str, Trial], num_repeats: int | None = None) -> dict[str, list[Run]]:
        """As `Lab.runs`; the first run on a bench comes after a warm-up."""
        wanted = min(self.num_repeats, num_repeats or self.num_repeats)
        for trial in trials.values():
            self._bench(trial)

        def play(name: str, trial: Trial, repeat: int) -> Run:
            self._watcher.begin(f"{name}, {repeat + 1} of {wanted}")
            return self._play(trial, repeat)

        found = in_turns(trials, wanted, play)
        check_outputs(trials, found)
        return found

    def simulate(self, trial: Trial, cost: StepCost, num_blocks: int | None = None) -> Run:
        """As `Lab.simulate`."""
        self._watcher.begin("in virtual time")
        return simulate(trial, cost, num_blocks)

    def limits(self) -> MachineLimits:
        """Measured once."""
        if self._limits is None:
            self._watcher.begin("the machine's limits")
            self._limits = measure_limits(self._any_bench().num_threads)
        return self._limits

    def work(self) -> ModelWork:
        """Of the loaded model."""
        bench = self._any_bench()
        return model_work(bench.spec, bench.num_step_bytes)

    def describe(self) -> dict[str, Any]:
        """As the bench and the machine say."""
        return {**self._any_bench().describe(), **describe_machine()}

    def close(self) -> None:
        """Free memory and threads."""
        while self._benches:
            self._benches.popitem()[1].close()

    def _any_bench(self) -> Bench:
        return next(iter(self._benches.values()), None) or self._open(self._bench_config({}))

    def _bench(self, trial: Trial) -> Bench:
        config = self._bench_config(trial.flags)
        return self._benches.get(_key(config)) or self._open(config)

    def _bench_config(self, flags: Mapping[str, Any]) -> Config:
        sized = {name: flags[name] for name in BENCH_FLAGS if name in flags}
        config = replace(self._base, max_num_seqs=MAX_SLOTS, max_num_batched_tokens=MAX_STEP_TOKENS)
        return replace(config, **{"kv_cache_memory": KV_CACHE_BYTES, **sized})

    def _open(self, config: Config) -> Bench:
        self._watcher.begin("warm-up")
        bench = self._benches[_key(config)] = Bench(config)
        self._play(Trial(warm_up_workload(make_workload("straggler"), NUM_WARM_UP_JOBS), "continuous"), 0, bench)
        return bench

    def _play(self, trial: Trial, repeat: int, bench: Bench | None = None) -> Run:
        config = trial.config(self._base)
        bench = bench or self._bench(trial)
        if wrong := check_workload(trial.workload, bench.num_valid_tokens):
            raise LabError(f"{wrong[0]} ({len(wrong)} such); measure claims on a model with more token ids")
        run = EngineRun(trial.workload, bench.engine(config), Sampling())
        return run.play(trial.policy, repeat, config.max_num_seqs, self._watcher.advance)


def _key(config: Config) -> tuple[Any, ...]:
    return tuple(getattr(config, name) for name in BENCH_FLAGS)


class VirtualLab:
    """Runs in virtual time with a given cost; what a claim counts comes out exactly as on an engine."""

    def __init__(self, cost: CostModel, num_repeats: int = 2) -> None:
        self.num_repeats = num_repeats
        self._cost = cost

    def runs(self, trials: Mapping[str, Trial], num_repeats: int | None = None) -> dict[str, list[Run]]:
        """As `Lab.runs`; all repeats would be alike, so each trial runs once."""
        wanted = min(self.num_repeats, num_repeats or self.num_repeats)
        once = {name: simulate(trial, self._cost) for name, trial in trials.items()}
        return {name: [replace(run, repeat=repeat) for repeat in range(wanted)] for name, run in once.items()}

    def simulate(self, trial: Trial, cost: StepCost, num_blocks: int | None = None) -> Run:
        """As `Lab.simulate`."""
        return simulate(trial, cost, num_blocks)

    def limits(self) -> MachineLimits:
        """Of a machine that does not exist."""
        return MachineLimits(operations_per_s=1e12, bytes_per_s=3e10)

    def work(self) -> ModelWork:
        """About what SmolLM2-135M asks for."""
        return ModelWork(operations_per_row=2.7e8, bytes_per_step=1.43e8)

    def describe(self) -> dict[str, Any]:
        """Nothing was measured."""
        return {"model_id": "none", "cpu": "virtual time"}
