"""What `everystop doctor` looks at: one finding for each thing that a server needs of its machine.

A check says what it saw and, where that is not well, what to do; what `serve` would refuse fails with its sentence.
None of them changes anything but a free port, which is taken and given back.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from everystop import __version__
from everystop.backend import CPU, Backend, choose_backend
from everystop.checkup import options
from everystop.checkup.finding import Finding, NotLookedAt, Status
from everystop.config import Config
from everystop.core.errors import EverystopError
from everystop.machine import allowed_memory_bytes, available_memory_bytes, cpu_quota, default_num_threads
from everystop.model.home import Home
from everystop.origin import ROOT, commit, is_clone

MIB = 1 << 20
MIN_DISK_BYTES = 1024 * MIB
MIN_MEMORY_BYTES = 1024 * MIB
MIN_FILES = 4096
MIN_PYTHON = (3, 11)


def examine(config: Config) -> Iterator[Finding]:
    """All findings, for a server of that configuration; a check that fails by itself is a finding too."""
    for name, check in CHECKS.items():
        try:
            yield check(config)
        except NotLookedAt as error:
            yield Finding(name, Status.WARN, f"not looked at: {error}", error.advice)
        except EverystopError as error:  # as `serve` says it
            yield Finding(name, Status.FAIL, str(error))
        except Exception as error:
            yield Finding(name, Status.FAIL, f"this could not be found out: {type(error).__name__}: {error}")


def check_version(_: Config) -> Finding:
    """The version, and the commit of a clone."""
    return Finding("version", Status.OK, f"everystop {__version__}, {_origin()}")


def _origin() -> str:
    if not is_clone():
        return f"installed in {Path(__file__).parents[1]}"
    at = commit()
    return f"from the clone {ROOT}" + ("" if at is None else f" at {at}")


def check_python(_: Config) -> Finding:
    """The interpreter."""
    text = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    if sys.version_info < MIN_PYTHON:
        return Finding("python", Status.FAIL, text, "install Python 3.11 or newer")
    return Finding("python", Status.OK, text)


def check_packages(_: Config) -> Finding:
    """Whether what the installed metadata asks for is there."""
    try:
        needed = importlib.metadata.requires("everystop") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", Status.WARN, "the package itself is not installed", "run ./everystop in the clone")
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needed if "extra ==" not in line]
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        return Finding("packages", Status.FAIL, f"missing: {', '.join(missing)}", "install everystop again")
    return Finding("packages", Status.OK, f"all {len(names)} are there")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_compiler(_: Config) -> Finding:
    """A compiler is needed in a clone only."""
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is not None:
        return Finding("compiler", Status.OK, found)
    if is_clone():
        return Finding("compiler", Status.WARN, "none found; kernels cannot be rebuilt", "on Debian: apt install g++")
    return Finding("compiler", Status.OK, "none, and none is needed")


def check_kernels(config: Config) -> Finding:
    """The native module, and the instruction set that it takes here."""
    try:
        from everystop import _native
    except ImportError as error:
        return Finding("kernels", Status.FAIL, f"the native module cannot be loaded: {error}", "build or install again")
    backend = choose_backend(config)
    if backend.device != CPU:
        return _check_torch(config, backend)
    try:
        _native.linear_layout(backend.dtype)
    except ValueError as error:
        return Finding("kernels", Status.FAIL, str(error), "unset EVERYSTOP_ISA or name a set that this CPU has")
    isa, forced = _native.isa(), os.environ.get("EVERYSTOP_ISA")
    text = f"{isa} on {platform.machine()}" + (", as EVERYSTOP_ISA says" if forced else "")
    if isa == "portable":
        return Finding(
            "kernels", Status.WARN, text, "correct, but several times slower than on a CPU with AVX2 or NEON"
        )
    return Finding("kernels", Status.OK, text)


def _check_torch(config: Config, backend: Backend) -> Finding:
    """PyTorch, the GPU that it finds, and what computes there."""
    from everystop.runner.torch.opening import choose_kernels, open_device

    device = open_device(backend.device, backend.dtype, default_num_threads())
    choose_kernels(device, deterministic=config.deterministic)
    return Finding("kernels", Status.OK, f"PyTorch on {device.name}, {backend.dtype}")


def check_cores(config: Config) -> Finding:
    """Cores, as affinity and cgroups leave them."""
    default, allowed, quota = default_num_threads(), len(os.sched_getaffinity(0)), cpu_quota()
    text = f"{default} threads by default: {os.cpu_count()} CPUs, {allowed} allowed"
    text += f", a cgroup quota of {quota:g}" if quota is not None else ", no cgroup quota"
    if config.threads is not None and config.threads > allowed:
        return Finding("cores", Status.WARN, f"{text}; --threads {config.threads}", "more threads than CPUs slow steps")
    if quota is not None and quota < 1:
        return Finding("cores", Status.WARN, text, "steps are stopped when the quota is used up; give at least one CPU")
    return Finding("cores", Status.OK, text)


def check_memory(config: Config) -> Finding:
    """Memory, as cgroups leave it."""
    allowed, available = allowed_memory_bytes(), available_memory_bytes()
    text = f"{available / MIB:,.0f} MiB available of {allowed / MIB:,.0f} MiB that may be used"
    wanted = config.kv_cache_memory
    if wanted is not None and wanted > available:
        return Finding("memory", Status.WARN, f"{text}; --kv-cache-memory wants {wanted / MIB:,.0f} MiB", "lower it")
    if available < MIN_MEMORY_BYTES:
        return Finding("memory", Status.WARN, text, "give it at least 1 GiB, or lower --kv-cache-memory")
    return Finding("memory", Status.OK, text)


def check_home(_: Config) -> Finding:
    """The cache folder: may it be written, and is there room?"""
    root = Home.from_environment().root
    existing = next(path for path in (root, *root.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Finding("cache", Status.FAIL, f"{root} cannot be written", "set EVERYSTOP_HOME to a folder that can be")
    free = shutil.disk_usage(existing).free
    text = f"{root}, {free / MIB:,.0f} MiB free"
    if free < MIN_DISK_BYTES:
        return Finding("cache", Status.WARN, text, "make room; `everystop cache rm` removes what is not needed")
    return Finding("cache", Status.OK, text)


def check_address(config: Config) -> Finding:
    """Whether the port, or the path, can be had now."""
    from everystop.server.listener import check_path, listen

    if config.uds is not None:
        was_left = check_path(config.uds)
        text = "holds what a dead server left, which `serve` replaces" if was_left else "is free"
        return Finding("address", Status.OK, f"{config.uds} {text}")
    with contextlib.closing(listen(config.host, config.port)) as sock:
        return Finding("address", Status.OK, f"port {_port(sock)} on {config.host} is free")


def _port(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def check_files(_: Config) -> Finding:
    """How many connections can be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{hard if hard != resource.RLIM_INFINITY else 'unlimited'} open files at most (now {soft}, raised at start)"
    if hard != resource.RLIM_INFINITY and hard < MIN_FILES:
        return Finding("open files", Status.WARN, text, "each client takes one; raise the hard limit, LimitNOFILE")
    return Finding("open files", Status.OK, text)


