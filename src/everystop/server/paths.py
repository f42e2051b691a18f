"""All paths that are served, and what there is to know of each before anything has been read: one table, from which the
routes, the guards, the metrics, the log and the OpenAPI description take what concerns them.

The files of the dashboard are not in it: they are those that the package has (`server.ui`).
"""

from __future__ import annotations

from typing import NamedTuple


class Path(NamedTuple):
    """One method of one path, as Starlette writes it.

    `is_open`: it needs no key, says nothing of anybody, and is asked so often that its refusals fill no log.
    `generates`: tokens are computed for it, so the queue must have room. `is_tgi`: its errors are those of TGI;
    `may_be_tgi`: where its body is one of TGI's.
    """

    method: str
    pattern: str
    is_open: bool = False
    generates: bool = False
    is_tgi: bool = False
    may_be_tgi: bool = False

    @property
    def name(self) -> str:
        """As OpenAPI writes it."""
        return self.pattern.replace(":path}", "}")


PATHS = (
    Path("GET", "/health", is_open=True),
    Path("GET", "/health/ready", is_open=True),
    Path("GET", "/health/live", is_open=True),
    Path("GET", "/version"),
    Path("GET", "/metrics"),
    Path("GET", "/v1/models"),
    Path("GET", "/v1/models/{name:path}"),
    Path("POST", "/v1/completions", generates=True),
    Path("POST", "/v1/chat/completions", generates=True),
    Path("POST", "/tokenize", may_be_tgi=True),
    Path("POST", "/detokenize"),
    Path("POST", "/generate", generates=True, is_tgi=True),
    Path("POST", "/generate_stream", generates=True, is_tgi=True),
    Path("POST", "/", generates=True, is_tgi=True),
    Path("GET", "/info", is_tgi=True),
    Path("GET", "/openapi.json"),
    Path("GET", "/v1/requests/{id:path}/explain"),
    Path("GET", "/v1/requests/{id:path}"),
    Path("GET", "/ui/stream"),
    Path("GET", "/ui/past"),
)
OPEN_PATHS = frozenset(path.name for path in PATHS if path.is_open)
GENERATIONS = frozenset(path.name for path in PATHS if path.generates)
TGI_PATHS = frozenset(path.name for path in PATHS if path.is_tgi)
