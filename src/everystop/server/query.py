"""The parameters behind a path: one that nobody reads is refused by its name, never ignored."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import wraps

from starlette.requests import Request
from starlette.types import ASGIApp

from everystop.core.errors import RequestError
from everystop.server.fields import echo

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def check_known(given: Iterable[str], known: Collection[str]) -> None:
    """Raise RequestError for the first parameter that is not known."""
    for name in given:
        if name not in known:
            raise RequestError(
                f"the parameter {echo(name)} is not served here; leave it out",
                param=name[:100],
                code="unsupported_field",
            )


def with_known_alone(endpoint: Endpoint, known: Collection[str]) -> Endpoint:
    """The same endpoint, which is not asked where a parameter is not known."""

    @wraps(endpoint)
    async def answer(request: Request) -> ASGIApp:
        check_known(request.query_params, known)
        return await endpoint(request)

    return answer
