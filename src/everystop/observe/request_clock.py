"""Reads the times of one request off the history while it runs and when it is over; no clock of its own."""

from __future__ import annotations

from dataclasses import dataclass

from everystop.observe.history import Client, History


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One sequence's moments on the engine's clock, None where they have not come or are not known any more.

    `received_ns` is when the last byte of its body had been read, `submitted_ns` when the engine was told, `boarded_ns`
    when it first got a place; `last_token_ns` belongs to the last of `num_output_tokens`.
    """

    received_ns: int
    submitted_ns: int
    boarded_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


class RequestClock:
    """Follows a request of one sequence; to be made once the history knows of it, and read as often as wanted.

    Reading takes time for the steps since the last reading, of a request that is over only for those up to its first
    token. The trail is held, so a history that forgets what is over does no harm.
    """

    def __init__(self, history: History, client: Client) -> None:
        assert client.num == 1
        self._history = history
        self._client = client
        self._trail = history.trails.get(client.first_request_id)
        self._position = -1  # in the log of steps, of the first that has not been looked at
        self._is_torn = False  # steps are forgotten that have not been looked at, so no first token can be told
        self._first_ns: int | None = None
        self._last_ns: int | None = None
        self._num_output_tokens = 0

    def read(self) -> RequestTimes | None:
        """What is known now; None of a request that the history was never told of."""
        self._history.catch_up()
        trail, client = self._trail, self._client
        if trail is None:
            return None
        if not trail.admits or trail.arrival is None:
            return RequestTimes(client.received_ns, client.submitted_ns)
        self._follow(until_first=trail.finish is not None)
        first_ns = self._first_ns
        last_ns, num_output_tokens = self._last_ns, self._num_output_tokens
        num_cached_tokens = trail.admits[0].num_cached_tokens
        if trail.finish is not None:
            num_output_tokens = trail.finish.num_output_tokens
            num_cached_tokens = trail.finish.num_cached_tokens  # with what others computed after it had boarded
            last_ns = trail.finish.now_ns if num_output_tokens else None
        return RequestTimes(
            client.received_ns,
            client.submitted_ns,
            trail.admits[0].now_ns,
            first_ns,
            last_ns,
            trail.arrival.num_prompt_tokens,
            num_cached_tokens,
            num_output_tokens,
        )

    def _follow(self, *, until_first: bool) -> None:
        """Look at the steps that have come since the last time, or at no more than it takes to find the first token."""
        assert self._trail is not None
        steps, request_id = self._history.steps, self._client.first_request_id
        boarded_in = self._trail.admits[0].step_id
        if self._position < 0:
            self._position = self._history.step_position(boarded_in)
            self._is_torn = self._position == steps.start and len(steps) > 0 and steps[steps.start].step_id > boarded_in
        if self._position < steps.start:
            self._position, self._is_torn = steps.start, True
        while self._position < steps.end and not (until_first and self._first_ns is not None):
            record = steps[self._position]
            self._position += 1
            row = record.row_of(request_id)
            if row >= 0 and record.num_outputs[row]:
                self._num_output_tokens += record.num_outputs[row]
                if self._first_ns is None and not self._is_torn:
                    self._first_ns = record.now_ns
                self._last_ns = record.now_ns
