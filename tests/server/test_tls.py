"""HTTPS with a certificate made for tests, and what is said of certificates that cannot be used."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.parrot import DEADLINE_S, ParrotServer, parse_events, wait_until

from everystop.cli.remote import Remote
from everystop.config import Config
from everystop.core.errors import ConfigError, RemoteError
from everystop.server.http import MAX_HEADER_BYTES
from everystop.server.tls import Certificate, server_context
from everystop.server_url import ServerUrl
from everystop.sim.workloads import Job, Workload
from everystop.trial.http_client import Target
from everystop.trial.http_load import LoadError, run_load

FILES = Path(__file__).with_name("tls")
CERT, KEY, OTHER_CERT, OTHER_KEY, ENCRYPTED_KEY = (
    str(FILES / f"{name}.pem") for name in ("cert", "key", "other-cert", "other-key", "encrypted-key")
)


class TlsParrot(ParrotServer):
    """A parrot that is asked over TLS."""

    def connect(self) -> contextlib.AbstractContextManager[object]:  # type: ignore[override]
        import http.client

        return http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=60, context=ssl.create_default_context(cafile=CERT)
        )  # type: ignore[return-value]


@pytest.fixture(scope="module")
def secure() -> Iterator[ParrotServer]:
    with TlsParrot(tls=Certificate(CERT, KEY)) as server:
        yield server


def test_requests_and_streams_go_through_tls(secure: ParrotServer) -> None:
    assert secure.complete("abc")[1]["choices"][0]["text"] == "abc"
    events = secure.events("/v1/completions", {"prompt": "abc"})
    assert "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"]) == "abc"


def test_a_client_that_leaves_frees_its_blocks(secure: ParrotServer) -> None:
    with secure.held():
        pass
    wait_until(lambda: secure.num_free_blocks == secure.num_blocks)


def connection(server: ParrotServer, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(
        socket.create_connection(("127.0.0.1", server.port), timeout=60), server_hostname="localhost"
    )


def test_old_protocols_are_refused(secure: ParrotServer) -> None:
    assert server_context(CERT, KEY).minimum_version == ssl.TLSVersion.TLSv1_2
    context = ssl.create_default_context(cafile=CERT)
    with connection(secure, context) as modern:
        assert modern.version() in ("TLSv1.2", "TLSv1.3")
    with pytest.warns(DeprecationWarning, match="TLS"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLS"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.raises(OSError):
        connection(secure, context)


@pytest.mark.parametrize(
    "sent", [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"a" * 70_000, b"\x00" * 9]
)
def test_what_is_no_tls_is_cut_off_and_harms_nobody(secure: ParrotServer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", secure.port), timeout=60) as plain, contextlib.suppress(OSError):
        plain.sendall(sent)
        plain.shutdown(socket.SHUT_WR)
        while received := plain.recv(65536):
            assert not received.startswith(b"HTTP/")
    assert secure.get("/health")[0] == 200


def test_bounds_hold_inside_tls(secure: ParrotServer) -> None:
    with connection(secure, ssl.create_default_context(cafile=CERT)) as one, contextlib.suppress(OSError):
        one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 2 * MAX_HEADER_BYTES)
        answer = one.recv(65536)
        assert answer == b"" or answer.split()[1] in (b"400", b"431")
    assert secure.get("/health")[0] == 200


def test_commands_ask_over_https(secure: ParrotServer) -> None:
    url = f"https://127.0.0.1:{secure.port}"
    assert "version" in Remote(url, ca_file=CERT).get_json("/version")
    message = next(Remote(url, ca_file=CERT).events("/ui/stream"))
    assert "uptime_s" in message
    with pytest.raises(RemoteError, match=r"is not trusted \(.+\); name its file with --ca-file"):
        Remote(url).get_json("/version")
    with pytest.raises(RemoteError):
        Remote(f"http://127.0.0.1:{secure.port}").get_json("/version")


def test_load_goes_through_tls(secure: ParrotServer) -> None:
    url = f"https://127.0.0.1:{secure.port}"
    workload = Workload("two", 1, (Job(prompt=(97, 98), max_tokens=2), Job(prompt=(99,), max_tokens=1)))
    done = run_load(workload, Target(url=url, tls=ServerUrl.parse(url).tls(CERT)))
    assert [record.text for record in done.records] == ["ab", "c"]
    with pytest.raises(LoadError, match="is not trusted"):
        run_load(workload, Target(url=url))


def test_a_file_of_authorities_must_be_one_and_be_of_use() -> None:
    with pytest.raises(ConfigError, match=r"--ca-file none\.pem cannot be used: No such file"):
        Remote("https://localhost", ca_file="none.pem")
    with pytest.raises(ConfigError, match="it is no PEM file"):
        Remote("https://localhost", ca_file=__file__)
    with pytest.raises(ConfigError, match="is no https URL"):
        Remote("http://localhost", ca_file=CERT)


@pytest.mark.parametrize(
    ("cert", "key", "words"),
    [
        ("none.pem", KEY, ["--ssl-certfile none.pem cannot be read: No such file"]),
        (CERT, "none.pem", ["--ssl-keyfile none.pem cannot be read: No such file"]),
        (CERT, OTHER_KEY, ["other-key.pem", "they do not match"]),
        (CERT, ENCRYPTED_KEY, ["encrypted-key.pem is encrypted", "openssl pkey"]),
        (__file__, KEY, ["test_tls.py", "no PEM file"]),
        (CERT, __file__, ["test_tls.py", "no PEM file"]),
        (KEY, CERT, ["no PEM file"]),
    ],
)
def test_what_cannot_be_used_is_named(cert: str, key: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        server_context(cert, key)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("options", [{"ssl_certfile": CERT}, {"ssl_keyfile": KEY}])
def test_certificate_and_key_belong_together(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="give both, or neither"):
        Config(**options)  # type: ignore[arg-type]


class Pair:
    """A certificate and a key in files of their own, which `put` replaces one by one, as a client of ACME does."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key = str(folder / "live-cert.pem"), str(folder / "live-key.pem")
        self.put(CERT, KEY)

    def put(self, cert: str | None = None, key: str | None = None) -> None:
        for source, target in ((cert, self.cert), (key, self.key)):
            if source is not None:
                shutil.copy(source, f"{target}.new")
                os.replace(f"{target}.new", target)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def in_der(path: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text())


