"""What this process may use of the machine, in cores and memory, as affinity and cgroups (version 2 and 1) limit it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def default_num_threads(root: Path = ROOT) -> int:
    """Threads worth starting: the least of physical cores, this process's affinity and its cgroup's CPU quota.

    `root` is where /proc and /sys are looked for.
    """
    allowed = os.sched_getaffinity(0)
    quotas = [int(quota) for quota in _cpu_quotas(root)]
    return max(1, min(len(allowed), _num_physical_cores(allowed, root), *quotas))


def allowed_memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process may use: the machine's, or less where its cgroup or one above it has a limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_memory_limits(root)])


def cpu_quota(root: Path = ROOT) -> float | None:
    """The least of the CPU quotas of this process's cgroups, in CPUs; None without one."""
    return min(_cpu_quotas(root), default=None)


def available_memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process may still take: what the machine has left, or less where a cgroup has less left."""
    lines = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    words = lines.get("MemAvailable", "").split()
    left = [int(words[0]) * 1024] if words and words[0].isdigit() else []
    return min([allowed_memory_bytes(root), *left, *_memory_left(root)])


def _memory_left(root: Path) -> Iterator[int]:
    """What each limit leaves, in bytes; pages of files that nobody has read for a while are given up for others."""
    for controllers, folder in _cgroup_folders(root, "memory"):
        limit = _read(folder / ("memory.limit_in_bytes" if controllers else "memory.max"))
        used = _read(folder / ("memory.usage_in_bytes" if controllers else "memory.current"))
        if limit.isdigit() and used.isdigit():
            used_bytes = int(used) - _idle_file_bytes(folder, "total_inactive_file" if controllers else "inactive_file")
            yield max(0, int(limit) - used_bytes)


def _idle_file_bytes(folder: Path, name: str) -> int:
    """A line of a cgroup's `memory.stat`; 0 without it."""
    lines = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return next((int(words[1]) for words in lines if len(words) == 2 and words[0] == name), 0)


def _num_physical_cores(cpus: set[int], root: Path) -> int:
    """Cores behind `cpus`: two hyper-threads of one core count once; unknown ones count as a core each."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
        cores.add((package, core) if core else ("", f"cpu{cpu}"))
    return len(cores)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Each limit in CPUs."""
    for controllers, folder in _cgroup_folders(root, "cpu"):
        if not controllers:
            quota, _, period = _read(folder / "cpu.max").partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _memory_limits(root: Path) -> Iterator[int]:
    """Each limit in bytes."""
    for controllers, folder in _cgroup_folders(root, "memory"):
        text = _read(folder / ("memory.limit_in_bytes" if controllers else "memory.max"))
        if text.isdigit():
            yield int(text)


def _cgroup_folders(root: Path, controller: str) -> Iterator[tuple[str, Path]]:
    """(controllers, folder) of this process's cgroup and of each above it; version 2 names no controllers.

    Example: the line "0::/a/b" gives sys/fs/cgroup, sys/fs/cgroup/a and sys/fs/cgroup/a/b; in version 1,
    "4:cpu,cpuacct:/a" gives sys/fs/cgroup/cpu and sys/fs/cgroup/cpu/a.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        for cgroup in (*Path(path).parents, Path(path)):
            yield controllers, base / str(cgroup).lstrip("/")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
