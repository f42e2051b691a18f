"""Fixtures of the model tests: a home of their own, and the embedded model in the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from everystop.model.home import Home
from everystop.model.pull import pull


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty home."""
    return Home(tmp_path / "home")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model; fetched on first use."""
    return pull("smollm2", Home.from_environment(), progress=False)
