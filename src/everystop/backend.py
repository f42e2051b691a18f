"""What computes: the CPU's native kernels, or PyTorch; chosen from the configuration, with what that choice means for
other settings. Loads neither.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from everystop.config import Config
from everystop.core.errors import ConfigError

CPU, CUDA, TORCH = "cpu", "cuda", "torch"
DTYPES = {
    CPU: ("int8", "float32"),
    CUDA: ("bfloat16", "float16", "float32", "fp8"),
    TORCH: ("float32", "bfloat16", "float16", "fp8"),
}
"""What each device computes in; the first is its default."""

INSTALL = "install everystop[cuda], or PyTorch 2.11 or newer"
UTILIZATION = 0.9
DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Backend:
    """`device` is cpu, cuda or torch (PyTorch on the CPU)."""

    device: str
    dtype: str
    is_deterministic: bool
    """A request's tokens do not depend on what else is computed: always so on the CPU, elsewhere by --deterministic."""

    @property
    def depth(self) -> int:
        """On a GPU the next step is launched before the last one's tokens are here."""
        return 1 if self.device == CUDA else 0


def choose_backend(
    config: Config,
    *,
    has_torch: Callable[[], bool] | None = None,
    is_for_cuda: Callable[[], bool] | None = None,
    devices: Path = DEVICES,
) -> Backend:
    """What `--device` and `--dtype` say, or the default of what is there: a GPU where one is, with a PyTorch for it.

    Raises ConfigError for settings that have no effect on the device, and for PyTorch where it is missing. Looks for a
    GPU among `devices`, and loads nothing.
    """
    has_torch = has_torch or _has_torch
    device = config.device
    if device == "auto":
        device = CUDA if any(devices.glob("nvidia[0-9]*")) and (is_for_cuda or _is_for_cuda)() else CPU
    elif device != CPU and not has_torch():
        raise ConfigError(f"--device {device} needs PyTorch, which is not installed; {INSTALL}, or choose --device cpu")
    dtype = DTYPES[device][0] if config.dtype == "auto" else config.dtype
    backend = Backend(device, dtype, device == CPU or config.deterministic)
    _check_honoured(config, backend)
    return backend


def settled(config: Config, backend: Backend) -> Config:
    """The configuration with those defaults of the scheduler in place that depend on the device: a GPU computes many
    more prompt tokens in the time that its decoders take alone.
    """
    if config.max_prefill_per_decode is None and backend.device == CUDA:
        return replace(config, max_prefill_per_decode=0)
    return config


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _is_for_cuda() -> bool:
    """Whether there is a PyTorch that was built for CUDA, which its file `version.py` says."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and re.search(r"^cuda\b[^=\n]*= *['\"]", version.read_text(), re.MULTILINE) is not None


def _check_honoured(config: Config, backend: Backend) -> None:
    """Raise ConfigError for a setting that the device cannot honour."""
    device = f"--device {backend.device}" + (", which was found" if config.device == "auto" else "")
    if backend.dtype not in DTYPES[backend.device]:
        raise ConfigError(
            f"--dtype {backend.dtype} cannot be had with {device}; choose one of {', '.join(DTYPES[backend.device])}"
        )
    if backend.device != CUDA:
        for flag, value in (
            ("--cuda-graphs", config.cuda_graphs),
            ("--gpu-memory-utilization", config.gpu_memory_utilization),
        ):
            if value is not None:
                raise ConfigError(f"{flag} has no effect with {device}; leave it out, or choose --device cuda")
    if backend.device != CPU and config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} cannot be had with {device}, which stores keys and values as it "
            "computes them; leave it out, or choose --device cpu"
        )
    if backend.device == CUDA:
        if config.threads is not None:
            raise ConfigError(f"--threads has no effect with {device}; leave it out")
        if config.kv_cache_memory is not None and config.gpu_memory_utilization is not None:
            raise ConfigError("--kv-cache-memory and --gpu-memory-utilization both size the KV cache; leave one out")
