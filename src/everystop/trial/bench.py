"""A loaded model on which one engine after another runs, each with a scheduler and a prefix cache of its own.

Weights, kernels, threads and the memory of the KV cache are there once, so that nothing but the policy differs between
two runs. What earlier runs have left in the memory is never read: a new prefix cache matches nothing.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from everystop import __version__
from everystop.assembly import (
    build_runner,
    build_scheduler,
    kernel_name,
    known_step_times,
    kv_cache_dtype,
    load_weights,
    num_threads,
)
from everystop.backend import CUDA, choose_backend, settled
from everystop.config import Config
from everystop.core.plan import StepPlan, StepResult
from everystop.engine.engine import Engine
from everystop.model.checkpoint import Checkpoint, inspect_model
from everystop.model.home import Home
from everystop.model.pull import resolve_model
from everystop.model.tokenizer_files import load_tokenizer
from everystop.origin import commit
from everystop.runner import Executed, Launched, ModelRunner, launcher

T = TypeVar("T")


class LentRunner:
    """A runner that outlives the engine it is lent to: `close` only puts everybody off board."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._launch = launcher(runner)
        self._on_board: dict[int, None] = {}
        self._has_failed = False

    def execute(self, plan: StepPlan) -> StepResult:
        """As the runner does."""
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> Launched:
        """As the runner does, or at once where it can do no other."""
        for request_id in (*plan.released, *plan.preempted):
            self._on_board.pop(request_id, None)
        for admitted in plan.admitted:
            self._on_board[admitted.request_id] = None
        launched = self._guarded(lambda: self._launch(plan))
        return launched if isinstance(launched, Executed) else _LentStep(self, launched)

    def _guarded(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except BaseException:
            self._has_failed = True
            raise

    def close(self) -> None:
        """Release every request that is still on board, unless the runner has failed: then it is of no more use."""
        if self._on_board and not self._has_failed:
            self._runner.execute(StepPlan(step_id=-1, released=list(self._on_board)))
            self._on_board.clear()


class _LentStep:
    """A step on its way, whose failure is the runner's too."""

    def __init__(self, lent: LentRunner, step: Launched) -> None:
        self._lent = lent
        self._step = step

    def wait(self) -> StepResult:
        """Its result."""
        return self._lent._guarded(self._step.wait)


class Bench:
    """Loads the model that a configuration names; raises what is wrong with flags and files."""

    def __init__(self, config: Config) -> None:
        self.config = config
        home = Home.from_environment()
        checkpoint = inspect_model(resolve_model(config.model, home))
        tokenizer = load_tokenizer(checkpoint, home)
        self.num_valid_tokens = min(tokenizer.num_ids, checkpoint.spec.vocab_size)
        self._eos_ids = tokenizer.eos_ids
        loaded = load_weights(config, checkpoint, home)
        self.spec, self.num_step_bytes = loaded.spec, loaded.num_step_bytes
        self._backend = choose_backend(config)
        self._runner, self.capacity = build_runner(config, loaded, self.num_valid_tokens)
        self._model = _describe_model(config, checkpoint, home) | {
            "dtype": loaded.dtype,
            "kv_cache_dtype": kv_cache_dtype(config, loaded),
            "kernels": kernel_name(loaded),
        }

    @property
    def is_invariant(self) -> bool:
        """Whether a request's tokens are promised not to depend on its batch."""
        return self._backend.is_deterministic

    def engine(self, config: Config) -> Engine:
        """A new engine, not yet started, of a configuration that differs in the policy and its settings alone; the one
        before must have been stopped.
        """
        step_times = known_step_times(config, self.capacity, self._runner)
        scheduler = build_scheduler(settled(config, self._backend), self.capacity, step_times=step_times)
        return Engine(scheduler, LentRunner(self._runner), eos_token_ids=self._eos_ids, depth=self._backend.depth)

    def describe(self) -> dict[str, Any]:
        """Model, kernels and machine, as plain data."""
        return {
            **self._model,
            "version": __version__,
            "commit": commit(),
            "num_threads": None if self._backend.device == CUDA else num_threads(self.config),
            "num_kv_blocks": self.capacity.num_blocks,
            "max_model_len": self.capacity.max_model_len,
        }

    def close(self) -> None:
        """Free the memory and the threads."""
        self._runner.close()


def describe_machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {"machine": platform.machine(), "cpu": _cpu_name(), "system": platform.system(), "python": _python()}


def _describe_model(config: Config, checkpoint: Checkpoint, home: Home) -> dict[str, Any]:
    return {
        "model_id": config.model,
        "model_files": [path.name for path in checkpoint.files],
        "model_sha256": [home.sha256(path) for path in checkpoint.files],
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"
