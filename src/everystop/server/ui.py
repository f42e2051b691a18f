"""The dashboard's own files, as they lie in the package: pages, scripts and styles, which hold no data of anybody's."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).with_name("ui")
LIVE_PAGE, REQUEST_PAGE = "index.html", "request.html"
REQUEST_PREFIX = "/ui/r/"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # kept, but asked for again: a new version of the server is seen at once
}


@dataclass(frozen=True, slots=True)
class UiFile:
    """One file: its bytes, its media type, and a tag that changes with the bytes."""

    body: bytes
    media_type: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> UiFile:
        """The file at that path."""
        body = path.read_bytes()
        kind = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        charset = "; charset=utf-8" if kind.startswith("text/") else ""
        return cls(body, kind + charset, f'"{hashlib.sha256(body).hexdigest()[:16]}"')

    def answer(self, request: Request) -> Response:
        """The file, or 304 for who has it."""
        headers = {**HEADERS, "etag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(None, 304, headers)
        return Response(self.body, 200, headers, media_type=self.media_type)


class Ui:
    """All files by their path on the server; only these exist, whatever a path looks like.

    `/ui` is the live page, `/ui/r/ID` the page of a request, `/ui/NAME` any other file. They need no key: what they
    show they ask for, with the key that their reader has typed in.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {f"/ui/{path.relative_to(folder).as_posix()}": UiFile.read(path) for path in _files_in(folder)}

    def is_open(self, path: str) -> bool:
        """The path is one of the files, which anybody may have."""
        return self._file(path) is not None

    def is_file(self, path: str) -> bool:
        """The path is that of a file by its own name."""
        return path in self._files

    def routes(self) -> list[Route]:
        """One for each path; none where the package has no pages."""
        paths = ["/ui", "/ui/", REQUEST_PREFIX + "{id:path}", *self._files]
        return [Route(path, self.file, methods=["GET"]) for path in paths] if self._files else []

    async def file(self, request: Request) -> Response:
        """The file of a path that `routes` names."""
        file = self._file(request.scope["path"])  # which the guard has looked at
        return Response(status_code=404) if file is None else file.answer(request)

    def _file(self, path: str) -> UiFile | None:
        if path in ("/ui", "/ui/"):
            return self._files.get(f"/ui/{LIVE_PAGE}")
        if path.startswith(REQUEST_PREFIX):
            return self._files.get(f"/ui/{REQUEST_PAGE}")
        return self._files.get(path)


def _files_in(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(path for path in folder.rglob("*") if path.is_file())
