"""Reads request traces line by line, so that memory does not grow with a trace; knows nothing of schedulers.

| format   | first line or keys                                                                                     |
|----------|--------------------------------------------------------------------------------------------------------|
| azure    | CSV `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure LLM inference traces)                             |
| mooncake | JSON lines `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one per 512 prompt tokens)   |
| sharegpt | CSV `arrival_s,input_tokens,output_tokens`                                                             |
| tenant   | CSV `req_time_s,client,prompt_tokens,output_tokens`                                                    |
| own      | JSON lines `arrival_ns`, `num_prompt_tokens`, `num_output_tokens`; optional `tenant`, `prefix_ids`,    |
|          | `prefix_id_tokens`, `ttft_target_ms`, `itl_target_ms`                                                  |

A prefix id names all of the prompt up to its end: requests with equal ids have equal prompts up to there. A file whose
name ends in `.gz` is decompressed.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

from everystop.core.durations import MAX_TARGET_MS, MIN_TARGET_MS, NS_PER_MS, NS_PER_S
from everystop.core.errors import ConfigError, EverystopError

MOONCAKE_ID_TOKENS = 512
MAX_LENGTH = 2**31 - 1  # of a prompt or an output, as far as a request can ask
MAX_ARRIVAL_NS = 2**62  # 146 years
EPOCH = datetime(1970, 1, 1)
TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?")


class TraceError(EverystopError):
    """A trace that cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace. `prefix_ids[i]` names the prompt up to token (i + 1) · `prefix_id_tokens`; without any,
    nothing of the prompt is shared with another request.
    """

    arrival_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    prefix_ids: tuple[int, ...] = ()
    prefix_id_tokens: float = MOONCAKE_ID_TOKENS
    ttft_target_ns: int | None = None
    itl_target_ns: int | None = None

    def block_keys(self, block_size: int) -> list[bytes]:
        """Keys of the prompt's full KV blocks that prefix ids cover: the id of a block's last token, and its place.

        Example, block_size 256, 512 tokens an id, ids (7, 8), 600 prompt tokens: blocks 0 and 1 are "7:0" and "7:1";
        block 2 would end at token 768, beyond the prompt.
        """
        ids, scale = self.prefix_ids, self.prefix_id_tokens
        num_full = self.num_prompt_tokens // block_size if ids else 0
        keys = []
        for i in range(num_full):
            at = int(((i + 1) * block_size - 1) // scale)
            if at >= len(ids):
                break
            keys.append(b"%d:%d" % (ids[at], i))
        return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """How a trace is read: `format` None looks at the content; lengths times `scale_lengths`, times between arrivals
    times `dilate_time`; at most `limit` requests.
    """

    format: str | None = None
    scale_lengths: float = 1.0
    dilate_time: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("scale_lengths", "dilate_time"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be a number above 0")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit is {self.limit}; it must be at least 1")


def read_trace(path: Path, options: TraceOptions | None = None) -> Iterator[TraceRequest]:
    """The requests of a trace in order of arrival, the first at time 0 and none of fewer than one token each way.

    Raises TraceError, naming file and line, for what cannot be read, for arrivals that go back in time, and for a
    trace without requests.
    """
    options = options or TraceOptions()
    start_ns = last_ns = None
    limit = None if options.limit is None else min(options.limit, sys.maxsize)
    for number, raw in itertools.islice(_raw_requests(path, options.format), limit):
        if start_ns is None:
            start_ns = last_ns = raw.arrival_ns
        assert last_ns is not None
        if raw.arrival_ns < last_ns:
            late_ms = (last_ns - raw.arrival_ns) / NS_PER_MS
            raise TraceError(f"{path}:{number}: arrives {late_ms:g} ms before the line above; sort the trace by time")
        last_ns = raw.arrival_ns
        try:
            request = _scaled(raw, start_ns, options)
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        yield request
    if start_ns is None:
        raise TraceError(f"{path} has no requests below its first line; it must hold at least one")


def _scaled(raw: TraceRequest, start_ns: int, options: TraceOptions) -> TraceRequest:
    """As the options want it; raises ValueError for what is then too long or too late."""
    return TraceRequest(
        arrival_ns=_times_factor(raw.arrival_ns - start_ns, options.dilate_time, "nanoseconds", MAX_ARRIVAL_NS),
        num_prompt_tokens=max(1, _times_factor(raw.num_prompt_tokens, options.scale_lengths, "tokens", MAX_LENGTH)),
        num_output_tokens=max(1, _times_factor(raw.num_output_tokens, options.scale_lengths, "tokens", MAX_LENGTH)),
        tenant=raw.tenant,
        prefix_ids=raw.prefix_ids,
        prefix_id_tokens=raw.prefix_id_tokens * options.scale_lengths,
        ttft_target_ns=raw.ttft_target_ns,
        itl_target_ns=raw.itl_target_ns,
    )


def _times_factor(number: int, factor: float, unit: str, most: int) -> int:
    """The product as a whole number of that unit; raises ValueError for one above `most`."""
    if number > most or number * factor > most:
        times = "" if factor == 1 else f" × {factor:g}"
        raise ValueError(f"{number:,}{times} {unit} are too many; at most {most:,} can be simulated")
    return round(number * factor)


def _raw_requests(path: Path, format_name: str | None) -> Iterator[tuple[int, TraceRequest]]:
    """Pairs of line number and request, as they stand in the file."""
    try:
        with _open(path) as file:
            number, line = _first_line(file, path)
            trace_format = FORMATS[format_name] if format_name else _detect(line, number, path)
            lines = itertools.chain([line], file)
            rows = _csv_rows(lines, number, path) if trace_format.is_csv else _json_rows(lines, number, path)
            for number, row in rows:
                yield number, _parse(trace_format, row, path, number)
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path} cannot be read as UTF-8: {error}; one that is compressed must be named .gz"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _first_line(file: TextIO, path: Path) -> tuple[int, str]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            return number, line
    raise TraceError(f"{path} is empty; it must hold at least one request")


def _csv_rows(lines: Iterator[str], number: int, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(lines)
    try:
        reader.fieldnames = names = [name.strip() for name in reader.fieldnames or ()]
        twice = [name for i, name in enumerate(names) if name in names[:i]]
        if twice:
            raise TraceError(f"{path}:{number}: two columns are named {twice[0]!r}; keep one of them")
        for row in reader:
            at = reader.line_num + number - 1
            if None in row:
                num_found = len(names) + len(row[None])
                raise TraceError(f"{path}:{at}: {num_found} values, but the first line names {len(names)} columns")
            yield at, row
    except csv.Error as error:
        raise TraceError(f"{path}:{reader.line_num + number - 1}: {error}") from error


def _json_rows(lines: Iterator[str], number: int, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for at, line in enumerate(lines, start=number):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_without_twins)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}:{at}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{at}: each line must be a JSON object")
        yield at, row


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object; raises ValueError where a name comes twice, since only one of the values could count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twin!r} comes twice in one object; keep one of them")
    return found


@dataclass(frozen=True, slots=True)
class Format:
    """How one line becomes a request; `fields` must all be there."""

    fields: tuple[str, ...]
    is_csv: bool
    parse: Callable[[Mapping[str, Any]], TraceRequest]
    optional: tuple[str, ...] | None = None


def _parse(trace_format: Format, row: Mapping[str, Any], path: Path, number: int) -> TraceRequest:
    missing = [name for name in trace_format.fields if row.get(name) is None]
    if missing:
        raise TraceError(f"{path}:{number}: no {' and no '.join(missing)}")
    if trace_format.optional is not None:
        unknown = [name for name in row if name not in (*trace_format.fields, *trace_format.optional)]
        if unknown:
            raise TraceError(f"{path}:{number}: unknown field {unknown[0]!r}")
    try:
        request = trace_format.parse(row)
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{path}:{number}: {error}") from error
    if request.num_prompt_tokens < 0 or request.num_output_tokens < 0:
        raise TraceError(f"{path}:{number}: a length is below 0")
    return request


def _detect(line: str, number: int, path: Path) -> Format:
    """The format whose fields all stand in the first line, which has that number."""
    try:
        words = json.loads(line) if line.lstrip().startswith("{") else next(csv.reader([line]))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: not JSON: {error}") from error
    except csv.Error as error:
        raise TraceError(f"{path}:{number}: {error}") from error
    names = {name.strip() for name in words}
    for trace_format in FORMATS.values():
        if names.issuperset(trace_format.fields):
            return trace_format
    known = "; ".join(f"{name} with {', '.join(each.fields)}" for name, each in FORMATS.items())
    raise TraceError(f"{path}:{number}: no known format has {', '.join(sorted(names))}; known are {known}")


def _whole(value: Any) -> int:
    """A whole number, from CSV text or JSON; raises ValueError."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"{value!r} is not a whole number")
    try:
        return int(value)
    except (ValueError, TypeError):
        raise ValueError(f"{str(value)[:40]!r} is not a whole number") from None


