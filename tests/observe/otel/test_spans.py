"""The spans of a request as plain data; without OpenTelemetry."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.observe.runs import MS, Run

from everystop.observe.history import Client
from everystop.observe.life import Life, life_of
from everystop.observe.otel import names
from everystop.observe.otel.spans import Span, phases_of, whole_of


def client_of(run: Run, request_id: int, num: int = 1, **fields: object) -> Client:
    """A client whose request is submitted now, a millisecond after it was read."""
    name = f"cmpl-{request_id}"
    client = Client(name, "", request_id, num, run.now_ns - MS, run.now_ns, **fields)  # type: ignore[arg-type]
    run.history.add_client(client)
    return client


def life(run: Run, client: Client, request_id: int) -> Life:
    """The life after an answer that was delivered 2 ms after the last token."""
    client.delivered_ns = run.now_ns + 2 * MS
    return life_of(run.history, run.history.trails[request_id], client.delivered_ns)


def test_phases_follow_each_other_from_the_hand_over_to_the_last_token() -> None:
    run = Run(host_ns=MS, max_num_seqs=1)
    run.now_ns = 10 * MS
    first, second = client_of(run, 1), client_of(run, 2)
    run.add(1, prompt=8, max_tokens=4)
    run.add(2, prompt=8, max_tokens=3)
    run.finish()
    one, two = phases_of(life(run, first, 1)), phases_of(life(run, second, 2))
    assert [span.name for span in one] == ["prefill", "decode"]
    assert [span.name for span in two] == ["queue", "prefill", "decode"]
    for spans, client in ((one, first), (two, second)):
        assert spans[0].start_ns == client.submitted_ns
        assert all(a.end_ns == b.start_ns for a, b in pairwise(spans))
    finish = run.history.trails[2].finish
    assert finish is not None
    assert two[-1].end_ns == finish.now_ns
    assert two[1].attributes == {names.STEPS: 1, names.COMPUTED_TOKENS: 8}
    assert two[2].attributes == {names.STEPS: 2, names.COMPUTED_TOKENS: 2}


def test_a_preemption_is_a_phase_of_its_own_until_it_has_caught_up() -> None:
    run = Run(num_blocks=5, block_size=4, max_num_seqs=2, prefix_caching=False)
    run.now_ns = 10 * MS
    clients = {i: client_of(run, i) for i in (1, 2)}
    run.add(1, prompt=7, max_tokens=8)
    run.add(2, prompt=7, max_tokens=8)
    run.finish()
    lost = next(i for i, trail in run.history.trails.items() if trail.preemptions)
    spans = phases_of(life(run, clients[lost], lost))
    phases = [span.name for span in spans]
    assert "preempted" in phases
    assert phases[0] in ("queue", "prefill")
    whole = whole_of(run.history, clients[lost], life(run, clients[lost], lost), "m")
    assert whole.attributes[names.PREEMPTIONS] == 1
    assert sum(span.end_ns - span.start_ns for span in spans) <= whole.end_ns - whole.start_ns


def test_the_whole_says_old_and_new_names_and_where_the_time_went() -> None:
    run = Run(host_ns=MS)
    run.now_ns = 10 * MS
    client = client_of(run, 1, given_name="mine")
    run.add(1, prompt=8, max_tokens=5)
    run.finish()
    whole = whole_of(run.history, client, life(run, client, 1), "smol")
    said = whole.attributes
    assert whole.name == "llm_request"
    assert (whole.start_ns, whole.end_ns) == (client.received_ns, client.delivered_ns)
    assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("text_completion", "smol")
    assert said["gen_ai.usage.input_tokens"] == said["gen_ai.usage.prompt_tokens"] == 8
    assert said["gen_ai.usage.output_tokens"] == said["gen_ai.usage.completion_tokens"] == 5
    assert said["gen_ai.response.id"] == said["gen_ai.request.id"] == "cmpl-1"
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert said["everystop.request.given_id"] == "mine"
    assert said["everystop.main_cause"] == "decode"
    assert names.ERROR not in said
    e2e = said["gen_ai.latency.e2e"]
    assert isinstance(e2e, float)
    causes = [value for name, value in said.items() if name.startswith(names.SECONDS_OF)]
    assert sum(value for value in causes if isinstance(value, float)) == pytest.approx(e2e)
    prefill, decode = said[names.IN_PREFILL_VLLM], said[names.IN_DECODE_VLLM]
    assert isinstance(prefill, float)
    assert isinstance(decode, float)
    assert said[names.IN_INFERENCE_VLLM] == pytest.approx(prefill + decode)


def test_a_chat_is_one() -> None:
    client = Client("chatcmpl-1", "", 1, 1, 0, 0, delivered_ns=5)
    whole = whole_of(Run().history, client, None, "m")
    assert whole.attributes[names.OPERATION] == "chat"


def test_without_a_life_the_ends_of_the_sequences_still_say_how_it_went() -> None:
    run = Run()
    run.now_ns = 10 * MS
    client = client_of(run, 1, num=2)
    run.add(1, prompt=8, max_tokens=5, n=2)
    run.finish()
    said = whole_of(run.history, client, None, "m").attributes
    assert (said[names.INPUT_TOKENS], said[names.OUTPUT_TOKENS], said[names.CHOICES]) == (8, 10, 2)
    assert names.E2E_VLLM not in said


def test_of_several_choices_the_cached_tokens_count_once_as_the_prompt_does() -> None:
    run = Run(block_size=4)
    run.now_ns = 10 * MS
    run.add(1, prompt=9, max_tokens=2, topic=1)
    run.finish()
    client = client_of(run, 2, num=4)
    run.add(2, prompt=9, max_tokens=2, n=4, topic=1)
    run.finish()
    said = whole_of(run.history, client, None, "m").attributes
    assert (said[names.INPUT_TOKENS], said[names.CACHED_TOKENS]) == (9, 8)


def test_who_left_or_was_refused_is_an_error() -> None:
    run = Run()
    run.now_ns = 10 * MS
    left = client_of(run, 1)
    run.add(1)
    run.turn(2)
    run.scheduler.abort(1, run.now_ns)
    left.has_left, left.delivered_ns = True, run.now_ns
    run.turn()
    assert whole_of(run.history, left, None, "m").attributes[names.ERROR] == "aborted"


def test_a_span_knows_its_seconds() -> None:
    assert Span("x", MS, 3 * MS).seconds == 0.002
