"""Asks a running server: what the commands that look at one need of HTTP, and its refusals in plain words."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from everystop.cli.settings import KEY_VARIABLE, key_to_send
from everystop.core.errors import RemoteError
from everystop.server_url import ServerUrl

TIMEOUT_S = 10.0


class Remote:
    """A server at a URL; raises ConfigError for a URL that is none, and RemoteError for what the server does not do."""

    def __init__(self, url: str, api_key: str | None = None, ca_file: str | None = None) -> None:
        self._where = ServerUrl.parse(url)
        self._tls = self._where.tls(ca_file)
        self.url = str(self._where)
        self._key = key_to_send(api_key)

    def events(self, path: str) -> Iterator[Any]:
        """The messages of a stream of server-sent events, until it ends."""
        with self._get(path) as answer:
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                raise RemoteError(f"{self.url}{path} is no stream of events; is {self.url} an Everystop server?")
            try:
                while line := answer.readline():
                    if line.startswith(b"data: "):
                        yield json.loads(line.removeprefix(b"data: "))
            except (OSError, HTTPException, ValueError) as error:
                raise RemoteError(f"the stream of {self.url} broke off: {_words(error)}") from error

    def get_json(self, path: str, timeout_s: float = TIMEOUT_S) -> Any:
        """The answer's JSON, of which nothing may be missing for longer than `timeout_s`."""
        with self._get(path, timeout_s) as answer:
            try:
                return json.loads(answer.read())
            except (OSError, HTTPException, ValueError) as error:
                raise RemoteError(f"{self.url}{path} gave no JSON: {_words(error)}") from error

    @contextlib.contextmanager
    def _get(self, path: str, timeout_s: float = TIMEOUT_S) -> Iterator[HTTPResponse]:
        connection = self._connection(timeout_s)
        headers = {} if self._key is None else {"authorization": f"Bearer {self._key}".encode()}
        with contextlib.closing(connection):
            try:
                connection.request("GET", self._where.prefix + path, headers=headers)
                answer = connection.getresponse()
            except ssl.SSLCertVerificationError as error:
                raise RemoteError(self._where.distrust(error)) from error
            except (OSError, HTTPException) as error:
                raise RemoteError(
                    f"no server answers at {self.url} ({_words(error)}); start one with `everystop serve`, or name it "
                    "with --url"
                ) from error
            if answer.status != 200:
                raise RemoteError(self._refusal(path, answer))
            yield answer

    def _connection(self, timeout_s: float) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(self._where.host, self._where.port, timeout=timeout_s)
        return HTTPSConnection(self._where.host, self._where.port, timeout=timeout_s, context=self._tls)

    def _refusal(self, path: str, answer: HTTPResponse) -> str:
        """What the server says, and what to do about it."""
        try:
            error = json.loads(answer.read())["error"]
            said, code = error["message"], error.get("code")
        except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError):
            said, code = "", ""
        if answer.status == 401:
            known = "another key" if self._key else "a key"
            return f"{self.url} wants {known}: give it with --api-key or in {KEY_VARIABLE}"
        if answer.status == 404 and (not said or code == "not_found"):
            return f"{self.url} has no {path}: it is no Everystop server, or one of another version"
        return f"{self.url} answers {answer.status} {answer.reason}" + (f": {said}" if said else "")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