def shown(server: ParrotServer, *, name: str | None = "localhost") -> bytes | None:
    """The certificate that a new connection gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S)
    with context.wrap_socket(raw, server_hostname=name) as one:
        return one.getpeercert(binary_form=True)


def test_a_new_certificate_is_taken_in_while_a_stream_goes_on(pair: Pair) -> None:
    gate = threading.Event()
    with TlsParrot(tls=Certificate(pair.cert, pair.key, look_s=0.02)) as server:
        server.runner.before_step = lambda plan: gate.wait(DEADLINE_S)
        with contextlib.closing(server.connect()) as before:
            before.request("POST", "/v1/completions", json.dumps({"prompt": "abc", "stream": True}))
            wait_until(lambda: bool(server.scheduler.requests))
            assert shown(server) == in_der(CERT)
            pair.put(OTHER_CERT, OTHER_KEY)
            wait_until(lambda: shown(server) == in_der(OTHER_CERT))
            assert shown(server, name=None) == in_der(OTHER_CERT), "a client that names no server"
            gate.set()
            events = parse_events(before.getresponse().read())
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abc"
        assert events[-1] == "[DONE]"


def test_what_cannot_be_used_leaves_the_old_certificate_and_one_line(pair: Pair) -> None:
    with TlsParrot(tls=Certificate(pair.cert, pair.key, look_s=0.02)) as server:
        pair.put(cert=OTHER_CERT)
        wait_until(lambda: any("they do not match" in line for line in server.says))
        assert shown(server) == in_der(CERT)
        pair.put(key=OTHER_KEY)
        wait_until(lambda: shown(server) == in_der(OTHER_CERT))
        wait_until(lambda: any("now holds" in line for line in server.says))
        lines = [line for line in server.says if "ertificate" in line]
    assert lines == [
        f"--ssl-certfile {pair.cert} and --ssl-keyfile {pair.key} cannot be used: they do not match "
        "(KEY_VALUES_MISMATCH); new connections get the certificate that was read before",
        f"new connections get the certificate that {pair.cert} now holds",
    ]


def test_files_are_read_once_they_have_stopped_changing(pair: Pair) -> None:
    certificate = Certificate(pair.cert, pair.key)
    assert certificate.refresh() is None
    pair.put(cert=OTHER_CERT)
    assert certificate.refresh() is None, "it has just changed"
    pair.put(key=OTHER_KEY)
    assert certificate.refresh() is None, "it is changing still"
    assert "now holds" in (certificate.refresh() or "")
    assert certificate.refresh() is None


def test_files_that_are_gone_are_told_of_once_and_may_come_back(pair: Pair) -> None:
    certificate = Certificate(pair.cert, pair.key)
    os.unlink(pair.key)
    told = [certificate.refresh() for _ in range(4)]
    assert told[0] is None
    assert "cannot be read: No such file" in (told[1] or "")
    assert told[2:] == [None, None]
    pair.put(key=KEY)
    assert ["now holds" in (certificate.refresh() or "") for _ in range(3)] == [False, True, False]


def test_files_that_vanish_while_they_are_read_are_told_of_and_may_come_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, num_loads = ssl.SSLContext.load_cert_chain, 0

    def load_what_is_left(context: ssl.SSLContext, *args: Any) -> None:
        nonlocal num_loads
        num_loads += 1
        if num_loads == 1:
            os.unlink(pair.key)
        load(context, *args)

    with TlsParrot(tls=Certificate(pair.cert, pair.key, look_s=0.02)) as server:
        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_what_is_left)
        pair.put(cert=OTHER_CERT)
        wait_until(lambda: any("cannot be read: No such file" in line for line in server.says))
        assert shown(server) == in_der(CERT)
        pair.put(key=OTHER_KEY)
        wait_until(lambda: shown(server) == in_der(OTHER_CERT))
