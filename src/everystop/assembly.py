"""Puts the parts together: from a configuration and loaded weights to a scheduler, a runner and an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from everystop.backend import CPU, CUDA, UTILIZATION, Backend, choose_backend, settled
from everystop.config import Config
from everystop.core.errors import ConfigError
from everystop.core.kv_cache import KVCache
from everystop.core.policy import make_policy
from everystop.core.recording import RecordingScheduler
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepTimeModel
from everystop.engine.engine import Engine, MakeTextDecoder
from everystop.machine import allowed_memory_bytes, default_num_threads
from everystop.model.checkpoint import Checkpoint
from everystop.model.home import Home
from everystop.model.spec import DecoderSpec
from everystop.model.weights import LoadedModel, load_model, model_digest
from everystop.observe import record_file
from everystop.observe.recorder import Recorder
from everystop.runner import ModelRunner
from everystop.runner.calibration import Room, measure_step_times
from everystop.scheduling import policy_settings, scheduler_limits

if TYPE_CHECKING:
    from everystop.runner.torch.loading import TorchModel

    Loaded: TypeAlias = LoadedModel | TorchModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the KV cache holds: `num_blocks` blocks of `block_size` tokens, in `num_bytes` bytes."""

    num_blocks: int
    block_size: int
    num_bytes: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens that fit at once."""
        return self.num_blocks * self.block_size

    @property
    def num_longest_requests(self) -> int:
        """Requests of the longest length that fit at once."""
        return self.num_blocks // -(-self.max_model_len // self.block_size)


def longest_sequence(config: Config, spec: DecoderSpec) -> int:
    """Longest sequence to serve, in tokens; raises ConfigError where the flag asks for more than the model can."""
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.max_position:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len:,}, but the model was trained for {spec.max_position:,} tokens; "
            "lower it"
        )
    return config.max_model_len


def plan_capacity(config: Config, spec: DecoderSpec, bytes_per_block: int) -> Capacity:
    """Size of the KV cache: what the flag says, else the least of a quarter of the allowed memory and all it could use.

    Raises ConfigError if not even one block fits, or if more is asked for than the machine allows.
    """
    max_model_len, allowed_bytes = longest_sequence(config, spec), allowed_memory_bytes()
    if config.kv_cache_memory is not None:
        if config.kv_cache_memory > allowed_bytes:
            raise ConfigError(
                f"--kv-cache-memory is {config.kv_cache_memory:,} bytes, but this process may use {allowed_bytes:,} in "
                "all; lower it"
            )
        num_blocks = config.kv_cache_memory // bytes_per_block
    else:
        usable = config.max_num_seqs * -(-max_model_len // config.block_size)
        num_blocks = min(usable, allowed_bytes // 4 // bytes_per_block)
    return _capacity(config, num_blocks, bytes_per_block, max_model_len)


def known_capacity(config: Config, spec: DecoderSpec, backend: Backend) -> Capacity | None:
    """What the KV cache will hold, as far as headers tell; None on a GPU, unless --kv-cache-memory says it.

    Loads PyTorch where that computes. Raises ConfigError as `plan_capacity` does.
    """
    if backend.device == CPU:
        return _native_capacity(config, spec, backend.dtype)
    from everystop.runner.torch.loading import DTYPES
    from everystop.runner.torch.runner import bytes_per_block

    block_bytes = bytes_per_block(spec, config.block_size, DTYPES[backend.dtype])
    if backend.device != CUDA:
        return plan_capacity(config, spec, block_bytes)
    max_model_len = longest_sequence(config, spec)
    if config.kv_cache_memory is None:
        return None
    return _capacity(config, _num_gpu_blocks(config.kv_cache_memory, block_bytes), block_bytes, max_model_len)


def _native_capacity(config: Config, spec: DecoderSpec, dtype: str) -> Capacity:
    """On the CPU, with weights of that type."""
    from everystop.runner.native import bytes_per_block, stored_dtype

    stored = stored_dtype(config.kv_cache_dtype, dtype)
    return plan_capacity(config, spec, bytes_per_block(spec, config.block_size, stored))


def _num_gpu_blocks(num_bytes: int, bytes_per_block: int) -> int:
    """Blocks in so many bytes of a GPU, beside the spare one."""
    return num_bytes // bytes_per_block - 1


def _capacity(config: Config, num_blocks: int, bytes_per_block: int, max_model_len: int) -> Capacity:
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache has room for no block of {config.block_size} tokens ({bytes_per_block:,} bytes); "
            "raise --kv-cache-memory or lower --block-size"
        )
    return Capacity(
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_bytes=num_blocks * bytes_per_block,
        max_model_len=min(max_model_len, num_blocks * config.block_size),
    )


def build_scheduler(
    config: Config,
    capacity: Capacity,
    recorder: Recorder | None = None,
    step_times: StepTimeModel = UNKNOWN_STEP_TIMES,
) -> Scheduler:
    """The scheduler that the configuration describes; a recorder hears of its every call."""
    kv = KVCache(
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    limits = scheduler_limits(config, capacity.max_model_len)
    policy = make_policy(config.policy, policy_settings(config))
    if recorder is None:
        return Scheduler(limits, kv, policy, step_times)
    return RecordingScheduler(limits, kv, policy, recorder, step_times)


def plans_by_time(config: Config) -> bool:
    """Step times must be known: steps have a target on their time, or the policy predicts by them."""
    return config.target_itl_ms is not None or make_policy(config.policy).needs_step_times


def open_recorder(config: Config) -> Recorder | None:
    """The recorder that `--record` asks for; raises ConfigError if its file cannot be written."""
    if config.record is None:
        return None
    try:
        return Recorder(Path(config.record), config.policy, policy_settings(config), with_tokens=config.record_prompts)
    except OSError as error:
        raise _no_record(config, error) from error


def check_record(config: Config) -> None:
    """Raise ConfigError where `open_recorder` would, as far as can be told without a change; makes no file."""
    if config.record is None:
        return
    try:
        record_file.check_record(Path(config.record))
    except OSError as error:
        raise _no_record(config, error) from error


def _no_record(config: Config, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"--record {config.record}: {reason}; name a file to write, in a folder to write")


def num_threads(config: Config) -> int:
    """Threads that compute: the flag, else the least of physical cores, affinity and cgroup quota."""
    return config.threads or default_num_threads()


def load_weights(config: Config, checkpoint: Checkpoint, home: Home) -> Loaded:
    """The weights of a checked model on the device that the configuration means. Raises ConfigError and ModelError."""
    backend = choose_backend(config)
    if backend.device == CPU:
        return load_model(checkpoint, dtype=backend.dtype, num_threads=num_threads(config), home=home)
    from everystop.runner.torch.opening import open_model

    digest = ""
    with contextlib.suppress(OSError):  # a home that cannot be used costs the model its name in answers
        digest = model_digest(checkpoint, home)
    return open_model(
        checkpoint,
        device=backend.device,
        dtype=backend.dtype,
        deterministic=config.deterministic,
        num_threads=num_threads(config),
        digest=digest,
    )


def kernel_name(loaded: Loaded) -> str:
    """What decides the bits of an answer, beside the weights: the instruction set, or the GPU and its kernels."""
    if not isinstance(loaded, LoadedModel):
        return loaded.runs_on
    from everystop import _native

    return str(_native.isa())


def kernels_of(config: Config, loaded: Loaded) -> str:
    """What computes, in words."""
    name = kernel_name(loaded)
    if not isinstance(loaded, LoadedModel):
        return name
    return f"{name} kernels ({loaded.layout}), {num_threads(config)} threads"


def kv_cache_dtype(config: Config, loaded: Loaded) -> str:
    """The type in which keys and values are stored."""
    if not isinstance(loaded, LoadedModel):
        return str(loaded.torch_dtype).removeprefix("torch.")
    from everystop.runner.native import stored_dtype

    return stored_dtype(config.kv_cache_dtype, loaded.dtype)


def build_runner(config: Config, loaded: Loaded, num_valid_tokens: int) -> tuple[ModelRunner, Capacity]:
    """The runner over loaded weights, and what its KV cache holds."""
    if not isinstance(loaded, LoadedModel):
        return _build_torch_runner(config, loaded, num_valid_tokens)
    from everystop.runner.native import NativeRunner

    capacity = _native_capacity(config, loaded.spec, loaded.dtype)
    runner = NativeRunner(
        loaded,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        num_threads=num_threads(config),
        num_valid_tokens=num_valid_tokens,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    return runner, capacity


def _build_torch_runner(config: Config, loaded: TorchModel, num_valid_tokens: int) -> tuple[ModelRunner, Capacity]:
    """The PyTorch runner; on a GPU, its KV cache takes what a measured step leaves of the memory."""
    from everystop.runner.torch.memory import check_kv_memory, measure_footprint, num_blocks_that_fit
    from everystop.runner.torch.runner import RunnerLimits, TorchRunner, bytes_per_block

    backend, spec = choose_backend(config), loaded.spec
    block_bytes = bytes_per_block(spec, config.block_size, loaded.torch_dtype)
    limits = RunnerLimits(
        num_blocks=1,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        num_valid_tokens=num_valid_tokens,
        graphs=(config.cuda_graphs or "lazy") if backend.device == CUDA else "off",
    )
    if backend.device != CUDA:
        capacity = plan_capacity(config, spec, block_bytes)
    else:
        max_model_len = longest_sequence(config, spec)
        footprint = measure_footprint(loaded, limits, max_model_len)
        if config.kv_cache_memory is not None:
            check_kv_memory(footprint, config.kv_cache_memory)
            num_blocks = _num_gpu_blocks(config.kv_cache_memory, block_bytes)
        else:
            usable = config.max_num_seqs * -(-max_model_len // config.block_size)
            utilization = config.gpu_memory_utilization or UTILIZATION
            num_blocks = num_blocks_that_fit(footprint, utilization, block_bytes, usable)
        capacity = _capacity(config, num_blocks, block_bytes, max_model_len)
    runner = TorchRunner(loaded, replace(limits, num_blocks=capacity.num_blocks, max_model_len=capacity.max_model_len))
    return runner, capacity


def known_step_times(config: Config, capacity: Capacity, runner: ModelRunner) -> StepTimeModel:
    """Step times measured on a runner on which nothing runs, where steps are planned by time; else unknown ones."""
    if not plans_by_time(config):
        return UNKNOWN_STEP_TIMES
    room = Room(
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    return measure_step_times(runner, room)


def build_engine(
    config: Config,
    loaded: Loaded,
    *,
    eos_token_ids: Sequence[int],
    num_valid_tokens: int,
    make_text_decoder: MakeTextDecoder,
) -> tuple[Engine, Capacity, Recorder | None]:
    """Runner, scheduler and engine over loaded weights, and the recorder if there is to be a record; the engine is not
    started, and closes the record when it stops.
    """
    runner, capacity = build_runner(config, loaded, num_valid_tokens)
    step_times = known_step_times(config, capacity, runner)
    recorder = open_recorder(config)
    backend = choose_backend(config)
    engine = Engine(
        build_scheduler(settled(config, backend), capacity, recorder, step_times),
        runner,
        eos_token_ids=eos_token_ids,
        make_text_decoder=make_text_decoder,
        seed=config.seed,
        depth=backend.depth,
        on_stop=recorder.close if recorder is not None else None,
    )
    return engine, capacity, recorder
