"""What an operator is told, and refused, at the start: who can reach the server, and who can read its secrets."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.model.builders import tiny_model, write_folder
from tests.model.vocabularies import sentencepiece_inner, write_tokenizer

from everystop.config import Config
from everystop.core.errors import ConfigError
from everystop.keys import hash_key
from everystop.server.listener import is_loopback, listen
from everystop.server.opening import Opening

Open = Callable[..., Opening]
TLS = Path(__file__).with_name("tls")


@pytest.fixture(scope="module")
def open_with(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens a tiny model with some settings; nothing is loaded or listened on."""
    folder = write_folder(tmp_path_factory.mktemp("tiny") / "model", tiny_model("llama", vocab_size=1000))
    write_tokenizer(folder, sentencepiece_inner(), bos_token="<s>", eos_token="</s>")

    def opened(**settings: Any) -> Opening:
        return Opening(Config(model=str(folder), **settings), "http://here:8000")

    return opened


def secret(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_server_that_others_can_reach_without_keys_says_so(open_with: Open, tmp_path: Path) -> None:
    opening = open_with(host="0.0.0.0")
    [warning] = opening.warnings(is_loopback=False)
    assert "other machines can reach http://here:8000" in warning
    assert "no keys are set" in warning
    assert open_with().warnings(is_loopback=True) == []
    keys = secret(tmp_path / "keys", "a: sk-1\n")
    tenants = secret(tmp_path / "t.toml", '[tenant.a]\nkeys = ["sk-2"]\n')
    for keyed in ({"api_key": ("k",)}, {"admin_key": ("k",)}, {"api_key_file": keys}, {"tenants": tenants}):
        assert open_with(host="0.0.0.0", **keyed).warnings(is_loopback=False) == []
    unkeyed = secret(tmp_path / "u.toml", "[tenant.a]\n")
    assert len(open_with(tenants=unkeyed).warnings(is_loopback=False)) == 1


def test_loopback_is_the_default_and_known_as_such() -> None:
    assert Config().host == "127.0.0.1"
    for host, expected in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        with listen(host, 0) as sock:
            assert isinstance(sock, socket.socket)
            assert is_loopback(sock) is expected


def test_secrets_that_others_can_read_are_warned_of(open_with: Open, tmp_path: Path) -> None:
    keys = secret(tmp_path / "keys", "sk-1\n", 0o644)
    tenants = secret(tmp_path / "t.toml", "[tenant.a]\nkeys = ['sk-2']\n", 0o640)
    key = secret(tmp_path / "key.pem", (TLS / "key.pem").read_text(), 0o604)
    opening = open_with(api_key_file=keys, tenants=tenants, ssl_keyfile=key, ssl_certfile=str(TLS / "cert.pem"))
    warnings = opening.warnings(is_loopback=False)
    assert [warning.partition(" holds secrets")[0] for warning in warnings] == [keys, tenants, key]
    assert opening.tls is not None


def test_keys_of_all_places_are_joined(open_with: Open, tmp_path: Path) -> None:
    keys = secret(tmp_path / "keys", "plain-2\ngold: g2\nnew: n1\n")
    tenants = secret(tmp_path / "t.toml", '[tenant.gold]\nkeys = ["g1"]\n')
    opening = open_with(api_key=("plain-1",), api_key_file=keys, tenants=tenants)
    assert opening.api_keys == (hash_key("plain-1"), hash_key("plain-2"))
    by_name = opening.tenants.by_name
    assert {name: tenant.keys for name, tenant in by_name.items()} == {
        "gold": (hash_key("g1"), hash_key("g2")),
        "new": (hash_key("n1"),),
    }


def test_what_has_no_effect_with_keys_is_refused(open_with: Open) -> None:
    with pytest.raises(ConfigError, match="--allowed-host has no effect where keys are set"):
        open_with(api_key=("k",), allowed_host=("llm.example",))
    assert open_with(allowed_host=("llm.example",)).warnings(is_loopback=True) == []


@pytest.mark.parametrize("host", ["http://a", "a:80", "", "a b", "*"])
def test_an_allowed_host_is_a_name(host: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-host is"):
        Config(allowed_host=(host,))


def test_a_certificate_is_read_before_the_model_is() -> None:
    with pytest.raises(ConfigError, match=r"--ssl-certfile none\.pem cannot be read"):
        Opening(Config(model="no such model", ssl_certfile="none.pem", ssl_keyfile="none.pem"), "https://here:8000")
