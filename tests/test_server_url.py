"""The URL of a server, as every command that asks one reads it."""

from __future__ import annotations

import pytest

from everystop.core.errors import ConfigError
from everystop.server_url import ServerUrl


@pytest.mark.parametrize(
    ("text", "shown", "where"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", ("127.0.0.1", 8000, "")),
        ("http://localhost/", "http://localhost", ("localhost", 80, "")),
        ("https://example.org", "https://example.org", ("example.org", 443, "")),
        ("http://h:1/v1", "http://h:1", ("h", 1, "")),
        ("http://h:1/proxy/v1/", "http://h:1/proxy", ("h", 1, "/proxy")),
        ("http://h:1/a/b", "http://h:1/a/b", ("h", 1, "/a/b")),
        ("http://[::1]:65535", "http://[::1]:65535", ("::1", 65535, "")),
    ],
)
def test_a_url_says_where_to_connect_and_what_stands_before_a_path(
    text: str, shown: str, where: tuple[str, int, str]
) -> None:
    url = ServerUrl.parse(text)
    assert (url.host, url.port, url.prefix) == where
    assert str(url) == shown
    assert ServerUrl.parse(shown) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ftp://x",
        "http://",
        "http://:80",
        "http://x:99999",
        "http://x:80a",
        "http://x:-1",
        "http://x:0",
        "http://[::1",
        "http://x/?a=b",
        "http://x/#a",
        "http://x/a b",
        "http://x/\x7f",
        "http://ü.org",
        "/tmp/socket",
    ],
)
def test_what_is_no_url_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--url is .*; it must be like http://127\.0\.0\.1:8000"):
        ServerUrl.parse(text)


@pytest.mark.parametrize("text", ["http://user:secret@x", "http://user:secret@x:99999", "user:secret@x"])
def test_a_name_and_a_password_are_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerUrl.parse(text)
    assert "secret" not in str(caught.value)
