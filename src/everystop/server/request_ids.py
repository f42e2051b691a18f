"""The client's own id of a request, which its answer carries as `x-request-id`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from everystop.core.errors import RequestError

MAX_CHARS = 128
HEADER = b"x-request-id"
_GIVEN = re.compile(rb"[!-~]{1,%d}" % MAX_CHARS)


def given_name(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """What the client calls its request, "" for nothing; raises RequestError for several ids, and for one that is too
    long or not made of printable ASCII characters.
    """
    given = [value for name, value in headers if name == HEADER]
    if not given:
        return ""
    if len(given) > 1 or _GIVEN.fullmatch(given[0]) is None:
        raise RequestError(
            f"the header x-request-id must be one id of 1 to {MAX_CHARS} printable ASCII characters, no blanks",
            code="invalid_request_id",
        )
    return given[0].decode("ascii")
