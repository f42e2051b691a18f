"""A record of a run, read back: the settings and calls of one scheduler, the keys of its requests' blocks, and the
times of its clients.

The format is described in `everystop.observe.recorder`, which writes it. Replays use no token ids, even where the user
had them recorded: every token is filler or a stop token.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from everystop.core.errors import RecordError
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import Policy, PolicySettings, make_policy
from everystop.core.recording import RECORD_VERSION
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import StepTimeModel
from everystop.observe.history import Client
from everystop.runner.simulated import FILLER_TOKEN

STOP_TOKEN = FILLER_TOKEN + 1
READABLE_VERSIONS = tuple(range(1, RECORD_VERSION + 1))
FLUSH_MARK = b"\x00\x00\xff\xff"  # an empty block, by which zlib ends what is flushed
CALLS = ("add", "refuse", "decline", "abort", "schedule", "update")


class Prompt(NamedTuple):
    """What a client asked: the prompt, the fields of `SamplingParams` that it did not leave at their defaults, and the
    model's end-of-sequence tokens.
    """

    token_ids: tuple[int, ...]
    params: dict[str, Any]
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class Record:
    """A record in memory: the header's settings, the calls in order, each request's block keys, the HTTP requests that
    were answered, and, where the user asked for them, the prompts by group and the outputs by request.

    `is_truncated`: it ends without its end mark, or with what cannot be read; `may_go_on`: what there is of it is
    whole, as while it is being written.
    """

    path: Path
    policy: str
    policy_settings: PolicySettings
    limits: Limits
    kv: dict[str, Any]
    step_times: StepTimeModel
    calls: list[list[Any]] = field(default_factory=list)
    keys: dict[int, list[bytes]] = field(default_factory=dict)
    clients: list[Client] = field(default_factory=list)
    prompts: dict[int, Prompt] = field(default_factory=dict)
    outputs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    is_truncated: bool = False
    may_go_on: bool = False

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record; one that was cut off is good up to there. Raises RecordError."""
        lines = _Lines(path)
        record = cls._of_header(path, next(iter(lines), None))
        for line in lines:
            try:
                record._take(line)
            except (IndexError, KeyError, TypeError, ValueError) as error:
                raise RecordError(f"{path} has a line that means nothing: {line!s:.80}; record the run anew") from error
        record.is_truncated, record.may_go_on = lines.is_truncated, lines.may_go_on
        return record

    @classmethod
    def _of_header(cls, path: Path, header: Any) -> Record:
        version = header.get("everystop_record") if isinstance(header, dict) else None
        if version is None:
            raise RecordError(f"{path} is not a record of a run; write one with everystop serve --record")
        if version not in READABLE_VERSIONS:
            raise RecordError(
                f"{path} is a record of version {version!s:.20}, and this version of everystop reads only versions "
                f"{', '.join(map(str, READABLE_VERSIONS))}; read it with the one that wrote it, or record the run anew"
            )
        try:
            return cls(
                path,
                header["policy"],
                PolicySettings.from_data(header),
                Limits(**{"admission": "greedy"} | header["limits"]),
                _numbers(header["kv"]),
                _step_times(header.get("step_times", {})),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecordError(
                f"{path} has a header that this version cannot read ({error}); record the run anew"
            ) from error

    def _take(self, line: Any) -> None:
        """Put one line where it belongs."""
        kind = line[0]
        if kind in CALLS:
            self.calls.append(line)
        elif kind == "keys":
            self.keys[line[1]] = [bytes.fromhex(key) for key in line[2]]
        elif kind == "client":
            self.clients.append(_client(*line[1:10]))
        elif kind == "prompt":
            _, group_id, token_ids, params, eos_token_ids = line
            self.prompts[group_id] = Prompt(tuple(token_ids), params, tuple(eos_token_ids))
        elif kind == "output":
            self.outputs[line[1]] = tuple(line[2])
        else:
            raise ValueError(kind)

    def make_scheduler(self, policy: Policy | None = None, step_times: StepTimeModel | None = None) -> Scheduler:
        """A scheduler as the recorded one was at its start, by default with its own policy and step times.

        Raises RecordError where its KV cache takes more memory than there is.
        """
        policy = policy or make_policy(self.policy, self.policy_settings)
        try:
            cache = KVCache(**self.kv)
        except (MemoryError, OverflowError):
            raise RecordError(
                f"{self.path} is of a server with {self.kv['num_blocks']:,} KV blocks, which is more than the memory "
                "here can keep account of; read it where there is more, or record a run with a smaller KV cache"
            ) from None
        return Scheduler(self.limits, cache, policy, step_times or self.step_times)

    def make_request(self, call: list[Any], max_tokens: int | None) -> Request:
        """The request of an `add`, with filler for a prompt and the recorded keys."""
        _, now_ns, request_id, group_id, choice_index, num_prompt, _, min_tokens, n, num_stop_ids, *rest = call
        tenant, priority, ttft_target_ns, itl_target_ns, is_scored = (*rest, None, None, False)[:5]
        stop_ids = (STOP_TOKEN,) if num_stop_ids else ()
        return Request(
            request_id,
            [FILLER_TOKEN] * num_prompt,
            SamplingParams(
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                n=n,
                stop_token_ids=stop_ids,
                prompt_logprobs=0 if is_scored else None,
            ),
            arrival_ns=now_ns,
            group_id=group_id,
            choice_index=choice_index,
            tenant=str(tenant),
            priority=priority,
            ttft_target_ns=ttft_target_ns,
            itl_target_ns=itl_target_ns,
            block_keys=list(self.keys[request_id] if request_id in self.keys else self._stand_in(request_id)),
        )

    def _stand_in(self, request_id: int) -> list[bytes]:
        """Keys of a request that never ended, or not before the record was cut off: they match nobody's."""
        return [b"lost with request %d" % request_id] if self.is_truncated else []


def _numbers(data: dict[str, Any]) -> dict[str, Any]:
    """The settings of a KV cache; raises TypeError for what is no number, true or false."""
    for name, value in data.items():
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}")
    return data


