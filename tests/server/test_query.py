"""Parameters behind the paths that are read: one that is not served is refused by name, whatever the path."""

from __future__ import annotations

import json

import pytest
from tests.server.parrot import ParrotServer

from everystop.server.operations import OPERATIONS
from everystop.server.paths import PATHS, Path

READ = [path for path in PATHS if path.method == "GET" and not path.is_open]


def address(path: Path) -> str:
    return path.name.format(id="nobody", name="nothing")


def refused(path: Path) -> int:
    """The status with which TGI, or OpenAI, says that a request cannot be honoured."""
    return 422 if path.is_tgi else 400


@pytest.mark.parametrize("path", READ, ids=lambda path: path.name)
def test_an_unknown_parameter_is_refused_by_name(server: ParrotServer, path: Path) -> None:
    known = "".join(f"&{name}=1" for name in OPERATIONS[path.method, path.name].query)
    status, body = server.get(f"{address(path)}?strange=1{known}")
    error = json.loads(body)["error"]
    message = error if path.is_tgi else error["message"]
    assert (status, message) == (refused(path), "the parameter 'strange' is not served here; leave it out")
    if not path.is_tgi:
        assert (error["param"], error["code"]) == ("strange", "unsupported_field")
    assert server.request("HEAD", f"{address(path)}?strange=1")[0] == refused(path)


def test_a_long_name_is_cut(server: ParrotServer) -> None:
    status, body = server.get(f"/version?{'x' * 5_000}=1")
    assert status == 400
    assert len(body) < 500


@pytest.mark.parametrize("path", ["/health?probe=1", "/health/live?x", "/health/ready?x=1", "/ui?x=1", "/ui/r/me?x=1"])
def test_probes_and_pages_may_be_asked_for_with_any(server: ParrotServer, path: str) -> None:
    assert server.get(path)[0] == 200
