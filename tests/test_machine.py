"""Cores and memory that a process may use, in small file systems of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from everystop.machine import allowed_memory_bytes, available_memory_bytes, default_num_threads


def make_root(folder: Path, files: dict[str, str]) -> Path:
    """A small /proc and /sys."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({f"sys/devices/system/cpu/cpu{i}/topology/{k}": v for i in range(8)
          for k, v in (("core_id", f"{i // 2}\n"), ("physical_package_id", "0\n"))}, 4),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "350000 100000\n",
          "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000\n",
          "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, 2),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/x\n", "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "-1\n",
          "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n"}, 8),
    ],
    ids=["unknown", "hyper-threads", "no quota", "v2 above", "half a core", "v1", "v1 without quota"],
)  # fmt: skip
def test_default_num_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert default_num_threads(make_root(tmp_path, files)) == expected


def test_affinity_bounds_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert default_num_threads(tmp_path) == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "3000000\n",
          "sys/fs/cgroup/a/b/memory.max": "max\n"}, 3_000_000),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/memory.max": "2000000\n",
          "sys/fs/cgroup/a/memory.max": "3000000\n"}, 2_000_000),
        ({"proc/self/cgroup": "4:cpu:/x\n3:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "5000\n",
          "sys/fs/cgroup/cpu/x/memory.limit_in_bytes": "1\n"}, 5_000),
        ({"proc/self/cgroup": "3:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{1 << 62}\n"}, None),
    ],
    ids=["unknown", "no limit", "v2 above", "the least counts", "v1", "v1 without limit"],
)  # fmt: skip
def test_allowed_memory(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    machine = allowed_memory_bytes(tmp_path / "empty")
    assert machine > 1 << 26
    assert allowed_memory_bytes(make_root(tmp_path, files)) == (machine if expected is None else expected)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   7 kB\n"}, 7 * 1024),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "9000\n",
          "sys/fs/cgroup/a/memory.current": "8000\n"}, 1_000),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "9000\n",
          "sys/fs/cgroup/a/memory.current": "9000\n",
          "sys/fs/cgroup/a/memory.stat": "anon 2000\nfile 7000\ninactive_file 6000\nactive_file 1000\n"}, 6_000),
        ({"proc/self/cgroup": "3:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "5000\n",
          "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "5000\n",
          "sys/fs/cgroup/memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 3000\n"}, 3_000),
    ],
    ids=["machine", "v2", "v2, much of it files", "v1, much of it files"],
)  # fmt: skip
def test_available_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    """A model file that has been read fills the cgroup with pages that the kernel gives up when it needs them."""
    assert available_memory_bytes(make_root(tmp_path, files)) == expected