def _ids(row: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The prefix ids of a line, () if it has none; raises ValueError."""
    ids = row.get(name)
    if ids is None:
        return ()
    if not isinstance(ids, list):
        raise ValueError(f"{name} is {ids!r}; it must be a list of whole numbers")
    return tuple(map(_whole, ids))


def _times(value: Any, unit_ns: int) -> int:
    """A time of that unit in nanoseconds; raises ValueError."""
    return round(float(value) * unit_ns)


def _timestamp_ns(text: str) -> int:
    """Nanoseconds since 1970 of a UTC time such as "2023-11-16 18:15:46.6805900"; raises ValueError."""
    match = TIMESTAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a UTC time such as 2023-11-16 18:15:46.6805900")
    seconds = (datetime.fromisoformat(match[1]) - EPOCH) // timedelta(seconds=1)
    return seconds * NS_PER_S + int((match[2] or "").ljust(9, "0"))


def _azure(row: Mapping[str, Any]) -> TraceRequest:
    return TraceRequest(
        arrival_ns=_timestamp_ns(row["TIMESTAMP"]),
        num_prompt_tokens=_whole(row["ContextTokens"]),
        num_output_tokens=_whole(row["GeneratedTokens"]),
    )


def _mooncake(row: Mapping[str, Any]) -> TraceRequest:
    num_prompt, ids = _whole(row["input_length"]), _ids(row, "hash_ids")
    if len(ids) * MOONCAKE_ID_TOKENS < num_prompt:
        raise ValueError(f"{len(ids)} hash_ids of {MOONCAKE_ID_TOKENS} tokens do not cover {num_prompt:,} tokens")
    return TraceRequest(
        arrival_ns=_times(row["timestamp"], NS_PER_MS),
        num_prompt_tokens=num_prompt,
        num_output_tokens=_whole(row["output_length"]),
        prefix_ids=ids,
    )


def _sharegpt(row: Mapping[str, Any]) -> TraceRequest:
    return TraceRequest(
        arrival_ns=_times(row["arrival_s"], NS_PER_S),
        num_prompt_tokens=_whole(row["input_tokens"]),
        num_output_tokens=_whole(row["output_tokens"]),
    )


def _tenant(row: Mapping[str, Any]) -> TraceRequest:
    return TraceRequest(
        arrival_ns=_times(row["req_time_s"], NS_PER_S),
        num_prompt_tokens=_whole(row["prompt_tokens"]),
        num_output_tokens=_whole(row["output_tokens"]),
        tenant=row["client"],
    )


def _own(row: Mapping[str, Any]) -> TraceRequest:
    id_tokens = row.get("prefix_id_tokens", MOONCAKE_ID_TOKENS)
    if isinstance(id_tokens, bool) or not isinstance(id_tokens, int) or id_tokens < 1:
        raise ValueError(f"prefix_id_tokens is {id_tokens!r}; it must be a whole number from 1")
    tenant = "" if row.get("tenant") is None else row["tenant"]
    if not isinstance(tenant, str):
        raise ValueError(f"tenant is {tenant!r}; it must be text")
    return TraceRequest(
        arrival_ns=_whole(row["arrival_ns"]),
        num_prompt_tokens=_whole(row["num_prompt_tokens"]),
        num_output_tokens=_whole(row["num_output_tokens"]),
        tenant=tenant,
        prefix_ids=_ids(row, "prefix_ids"),
        prefix_id_tokens=id_tokens,
        ttft_target_ns=_target_ns(row, "ttft_target_ms"),
        itl_target_ns=_target_ns(row, "itl_target_ms"),
    )


def _target_ns(row: Mapping[str, Any], name: str) -> int | None:
    """A latency target of a line in nanoseconds, None if it has none; raises ValueError."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_TARGET_MS <= value <= MAX_TARGET_MS:
        raise ValueError(f"{name} is {value!r}; it must be a number from {MIN_TARGET_MS} to {MAX_TARGET_MS:,}")
    return _times(value, NS_PER_MS)


FORMATS = {
    "azure": Format(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), True, _azure),
    "mooncake": Format(("timestamp", "input_length", "output_length", "hash_ids"), False, _mooncake),
    "sharegpt": Format(("arrival_s", "input_tokens", "output_tokens"), True, _sharegpt),
    "tenant": Format(("req_time_s", "client", "prompt_tokens", "output_tokens"), True, _tenant),
    "own": Format(
        ("arrival_ns", "num_prompt_tokens", "num_output_tokens"),
        False,
        _own,
        optional=("tenant", "prefix_ids", "prefix_id_tokens", "ttft_target_ms", "itl_target_ms"),
    ),
}
