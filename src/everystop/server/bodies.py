"""The bodies of requests: what they may be by their headers, how large, and how many bytes of them are held at once."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

from starlette.requests import ClientDisconnect, Request

from everystop.server.errors import BodyEncoded, BodyNotJson, BodyTooLarge, ClientGone, Overloaded
from everystop.server.http_counts import announced_bytes

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_BODIES_BYTES = 16 * MAX_BODY_BYTES

# What `curl -d` and a browser's `fetch` of a text say where nobody tells them better is taken as well.
TAKEN_TYPES = frozenset({"application/json", "application/x-www-form-urlencoded", "text/plain"})
TAKEN_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
_TYPE = re.compile(r"[\w!#$&^.+-]+/[\w!#$&^.+-]+", re.ASCII)
_CHARSET = re.compile(r"\s*charset\s*=\s*(?:\"([^\"]*)\"|([^\s\"]*))\s*", re.IGNORECASE)
_MAX_ECHO = 60

Headers = Sequence[tuple[bytes, bytes]]


class Bodies:
    """Counts the bytes of bodies that are being received or prepared, `max_bytes` at most: memory that nobody has been
    admitted for.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @contextlib.contextmanager
    def room(self) -> Iterator[Callable[[int], None]]:
        """A function that takes room for more bytes of one body; all of it is given back in the end.

        It raises Overloaded where there is none.
        """
        num_taken = 0

        def take(num_bytes: int) -> None:
            nonlocal num_taken
            if self._num_bytes + num_bytes > self._max_bytes:
                raise Overloaded(
                    f"bodies of more than {self._max_bytes:,} bytes are being received; try again later",
                    retry_after_s=1,
                    code="bodies_full",
                )
            self._num_bytes += num_bytes
            num_taken += num_bytes

        try:
            yield take
        finally:
            self._num_bytes -= num_taken


def check_headers(headers: Headers) -> None:
    """Refuse a body by what its headers say of it: raises BodyEncoded, BodyNotJson, BodyTooLarge."""
    _check_codings(headers)
    _check_type(headers)
    if (announced_bytes(headers) or 0) > MAX_BODY_BYTES:
        raise _body_too_large()


async def read_body(request: Request, take_room: Callable[[int], None]) -> bytes:
    """The whole body; raises what `check_headers` raises, BodyTooLarge as soon as it is too large, and ClientGone.

    `take_room` is told of each piece.
    """
    check_headers(request.scope["headers"])
    body = bytearray()
    try:
        async for chunk in request.stream():
            take_room(len(chunk))
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise _body_too_large()
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _check_codings(headers: Headers) -> None:
    for coding in _values(headers, b"content-encoding"):
        if coding.lower() not in ("identity", ""):
            raise BodyEncoded(f"content-encoding {coding[:_MAX_ECHO]!r} is not supported; send the body as it is")
    codings = _values(headers, b"transfer-encoding")
    if codings and [coding.lower() for coding in codings] != ["chunked"]:
        said = ", ".join(codings)[:_MAX_ECHO]
        raise BodyEncoded(f"transfer-encoding {said!r} is not supported; send chunks alone, or a content-length")


def _check_type(headers: Headers) -> None:
    """A body that says nothing is taken for JSON; one that says something else than a text that may be JSON is not."""
    said = _values(headers, b"content-type")
    if len(said) > 1:
        raise BodyNotJson(f"{len(said)} content-type headers came with the body; send one, application/json")
    media_type, *parameters = said[0].split(";") if said else [""]
    media_type = media_type.strip().lower()
    if media_type and not _is_taken(media_type):
        raise BodyNotJson(f"content-type {media_type[:_MAX_ECHO]!r} is not taken; send JSON, as application/json")
    for parameter in parameters:
        charset = _CHARSET.fullmatch(parameter)
        if charset is not None and (name := charset[1] or charset[2] or "").lower() not in TAKEN_CHARSETS:
            raise BodyNotJson(f"charset {name[:_MAX_ECHO]!r} is not taken; send JSON in utf-8")


def _is_taken(media_type: str) -> bool:
    if media_type in TAKEN_TYPES:
        return True
    return media_type.endswith("+json") and _TYPE.fullmatch(media_type) is not None


def _values(headers: Headers, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for given, value in headers if given == name]


def _body_too_large() -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {MAX_BODY_BYTES:,} bytes; send less at once")
