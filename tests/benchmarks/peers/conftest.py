"""The embedded model, as the user's home has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from everystop.model.home import Home
from everystop.model.pull import pull


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model; fetched on first use."""
    return pull("smollm2", Home.from_environment(), progress=False)
