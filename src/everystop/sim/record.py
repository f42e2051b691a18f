"""A record of a run, read back: the settings and calls of one scheduler, and the keys of its requests' blocks.

The format is described in `everystop.observe.recorder`, which writes it. It has no token ids: every token is filler or
a stop token.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from everystop.core.errors import RecordError
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import Policy, PolicySettings, make_policy
from everystop.core.recording import RECORD_VERSION
from everystop.core.request import Request, SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import StepTimeModel
from everystop.runner.simulated import FILLER_TOKEN

STOP_TOKEN = FILLER_TOKEN + 1


@dataclass(slots=True)
class Record:
    """A record in memory: the header's settings, the calls in order, and each request's block keys."""

    policy: str
    policy_settings: PolicySettings
    limits: Limits
    kv: dict[str, Any]
    step_times: StepTimeModel
    calls: list[list[Any]]
    keys: dict[int, list[bytes]]
    is_truncated: bool

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record; one that was cut off is good up to there. Raises RecordError."""
        lines = _Lines(path)
        header = next(iter(lines), None)
        if not isinstance(header, dict) or header.get("everystop_record") != RECORD_VERSION:
            raise RecordError(f"{path} is not a record of version {RECORD_VERSION}; write one with --record")
        record = cls(
            header["policy"],
            PolicySettings.from_data(header),
            Limits(**{"admission": "greedy"} | header["limits"]),
            header["kv"],
            _step_times(header.get("step_times", {})),
            [],
            {},
            is_truncated=False,
        )
        for call in lines:
            if call[0] == "keys":
                record.keys[call[1]] = [bytes.fromhex(key) for key in call[2]]
            else:
                record.calls.append(call)
        record.is_truncated = lines.is_truncated
        return record

    def make_scheduler(self, policy: Policy | None = None, step_times: StepTimeModel | None = None) -> Scheduler:
        """A scheduler as the recorded one was at its start, by default with its own policy and step times."""
        policy = policy or make_policy(self.policy, self.policy_settings)
        return Scheduler(self.limits, KVCache(**self.kv), policy, step_times or self.step_times)

    def make_request(self, call: list[Any], max_tokens: int | None) -> Request:
        """The request of an `add`, with filler for a prompt and the recorded keys."""
        _, now_ns, request_id, group_id, choice_index, num_prompt, _, min_tokens, n, num_stop_ids, *rest = call
        tenant, priority, ttft_target_ns, itl_target_ns = (*rest, None, None)[:4]
        stop_ids = (STOP_TOKEN,) if num_stop_ids else ()
        return Request(
            request_id,
            [FILLER_TOKEN] * num_prompt,
            SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, n=n, stop_token_ids=stop_ids),
            arrival_ns=now_ns,
            group_id=group_id,
            choice_index=choice_index,
            tenant=str(tenant),
            priority=priority,
            ttft_target_ns=ttft_target_ns,
            itl_target_ns=itl_target_ns,
            block_keys=list(self.keys.get(request_id, ())),
        )


def _step_times(data: dict[str, float]) -> StepTimeModel:
    """Older records also hold times that a model of steps does not have any more."""
    known = {field.name for field in fields(StepTimeModel)}
    return StepTimeModel(**{name: value for name, value in data.items() if name in known})


class _Lines:
    """The JSON lines of a file, up to the first that is damaged or cut off; raises RecordError if none can be read."""

    def __init__(self, path: Path) -> None:
        self.is_truncated = False
        self._iterator = self._read(path)

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def _read(self, path: Path) -> Iterator[Any]:
        try:
            with gzip.open(path, "rt", encoding="ascii") as file:
                for line in file:
                    yield json.loads(line)
        except (EOFError, gzip.BadGzipFile, zlib.error, ValueError):
            self.is_truncated = True
        except OSError as error:
            raise RecordError(f"the record {path} cannot be read: {error.strerror}; name another file") from None
