"""The two files of a batch: requests to read, and answers to go on with; knows no model and no server."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from everystop.core.errors import ConfigError

URLS = ("/v1/chat/completions", "/v1/completions")
NAMES = ("custom_id", "method", "url", "body")
ANSWER_START = b'{"custom_id": '


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of the input, in the form of OpenAI's batch API."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(source: Path) -> Iterator[BatchLine]:
    """The requests of a file, checked; raises ConfigError that names the line."""
    seen: set[str] = set()
    try:
        if source.exists() and not source.is_file():
            raise ConfigError(f"{source} is no file; it is read twice, so write the requests to a file")
        with source.open(encoding="utf-8-sig") as lines:
            for number, text in enumerate(lines, start=1):
                if text.strip():
                    yield _parse_line(text, f"{source} line {number}", seen)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: {error}") from error


def _parse_line(text: str, where: str, seen: set[str]) -> BatchLine:
    try:
        value = json.loads(text, object_pairs_hook=_named_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        raise ConfigError(f'{where} must be an object with "custom_id", "url" and a "body" object')
    if unknown := [name for name in value if name not in NAMES]:
        raise ConfigError(f"{where} has {unknown[0][:60]!r}, which is unknown here; a line has {', '.join(NAMES)}")
    custom_id, url, method = value.get("custom_id"), value.get("url"), value.get("method", "POST")
    if not isinstance(custom_id, str) or custom_id in seen or not _is_unicode(custom_id):
        raise ConfigError(f"{where}: custom_id {custom_id!r} must be a string that no other line has")
    if url not in URLS or method != "POST":
        raise ConfigError(f"{where}: {method} {url!r} is not served; use POST with {' or '.join(URLS)}")
    seen.add(custom_id)
    return BatchLine(custom_id, url, value["body"])


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, whose keys no two readers may take for different things."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object names a key twice; name each once")
    return value


def _is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: no lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


@contextmanager
def open_answers(target: Path, source: Path) -> Iterator[tuple[IO[str], set[str]]]:
    """The file of answers, to be written at its end, and the ids that it answers; held against other runs.

    An unfinished last answer, left by an interruption, is cut off. Raises ConfigError for a file that is no such file,
    and leaves it as it is.
    """
    if target.exists():
        if not target.is_file():
            raise ConfigError(f"{target} is no file; name a file for the answers")
        if target.samefile(source):
            raise ConfigError(f"{target} holds the requests; name another file for the answers")
    with target.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another run is writing to {target}; wait for it, or name another file") from None
        file.seek(0)
        done, whole_bytes = _answered_ids(file, target)
        file.truncate(whole_bytes)
        with os.fdopen(os.dup(file.fileno()), "a", encoding="utf-8") as out:
            yield out, done


def _answered_ids(lines: IO[bytes], target: Path) -> tuple[set[str], int]:
    """Ids that have an answer, and the bytes up to the end of the last whole one."""
    done: set[str] = set()
    whole_bytes = 0
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n") and (line.startswith(ANSWER_START) or ANSWER_START.startswith(line)):
            break
        try:
            answer = json.loads(line)
            answer["response"]["status_code"]
            done.add(answer["custom_id"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{target} line {number} is not an answer of a batch; name another file") from error
        whole_bytes += len(line)
    return done, whole_bytes
