"""One parrot server for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.server.parrot import ParrotServer, parrot


@pytest.fixture(scope="session")
def server() -> Iterator[ParrotServer]:
    with parrot() as running:
        yield running