def check_crash_folder(config: Config) -> Finding:
    """Whether a crash file could be kept."""
    if config.max_crash_files == 0:
        return Finding("crash files", Status.WARN, "none are kept", "raise --max-crash-files from 0")
    folder = Home.from_environment().crash_folder(config.crash_dir)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Finding("crash files", Status.WARN, f"{folder} cannot be written", "name another --crash-dir")
    kept = len(list(folder.glob("crash-*.jsonl"))) if folder.is_dir() else 0
    if kept:
        return Finding(
            "crash files", Status.WARN, f"{kept} in {folder}", "a server has failed or stalled; look at them"
        )
    return Finding("crash files", Status.OK, f"none in {folder}")


def check_system(_: Config) -> Finding:
    """The system, for reports of errors."""
    return Finding("system", Status.OK, platform.platform())


CHECKS: dict[str, Callable[[Config], Finding]] = {
    "version": check_version,
    "system": check_system,
    "python": check_python,
    "packages": check_packages,
    "compiler": check_compiler,
    "kernels": check_kernels,
    "cores": check_cores,
    "memory": check_memory,
    "open files": check_files,
    "cache": check_home,
    "model": options.check_model,
    "KV cache": options.check_kv_cache,
    "chat template": options.check_chat_template,
    "record": options.check_record,
    "crash files": check_crash_folder,
    "certificate": options.check_certificate,
    "tenants": options.check_tenants,
    "keys": options.check_keys,
    "traces": options.check_traces,
    "address": check_address,
}
