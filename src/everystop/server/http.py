"""The HTTP edge: bounds on what a client may send, and uvicorn without its signal handling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from everystop.server.errors import BodyTooLarge

MAX_HEADER_BYTES = 64 * 1024
MAX_BODY_BYTES = 32 * 1024 * 1024
KEEP_ALIVE_S = 65
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


async def read_body(request: Request) -> bytes:
    """The whole body; raises BodyTooLarge as soon as it is known to be too large."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _body_too_large()
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _body_too_large()
    return bytes(body)


def _body_too_large() -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES:,} bytes; send less at once")


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with an end to headers: httptools would collect them without limit."""

    _header_bytes = 0
    _in_headers = True

    def data_received(self, data: bytes) -> None:
        """Count bytes as long as no header block has ended in them."""
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """A new request begins."""
        self._in_headers, self._header_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The header block has ended."""
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body has ended: what comes next is a header block again."""
        self._in_headers, self._header_bytes = True, 0
        super().on_message_complete()


class HttpServer(uvicorn.Server):
    """uvicorn on a given socket; signals are left to the caller, who sets `should_exit`."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=2,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing."""
        yield
