"""The dashboard's files: what is served, to whom, and with which headers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.parrot import ParrotServer, parrot

from everystop.server import routes
from everystop.server.ui import FOLDER, POLICY, Ui

PAGE, REQUEST, SCRIPT = b"<!doctype html><title>live</title>", b"<!doctype html><title>one</title>", b"export {};\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ui")
    (folder / "vendor").mkdir()
    for name, body in {
        "index.html": PAGE,
        "request.html": REQUEST,
        "main.js": SCRIPT,
        "theme.css": b"body{}",
        "vendor/plot.js": SCRIPT,
        "vendor/LICENSE": b"MIT",
    }.items():
        (folder / name).write_bytes(body)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ParrotServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "Ui", lambda: Ui(folder))
        with parrot(api_keys=("sk-1",)) as running:
            yield running


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/ui", PAGE, "text/html; charset=utf-8"),
        ("/ui/", PAGE, "text/html; charset=utf-8"),
        ("/ui/index.html", PAGE, "text/html; charset=utf-8"),
        ("/ui/r/cmpl-1", REQUEST, "text/html; charset=utf-8"),
        ("/ui/r/a/b%2F..%2Fc", REQUEST, "text/html; charset=utf-8"),
        ("/ui/main.js", SCRIPT, "text/javascript; charset=utf-8"),
        ("/ui/vendor/plot.js", SCRIPT, "text/javascript; charset=utf-8"),
        ("/ui/theme.css", b"body{}", "text/css; charset=utf-8"),
        ("/ui/vendor/LICENSE", b"MIT", "application/octet-stream"),
    ],
)
def test_files_are_served_without_a_key_and_may_do_little(
    server: ParrotServer, path: str, body: bytes, kind: str
) -> None:
    status, headers, sent = server.request("GET", path)
    assert (status, sent, headers["content-type"]) == (200, body, kind)
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-cache"
    status, headers, sent = server.request("GET", path, headers={"if-none-match": headers["etag"]})
    assert (status, sent) == (304, b"")
    status, headers, sent = server.request("HEAD", path)
    assert (status, sent) == (200, b"")
    assert server.request("POST", path)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/ui/stream",
        "/ui/nothing.js",
        "/ui/../ui/stream",
        "/ui/r/../../v1/models",
        "/ui/%2e%2e/live.py",
        "/ui//main.js",
        "/ui/main.js/",
        "/UI",
        "/uix",
        "/ui/vendor",
        "/ui/vendor/",
        "/ui/vendor/../main.js",
        "/ui/main.js%00",
    ],
)
def test_nothing_else_is_to_be_had_without_a_key(server: ParrotServer, path: str) -> None:
    status, body = server.get(path)
    if path.startswith("/ui/r/"):
        assert (status, body) == (200, REQUEST)  # whatever the rest says: a page without data
    else:
        assert status == 401


@pytest.mark.parametrize("host", ["[", "x:y", "%2fui", "localhost"])
def test_the_host_header_has_no_say_in_which_file_it_is(server: ParrotServer, host: str) -> None:
    status, body = server.get("/ui/main.js", {"host": host})
    assert (status, body) == (200, SCRIPT)


def test_the_policy_allows_nothing_inline_and_no_other_host() -> None:
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    assert "http" not in POLICY


def test_the_tag_follows_the_bytes(folder: Path) -> None:
    tag = f'"{hashlib.sha256(PAGE).hexdigest()[:16]}"'
    assert Ui(folder)._files["/ui/index.html"].tag == tag


def test_a_package_without_pages_has_no_ui(tmp_path: Path) -> None:
    ui = Ui(tmp_path / "missing")
    assert ui.routes() == []
    assert not ui.is_open("/ui")
    assert not ui.is_open("/ui/r/x")


def test_the_folder_is_in_the_package() -> None:
    assert FOLDER.parent == Path(routes.__file__).parent
