"""One thread, since a tiny model's operations are too small for more; and here no test is skipped.

These tests stand for a GPU that is not there. `everystop test` installs all that they need, PyTorch and Triton too, so
a skip says that something was not checked that should have been: it fails, and their number stands in the summary. Only
what is marked `gpu` may skip, where there is none.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

FAILED_SKIPS = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("gpu") is None:
        _fail_if_skipped(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped(report, collector.config)
    return report


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    """An expected failure, which pytest also calls skipped, stays one."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: nothing may be skipped in this folder (see its conftest.py): {reason}"
        config.stash.setdefault(FAILED_SKIPS, []).append(report.nodeid)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.write_line(f"skipped in tests/runner/torch: {len(config.stash.get(FAILED_SKIPS, []))}")