def _step_times(data: dict[str, float]) -> StepTimeModel:
    """Older records also hold times that a model of steps does not have any more."""
    known = {each.name for each in fields(StepTimeModel)}
    return StepTimeModel(**{name: value for name, value in data.items() if name in known})


class _Lines:
    """The JSON lines of a file, up to the first that is damaged or cut off; raises RecordError if none can be read."""

    def __init__(self, path: Path) -> None:
        self.is_truncated = self.may_go_on = False
        self._path = path
        self._iterator = self._read(path)

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def _read(self, path: Path) -> Iterator[Any]:
        try:
            with gzip.open(path, "rt", encoding="ascii") as file:
                for line in file:
                    yield json.loads(line)
        except EOFError:
            self.is_truncated = True
            self.may_go_on = self._ends_whole()
        except (gzip.BadGzipFile, zlib.error, ValueError, RecursionError):
            self.is_truncated = True
        except OSError as error:
            raise RecordError(f"the record {path} cannot be read: {error.strerror}; name another file") from None

    def _ends_whole(self) -> bool:
        """The last thing in the file is what its writer puts behind each piece."""
        try:
            with self._path.open("rb") as file:
                file.seek(-len(FLUSH_MARK), os.SEEK_END)
                return file.read() == FLUSH_MARK
        except OSError:  # a pipe, which cannot be looked at again
            return False


def _client(first_request_id: int, num: int, name: str, *times_and_more: Any) -> Client:
    """The client of a line; what only some lines say comes last."""
    received_ns, submitted_ns, first_sent_ns, delivered_ns, given_name, has_left = (*times_and_more, "", False)[:6]
    return Client(
        name, "", first_request_id, num, received_ns, submitted_ns, first_sent_ns, delivered_ns, given_name, has_left
    )
