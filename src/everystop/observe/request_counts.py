"""What is counted of each request as a whole: its latencies, its phases and its sizes; fed by `observe.metrics`."""

from __future__ import annotations

from everystop.core.durations import NS_PER_S
from everystop.core.events import ArrivalEvent, FinishEvent
from everystop.core.request import FinishReason
from everystop.observe.buckets import FEW, ITL_S, LATENCY_S, TTFT_S
from everystop.observe.histogram import Histogram, one_two_five
from everystop.observe.history import Client

COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class OpenRequest:
    """What is known of a request that has arrived and not ended.

    It begins at `origin_ns`, when the last byte of its body had been read, and waits from `submitted_ns` on, when the
    engine was told; both are its arrival in the engine where nobody said more. 0 stands for a time that has not come.
    """

    __slots__ = (
        "admitted_ns",
        "first_token_ns",
        "group_id",
        "is_first_choice",
        "is_running",
        "last_token_ns",
        "max_tokens",
        "num_cached",
        "num_prompt",
        "origin_ns",
        "submitted_ns",
        "tenant",
    )

    def __init__(self, event: ArrivalEvent, tenant: str, client: Client | None = None) -> None:
        self.origin_ns = event.now_ns if client is None else client.received_ns
        self.submitted_ns = event.now_ns if client is None else client.submitted_ns
        self.group_id = event.group_id
        self.is_first_choice = event.choice_index == 0
        self.num_prompt = event.num_prompt_tokens
        self.max_tokens = event.max_tokens
        self.tenant = tenant
        self.is_running = False
        self.admitted_ns = self.first_token_ns = self.last_token_ns = 0
        self.num_cached = -1  # not admitted yet


class _Group:
    """The choices of one prompt: how many there are and are left, and the longest output so far."""

    __slots__ = ("num", "num_longest", "num_open")

    def __init__(self) -> None:
        self.num = self.num_open = self.num_longest = 0


class RequestCounts:
    """Histograms over requests; `max_model_len` bounds their sizes.

    Phases are those of the first admission and the first token: what a preemption cost lies in the phase in which it
    came. Only requests that came to their end (stop, length) count in latencies of a whole request; sizes and
    preemptions are counted of all that have ended, whatever ended them. Sizes of the prompt and of what was asked for
    count once a prompt, the rest once a choice.
    """

    def __init__(self, max_model_len: int) -> None:
        sizes = one_two_five(max_model_len)
        self.ttft = Histogram(TTFT_S, NS_PER_S)
        self.itl = Histogram(ITL_S, NS_PER_S)
        self.time_per_output_token = Histogram(ITL_S, NS_PER_S)
        self.e2e = Histogram(LATENCY_S, NS_PER_S)
        self.queue_time = Histogram(LATENCY_S, NS_PER_S)
        self.prefill_time = Histogram(LATENCY_S, NS_PER_S)
        self.decode_time = Histogram(LATENCY_S, NS_PER_S)
        self.inference_time = Histogram(LATENCY_S, NS_PER_S)
        self.prompt_tokens = Histogram(sizes)
        self.computed_prompt_tokens = Histogram(sizes)
        self.generation_tokens = Histogram(sizes)
        self.longest_generation_tokens = Histogram(sizes)
        self.max_tokens = Histogram(sizes)
        self.num_choices = Histogram(FEW)
        self.num_preemptions = Histogram(FEW)
        self._groups: dict[int, _Group] = {}

    def note_arrival(self, request: OpenRequest) -> None:
        """A request has been taken."""
        group = self._groups.setdefault(request.group_id, _Group())
        group.num += 1
        group.num_open += 1

    def note_admission(self, request: OpenRequest, now_ns: int) -> None:
        """It boards for the first time."""
        request.admitted_ns = now_ns
        self.queue_time.add(now_ns - request.submitted_ns)

    def note_first_token(self, request: OpenRequest, now_ns: int) -> None:
        """Its first token is there."""
        request.first_token_ns = now_ns
        self.ttft.add(now_ns - request.origin_ns)

    def note_end(self, request: OpenRequest, event: FinishEvent) -> None:
        """It has ended, and all its tokens have been noted."""
        self.generation_tokens.add(event.num_output_tokens)
        self.num_preemptions.add(event.num_preemptions)
        if event.reason in COMPLETE:
            self._count_phases(request, event)
        group = self._groups.get(request.group_id)
        if group is not None:
            group.num_longest = max(group.num_longest, event.num_output_tokens)
            group.num_open -= 1
            if not group.num_open:
                self._count_group(self._groups.pop(request.group_id), request)

    def forget_open(self) -> None:
        """Nobody who is open will end any more."""
        self._groups.clear()

    def _count_phases(self, request: OpenRequest, event: FinishEvent) -> None:
        self.e2e.add(event.now_ns - request.origin_ns)
        self.computed_prompt_tokens.add(event.num_prompt_tokens - event.num_cached_tokens)
        if not request.first_token_ns:
            return  # it was asked for none
        decode_ns = request.last_token_ns - request.first_token_ns
        self.prefill_time.add(request.first_token_ns - request.admitted_ns)
        self.decode_time.add(decode_ns)
        self.inference_time.add(request.last_token_ns - request.admitted_ns)
        if event.num_output_tokens > 1:
            self.time_per_output_token.add(decode_ns // (event.num_output_tokens - 1))

    def _count_group(self, group: _Group, request: OpenRequest) -> None:
        self.prompt_tokens.add(request.num_prompt)
        self.max_tokens.add(request.max_tokens)
        self.num_choices.add(group.num)
        self.longest_generation_tokens.add(group.num_longest)
