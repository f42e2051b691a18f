"""Keys in files and in memory: hashes alone, and errors that show nothing."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from everystop.core.errors import ConfigError
from everystop.keys import KeyHash, NamedKey, digest_of, exposure, hash_key, read_key_file
from everystop.tenants import Tenant, Tenants, with_keys

HEX = hashlib.sha256(b"sk-1").hexdigest()


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "keys.txt"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    return str(path)


def test_a_key_and_its_hash_are_the_same() -> None:
    assert hash_key("sk-1") == hash_key(f"sha256:{HEX}") == hash_key(f"SHA256:{HEX.upper()}")
    assert hash_key("sk-1").digest == digest_of(b"sk-1")
    assert hash_key("schlüssel") == KeyHash(hashlib.sha256("schlüssel".encode()).digest())


def test_what_a_client_sends_is_never_taken_for_a_hash() -> None:
    assert digest_of(f"sha256:{HEX}".encode()) != hash_key("sk-1").digest


@pytest.mark.parametrize(
    "text", ["", " ", " sk-secret", "sk-secret\n", "sha256:secret", f"sha256:{HEX}secret", "sha256:"]
)
def test_what_is_no_key_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hash_key(text)
    assert "secret" not in str(caught.value)


def test_a_key_is_not_printed() -> None:
    key = hash_key("sk-1")
    for shown in (repr(key), str(key), f"{[key]}", f"{NamedKey('gold', key)}", repr(Tenant(keys=("sk-1",)))):  # type: ignore[arg-type]
        assert "sk-1" not in shown
        assert HEX[:8] not in shown
        assert repr(key.digest)[2:10] not in shown


def test_a_file_holds_keys_hashes_and_names(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"\ufeff# ours\n\nsk-1\n  sha256:{HEX}  \ngold: sk-2\n a b c:\tsk:with:colons\nx:\u00a0sk#4\n#gold: sk-5\n",
    )
    assert read_key_file(path) == (
        NamedKey("", hash_key("sk-1")),
        NamedKey("", hash_key("sk-1")),
        NamedKey("gold", hash_key("sk-2")),
        NamedKey("a b c", hash_key("sk:with:colons")),
        NamedKey("x", hash_key("sk#4")),
    )


@pytest.mark.parametrize(
    "line",
    [
        "sk-secret 2",
        "gold: sk-secret # ours",
        ": sk-secret",
        "gold: a: sk-secret",
        "sha256:secret",
        "gold: sha256:secret",
    ],
)
def test_a_line_that_is_no_key_is_named_and_not_shown(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"keys\.txt, line 3") as caught:
        read_key_file(write(tmp_path, f"# keys\nsk-good\n{line}\n"))
    assert "secret" not in str(caught.value)


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no key"):
        read_key_file(write(tmp_path, "# none yet\n"))
    with pytest.raises(ConfigError, match=r"none\.txt cannot be read: No such file"):
        read_key_file(str(tmp_path / "none.txt"))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_key_file(str(tmp_path / "bytes.txt"))


@pytest.mark.parametrize(("mode", "is_exposed"), [(0o600, False), (0o400, False), (0o640, True), (0o644, True)])
def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, mode: int, is_exposed: bool) -> None:
    path = write(tmp_path, "sk-1")
    os.chmod(path, mode)
    warning = exposure(path)
    assert (warning is not None) is is_exposed
    assert warning is None or f"mode {mode:04o}" in warning


def test_keys_of_a_file_go_to_the_tenants_they_name(tmp_path: Path) -> None:
    tenants = Tenants(by_name={"gold": Tenant(weight=2.0, keys=(hash_key("g1"),))}, user=True)
    joined = with_keys(tenants, read_key_file(write(tmp_path, "gold: g2\nnew: n1\nnew: n2\nplain\n")), "keys.txt")
    assert joined.user
    assert joined.by_name == {
        "gold": Tenant(weight=2.0, keys=(hash_key("g1"), hash_key("g2"))),
        "new": Tenant(keys=(hash_key("n1"), hash_key("n2"))),
    }
    with pytest.raises(ConfigError, match=r"--api-key-file keys\.txt: the tenants gold and new share a key"):
        with_keys(tenants, [NamedKey("new", hash_key("g1"))], "keys.txt")
    with pytest.raises(ConfigError, match="'other'"):
        with_keys(tenants, [NamedKey("other", hash_key("o"))], "keys.txt")
