"""The lab of the real server: `everystop serve` in processes of its own, asked over HTTP by clients in this one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from everystop.claims.lab import (
    LabError,
    Trial,
    Watcher,
    check_no_errors,
    check_outputs,
    in_turns,
    simulate,
)
from everystop.claims.model_work import ModelWork, model_work
from everystop.config import Config
from everystop.core.errors import RecordError
from everystop.observe.comparison import Run
from everystop.sim.cost import StepCost
from everystop.sim.workloads import make_workload
from everystop.trial.bench import Bench, describe_machine
from everystop.trial.http_client import Target
from everystop.trial.http_load import LoadError
from everystop.trial.machine_limits import MachineLimits, measure_limits
from everystop.trial.on_engine import check_workload
from everystop.trial.recorded import Played, joined, play
from everystop.trial.repeats import warm_up_workload
from everystop.trial.server_process import SERVE, ServerFailed, ServerProcess, command_line, without_settings

MAX_RUN_S = 900.0  # the longest takes some twenty seconds on two cores, and minutes by PyTorch on them
DEATH_S = 2.0  # what a dying server gets to be gone after it has let go of its clients
MIN_WARM_UP_JOBS, MAX_WARM_UP_JOBS = 16, 64
TENANT_HEADER = "x-tenant"
ALL_WAIT: Mapping[str, Any] = {  # nobody is refused
    "max_num_queued_reqs": 1_000_000,
    "max_num_queued_tokens": 1_000_000_000,
}
SERVED = "by `everystop serve` over HTTP"
SAME_TEXTS = "the same texts in all runs"
SAME_LENGTHS = "as long in all runs, though texts may differ without --deterministic"
LOOK_BYTES = 1 << 30  # the KV cache of the engine that is only looked at
SHOWN = {"skip_special_tokens": False}  # a token without text would make no event


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of the model without a server: how many token ids it has, how many bytes of the KV cache a token
    takes and how many of its blocks nobody gets, whether it promises outputs that do not depend on the batch, what a
    step asks of the machine, and in words.
    """

    num_valid_tokens: int
    kv_token_bytes: int
    num_spare_blocks: int
    is_invariant: bool
    work: ModelWork
    described: Mapping[str, Any]

    def kv_bytes(self, num_tokens: int, block_size: int) -> int:
        """Memory of a KV cache that holds so many tokens, for the flag `kv_cache_memory`."""
        return (-(-num_tokens // block_size) + self.num_spare_blocks) * block_size * self.kv_token_bytes


def model_facts(config: Config) -> ModelFacts:
    """Loads the model to look at it; raises what is wrong with flags and files."""
    bench = Bench(replace(config, kv_cache_memory=LOOK_BYTES))
    try:
        capacity = bench.capacity
        block_bytes = capacity.num_bytes // capacity.num_blocks
        return ModelFacts(
            num_valid_tokens=bench.num_valid_tokens,
            kv_token_bytes=block_bytes // capacity.block_size,
            num_spare_blocks=LOOK_BYTES // block_bytes - capacity.num_blocks,
            is_invariant=bench.is_invariant,
            work=model_work(bench.spec, bench.num_step_bytes),
            described=bench.describe(),
        )
    finally:
        bench.close()


@dataclass(slots=True)
class _Stand:
    """A server, its record, and what has been played on it in this order; `number` is no other one's."""

    number: int
    server: ServerProcess
    config: Config
    played: list[Played] = field(default_factory=list)

    @property
    def record(self) -> Path:
        """Whole once the server has ended."""
        assert self.config.record is not None, "every server here writes a record"
        return Path(self.config.record)


class ServerLab:
    """Runs on a server for each configuration; those of one call of `runs` stand side by side, get their limits as
    flags, are asked one at a time, and end with the call. `command` starts one.
    """

    def __init__(
        self,
        base: Config,
        num_repeats: int,
        watcher: Watcher,
        *,
        command: Sequence[str] = SERVE,
        facts: ModelFacts | None = None,
    ) -> None:
        self.num_repeats = num_repeats
        self.client_cpu_s = 0.0
        self._base = replace(base, port=0, **ALL_WAIT)
        self._watcher = watcher
        self._command = command
        self._facts = facts or model_facts(self._base)
        self._limits: MachineLimits | None = None

    def runs(self, trials: Mapping[str, Trial], *, once: bool = False) -> dict[str, list[Run]]:
        """As `Lab.runs`, on each server after a warm-up; raises LabError, also for a server that fails."""
        for name, trial in trials.items():
            if wrong := check_workload(trial.workload, self._facts.num_valid_tokens):
                raise LabError(f"{name}: {wrong[0]} ({len(wrong)} such); measure claims on a model with more token ids")
        with tempfile.TemporaryDirectory(prefix="everystop-claims-") as folder:
            stands = self._stands(trials, Path(folder))
            found = self._play_all(trials, stands, 1 if once else self.num_repeats)
            self._watcher.begin("reading what the servers recorded")
            whole = {name: run for stand in _each(stands) for name, run in _joined(stand)}
        runs = {name: [whole[each.name] for each in played] for name, played in found.items()}
        check_outputs(trials, runs, same_texts=self._facts.is_invariant)
        return runs

    def simulate(self, trial: Trial, cost: StepCost, num_blocks: int | None = None) -> Run:
        """As `Lab.simulate`."""
        self._watcher.begin("in virtual time")
        return simulate(trial, cost, num_blocks, self._base)

    def limits(self) -> MachineLimits:
        """Measured once, in this process, while no server stands."""
        if self._limits is None:
            self._watcher.begin("the machine's limits")
            self._limits = measure_limits(self._base)
        return self._limits

    def work(self) -> ModelWork:
        """Of the model that is served."""
        return self._facts.work

    def describe(self) -> dict[str, Any]:
        """Model, machine, how it was asked, and what was the same in the answers."""
        outputs = SAME_TEXTS if self._facts.is_invariant else SAME_LENGTHS
        return {**self._facts.described, **describe_machine(), "served": SERVED, "outputs": outputs}

    def _stands(self, trials: Mapping[str, Trial], folder: Path) -> dict[str, _Stand]:
        """For each trial the server of its configuration, not yet started; equal ones share it."""
        stands: dict[Config, _Stand] = {}
        return {name: self._stand(trial, folder, stands) for name, trial in trials.items()}

    def _stand(self, trial: Trial, folder: Path, stands: dict[Config, _Stand]) -> _Stand:
        config = trial.config(self._base)
        config = replace(config, kv_cache_memory=self._facts.kv_bytes(trial.kv_tokens, config.block_size))
        if any(job.tenant for job in trial.workload.jobs):
            config = replace(config, tenants=str(_tenants_file(folder)))
        if config not in stands:
            number = len(stands)
            own = folder / f"server-{number}"
            own.mkdir()
            recording = replace(config, record=str(own / "record.gz"))
            server = ServerProcess(command_line(recording), own, self._command, without_settings(os.environ))
            stands[config] = _Stand(number, server, recording)
        return stands[config]

    def _play_all(
        self, trials: Mapping[str, Trial], stands: Mapping[str, _Stand], num_repeats: int
    ) -> dict[str, list[Played]]:
        """Every server runs from here to the end, also where something is raised."""

        def play_one(name: str, trial: Trial, repeat: int) -> Played:
            stand = stands[name]
            self._watcher.begin(f"{name}, {repeat + 1} of {num_repeats}")
            stand.played.append(self._ask(stand, trial, f"{stand.number}.{len(stand.played)}", name, repeat))
            return stand.played[-1]

        self._watcher.begin("servers start, and warm up")
        try:
            with ExitStack() as running:
                for stand in _each(stands):
                    running.enter_context(stand.server)
                for stand in _each(stands):
                    self._warm_up(stand)
                found = in_turns(trials, num_repeats, play_one)
                for stand in _each(stands):
                    stand.server.ask_to_end()
        except ServerFailed as error:
            raise LabError(str(error)) from error
        return found

    def _warm_up(self, stand: _Stand) -> None:
        num_jobs = max(MIN_WARM_UP_JOBS, min(MAX_WARM_UP_JOBS, stand.config.max_num_seqs))
        workload = warm_up_workload(make_workload("straggler"), num_jobs)
        self._ask(stand, Trial(workload, stand.config.policy), "warm-up", "warm-up", 0)

    def _ask(self, stand: _Stand, trial: Trial, name: str, words: str, repeat: int) -> Played:
        """Raises LabError where a request fails, and ServerFailed where the server has."""
        target = Target(
            url=stand.server.url(),
            timeout_s=MAX_RUN_S,
            max_run_s=MAX_RUN_S,
            tenant_header=TENANT_HEADER if stand.config.tenants else None,
            extra=SHOWN,
        )
        try:
            played = play(trial.workload, target, name, trial.policy, repeat, self._watcher.advance)
            check_no_errors(words, played.run)
        except (LoadError, LabError) as error:
            try:
                stand.server.check(DEATH_S)
            except ServerFailed as failure:
                raise LabError(f"{words}: {failure}") from error
            raise LabError(str(error)) from error
        self.client_cpu_s += played.cpu_s
        return played


def _each(stands: Mapping[str, _Stand]) -> Iterator[_Stand]:
    """Each server once."""
    return iter({stand.number: stand for stand in stands.values()}.values())


def _joined(stand: _Stand) -> Iterator[tuple[str, Run]]:
    """The runs on a server that has ended, by name; raises LabError."""
    try:
        runs = joined(stand.played, stand.record, stand.config.max_num_seqs)
    except RecordError as error:
        raise LabError(str(error)) from error
    return ((played.name, run) for played, run in zip(stand.played, runs, strict=True))


def _tenants_file(folder: Path) -> Path:
    """A file for `--tenants` that has the server believe the header; the same one each time."""
    path = folder / "tenants.toml"
    path.write_text(f'header = "{TENANT_HEADER}"\n', encoding="utf-8")
    return path
