"""Servers for the acceptance cases: one that repeats its prompts, and the embedded model in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.acceptance.model_server import ModelServer
from tests.server.parrot import ParrotServer, parrot

from everystop.model.checkpoint import inspect_model
from everystop.model.home import Home
from everystop.model.pull import pull
from everystop.model.weights import LoadedModel, load_model


@pytest.fixture(scope="session")
def server() -> Iterator[ParrotServer]:
    """For the tests that leave it as they found it."""
    with parrot() as running:
        yield running


@pytest.fixture
def own_server() -> Iterator[ParrotServer]:
    """For one test alone, such as one with a part that is broken."""
    with parrot() as running:
        yield running


@pytest.fixture(scope="session")
def model_server() -> Iterator[ModelServer]:
    """For the tests that leave it as they found it."""
    with ModelServer() as running:
        yield running


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The embedded model; fetched on first use."""
    return pull("smollm2", Home.from_environment(), progress=False)


@pytest.fixture(scope="session", params=["int8", "float32"])
def smollm2(request: pytest.FixtureRequest, smollm2_path: Path) -> LoadedModel:
    """The embedded model's weights."""
    return load_model(inspect_model(smollm2_path), dtype=request.param, num_threads=2, home=Home.from_environment())
