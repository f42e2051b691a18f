"""A record brings back the history of its run: what a live server remembered, and what its clients saw."""

from __future__ import annotations

import gzip
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.core.fuzz import ABORT_RATES, STEPS_PER_EPISODE, Episode
from tests.core.harness import Harness, make_request

from everystop import cli
from everystop.config import Config
from everystop.core.errors import ConfigError, RecordError, RequestError
from everystop.core.events import AdmitEvent, Event, FinishEvent, PreemptEvent, RefuseEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.plan import StepPlan, StepResult
from everystop.core.policy import POLICIES, PolicySettings, Share, make_policy
from everystop.core.recording import RecordingScheduler
from everystop.core.request import FinishReason
from everystop.core.step_time import StepTimeModel
from everystop.observe.history import Client, History, StepRecord, Trail
from everystop.observe.recorder import CALLS_PER_BATCH, Recorder
from everystop.sim.record import Record
from everystop.sim.replay import history_of_record, replay
from everystop.sim.workloads import read_workload

SETTINGS = PolicySettings(
    ageing_ns=5_000_000, shares={"a": Share(0.5, token_rate=3_000.0), "b": Share(2.0, 2, max_queued=3)}, quantum=70
)
SENTINEL = 1_734_261_985


class RecordedEpisode(Episode):
    """An episode of the fuzz that is recorded, and remembered as a live server does."""

    def __init__(self, number: int, policy: str, depth: int, path: Path) -> None:
        super().__init__(f"past:{number}:{policy}:{depth}", policy, depth, ABORT_RATES[number % len(ABORT_RATES)])
        plain = self.harness.scheduler
        settings = replace(SETTINGS, batch_wait_ns=getattr(plain.policy, "batch_wait_ns", 0))
        self.recorder = Recorder(path, policy, settings)
        times = StepTimeModel(step_ns=300_000, token_ns=50_000)
        core = make_policy(policy, settings)
        self.harness = Harness(
            RecordingScheduler(plain.limits, plain.kv, core, self.recorder, times), depth=depth, is_checking=False
        )
        self.history = History(num_finished=1 << 30, step_times=times)
        self._execute, self.harness.runner.execute = self.harness.runner.execute, self._sample  # type: ignore[method-assign]

    def _sample(self, plan: StepPlan) -> StepResult:
        result = self._execute(plan)
        result.sample_ns = 1000 * (plan.step_id % 3)
        return result

    def run(self, num_steps: int) -> None:
        super().run(num_steps)
        self.history.receive(self.harness.events + self.harness.scheduler.take_events())
        self.history.catch_up()
        self.recorder.close()


def as_recorded(events: Iterable[Event], number_of: dict[str, str]) -> list[Event]:
    """Events as a record gives them back: tenants are numbered in order of appearance, ends say no token or string."""
    told = []
    for event in events:
        if hasattr(event, "tenant"):
            event = event._replace(tenant=number_of.setdefault(event.tenant, str(len(number_of))))
        if isinstance(event, FinishEvent) and event.reason is FinishReason.STOP:
            event = event._replace(detail="")
        told.append(event)
    return told


def events_of(trail: Trail) -> list[Event]:
    return [event for event in (trail.arrival, *trail.admits, *trail.preemptions, trail.finish, trail.refusal) if event]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_record_gives_the_history_of_the_live_run(policy: str, depth: int, tmp_path: Path) -> None:
    coverage: Counter[str] = Counter()
    for number in range(2):
        path = tmp_path / f"{number}.gz"
        episode = RecordedEpisode(number, policy, depth, path)
        episode.run(STEPS_PER_EPISODE)
        live, past = episode.history, history_of_record(path)
        assert past.steps.since(0) == live.steps.since(0)
        numbers = {name: str(i) for i, name in enumerate(SETTINGS.shares)}
        assert past.acts.since(0) == as_recorded(live.acts.since(0), numbers)
        assert list(past.trails) == list(live.trails)
        for request_id, trail in live.trails.items():
            assert events_of(past.trails[request_id]) == as_recorded(events_of(trail), numbers)
        assert past.step_times == live.step_times
        coverage += Counter(type(event).__name__ for event in live.acts.since(0))
        coverage["aborts"] += episode.harness.counts["finished by abort"]
    assert min(coverage[name] for name in ("aborts", "FinishEvent", "WaitEvent")) >= 5


def test_histories_of_records_cover_what_schedulers_do(tmp_path: Path) -> None:
    """What the test above compares has preemptions, forks and refusals in it."""
    episode = RecordedEpisode(1, "fair", 1, tmp_path / "run.gz")
    episode.run(6 * STEPS_PER_EPISODE)
    acts = history_of_record(tmp_path / "run.gz").acts.since(0)
    kinds = Counter(type(act) for act in acts)
    assert min(kinds[PreemptEvent], kinds[RefuseEvent]) >= 3
    assert sum(isinstance(act, AdmitEvent) and act.forked_from >= 0 for act in acts) >= 3


def record_small_run(path: Path, *, with_tokens: bool = False, num_requests: int = 6) -> tuple[Harness, Recorder]:
    """Requests of one and of two choices, the first of which is refused; the recorder is not closed."""
    recorder = Recorder(path, "continuous", PolicySettings(), with_tokens=with_tokens)
    kv = KVCache(num_blocks=24, block_size=4, enable_prefix_caching=True)
    scheduler = RecordingScheduler(Limits(max_num_seqs=4, max_model_len=90), kv, make_policy("continuous"), recorder)
    harness = Harness(scheduler)
    with pytest.raises(RequestError):
        harness.add(make_request(0, [SENTINEL] * 95))
    for i in range(1, num_requests):
        harness.add_group(2 * i, [SENTINEL, i, 3, 4], 2, max_tokens=5, temperature=0.5, seed=i, stop=("secret",))
        harness.turn()
    return harness, recorder


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def test_times_of_clients_come_back_with_their_requests(tmp_path: Path) -> None:
    harness, recorder = record_small_run(tmp_path / "run.gz")
    clients = [
        Client(f"cmpl-{i}", "key", 2 * i, 2, i * 100, i * 100 + 5, i * 100 + 9, i * 100 + 50) for i in range(1, 6)
    ]
    clients[2].first_sent_ns = clients[2].delivered_ns = None
    clients[3].given_name, clients[1].has_left = "job-7", True
    for client in reversed(clients):
        recorder.client(client)
    recorder.client(Client("cmpl-never", "key", 900, 1, 7, 8))
    harness.run()
    recorder.close()
    recorder.client(Client("cmpl-late", "key", 0, 1, 7, 8))
    history = history_of_record(tmp_path / "run.gz")
    told = [replace(client, owner="") for client in clients]
    assert history.clients == {client.name: client for client in told}
    for client in told:
        assert all(history.trails[i].client == client for i in client.request_ids)
    assert history.trails[0].client is None
    assert history.trails[0].refusal is not None
    assert replay(tmp_path / "run.gz").first_difference is None


def test_clients_may_be_told_by_another_thread(tmp_path: Path) -> None:
    """As a server does it: its event loop tells of answers while the engine's thread schedules."""
    recorder = Recorder(tmp_path / "run.gz", "continuous", PolicySettings())
    num = 4 * CALLS_PER_BATCH

    def tell() -> None:
        for i in range(num):
            recorder.client(Client(f"cmpl-{i}", "", i, 1, i, i + 1))

    thread = threading.Thread(target=tell)
    thread.start()
    recorder.started({})
    for i in range(num):
        recorder.aborted(i, i)
    thread.join()
    recorder.close()
    lines = lines_of(tmp_path / "run.gz")[1:]
    assert [line[3] for line in lines if line[0] == "client"] == [f"cmpl-{i}" for i in range(num)]
    assert [line[2] for line in lines if line[0] == "abort"] == list(range(num))


def test_clients_are_not_kept_once_the_disk_is_full(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(Path("/dev/full"), "continuous", PolicySettings())
    for i in range(50 * CALLS_PER_BATCH):
        recorder.aborted(i, i)
        recorder.client(Client(f"cmpl-{i}", "", i, 1, i, i + 1))
    recorder.close()
    assert "ends here" in caplog.text
    assert not recorder._clients


def test_what_is_refused_before_it_comes_to_the_scheduler_is_in_the_record(tmp_path: Path) -> None:
    harness, recorder = record_small_run(tmp_path / "run.gz")
    scheduler = harness.scheduler
    assert isinstance(scheduler, RecordingScheduler)
    request = harness.requests[900] = make_request(900, 5)
    scheduler.note_refusal(request, RequestError("no token may begin"), harness.now_ns)
    harness.run()
    recorder.close()
    refusal = RefuseEvent(harness.events[-1].now_ns, 900, "RequestError", "0")
    found = history_of_record(tmp_path / "run.gz").trails[900].refusal
    assert found == refusal._replace(now_ns=found.now_ns if found else 0)
    assert replay(tmp_path / "run.gz").first_difference is None


def test_only_who_asks_for_tokens_gets_them(tmp_path: Path) -> None:
    for name in ("plain.gz", "full.gz"):
        harness, recorder = record_small_run(tmp_path / name, with_tokens=name == "full.gz")
        harness.run()
        recorder.close()
        assert replay(tmp_path / name).first_difference is None
    assert not {"prompt", "output"} & {line[0] for line in lines_of(tmp_path / "plain.gz")[1:]}
    plain, full = Record.read(tmp_path / "plain.gz"), Record.read(tmp_path / "full.gz")
    assert not plain.prompts
    assert full.calls == plain.calls
    assert set(full.prompts) == {0, *range(2, 12, 2)}
    for group_id, prompt in full.prompts.items():
        request = harness.requests[group_id]
        assert list(prompt.token_ids) == list(request.token_ids[: request.num_prompt_tokens])
        params = {name: tuple(value) if isinstance(value, list) else value for name, value in prompt.params.items()}
        assert replace(type(request.params)(), **params) == request.params
    assert full.outputs == {i: tuple(tokens) for i, tokens in harness.received.items() if i}


def test_what_still_runs_when_the_record_ends_is_written_too(tmp_path: Path) -> None:
    harness, recorder = record_small_run(tmp_path / "run.gz", with_tokens=True)
    recorder.close()
    unfinished = set(harness.scheduler.requests)
    assert unfinished
    record = Record.read(tmp_path / "run.gz")
    assert {i: record.outputs[i] for i in unfinished} == {i: tuple(harness.received[i]) for i in unfinished}
    trails = history_of_record(tmp_path / "run.gz").trails
    assert {i for i, trail in trails.items() if not trail.is_over} == unfinished


def test_requests_of_a_record_can_be_sent_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness, recorder = record_small_run(tmp_path / "run.gz", with_tokens=True)
    harness.run()
    recorder.close()
    assert cli.main(["replay", str(tmp_path / "run.gz"), "--write-workload", str(tmp_path / "again.jsonl")]) == 0
    assert "10 requests" in capsys.readouterr().err
    workload = read_workload((tmp_path / "again.jsonl").read_text().splitlines())
    assert [job.prompt for job in workload.jobs] == [(SENTINEL, i // 2, 3, 4) for i in range(2, 12)]
    assert [job.max_tokens for job in workload.jobs] == [len(harness.received[i]) for i in range(2, 12)]
    assert [round(job.at_s * 1e9) for job in workload.jobs] == [harness.requests[i].arrival_ns for i in range(2, 12)]


def test_requests_of_a_record_without_prompts_cannot_be_sent_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness, recorder = record_small_run(tmp_path / "run.gz")
    harness.run()
    recorder.close()
    words = ["replay", str(tmp_path / "run.gz"), "--write-workload", str(tmp_path / "again.jsonl")]
    assert cli.main(words) == 1
    assert "record them with --record-prompts" in capsys.readouterr().err
    assert cli.main([*words, "--policy", "static"]) == 2
    assert not (tmp_path / "again.jsonl").exists()


def test_record_of_prompts_needs_a_record() -> None:
    with pytest.raises(ConfigError, match="--record-prompts needs --record"):
        Config(record_prompts=True)
    assert Config(record_prompts=True, record="run.gz").record_prompts


def test_history_of_a_record_that_was_cut_is_what_came_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    harness, recorder = record_small_run(tmp_path / "run.gz", num_requests=80)
    harness.run()
    recorder.close()
    whole = (tmp_path / "run.gz").read_bytes()
    steps = without_cached_blocks(tmp_path / "run.gz")
    for percents in range(30, 100, 10):
        (tmp_path / "cut.gz").write_bytes(whole[: len(whole) * percents // 100])
        with caplog.at_level(logging.WARNING):
            cut = without_cached_blocks(tmp_path / "cut.gz")
        assert "cut.gz is cut off or damaged" in caplog.text
        assert 0 < len(cut) < len(steps)
        assert cut == steps[: len(cut)]


def test_record_that_is_being_written_is_not_called_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    harness, recorder = record_small_run(tmp_path / "run.gz", num_requests=20)
    try:
        harness.run()
        assert recorder.flush(30)
        for command in (["explain", "3", "--record"], ["trace"], ["replay"]):
            caplog.clear()
            assert cli.main([*command, str(tmp_path / "run.gz")]) == 0
            told = caplog.text + capsys.readouterr().out
            assert "has no end: it may still be being written, or was cut off" in told
            assert "damaged" not in told
        (tmp_path / "cut.gz").write_bytes((tmp_path / "run.gz").read_bytes()[:-9])
        assert Record.read(tmp_path / "cut.gz").is_truncated
        assert not Record.read(tmp_path / "cut.gz").may_go_on
    finally:
        recorder.close()
    assert not Record.read(tmp_path / "run.gz").is_truncated


@pytest.mark.parametrize("num_blocks", [10**17, 10**40])
@pytest.mark.parametrize("command", [["explain", "3", "--record"], ["trace"], ["replay"]])
def test_record_of_more_blocks_than_fit_names_no_option_of_others(
    tmp_path: Path, command: list[str], num_blocks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    harness, recorder = record_small_run(tmp_path / "run.gz")
    harness.run()
    recorder.close()
    header, *lines = lines_of(tmp_path / "run.gz")
    header["kv"]["num_blocks"] = num_blocks
    with gzip.open(tmp_path / "run.gz", "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in [header, *lines])
    assert cli.main([*command, str(tmp_path / "run.gz")]) == 1
    said = capsys.readouterr().err
    assert f"{num_blocks:,} KV blocks, which is more than the memory here" in said
    assert "--" not in said


def without_cached_blocks(path: Path) -> list[StepRecord]:
    """The steps of a record, without what the lost keys of requests at work would have added to the cache."""
    return [step._replace(num_cached_blocks=0) for step in history_of_record(path).steps.since(0)]


def altered(path: Path, change: Callable[[list[Any]], None]) -> Path:
    """The record with its lines changed."""
    lines = lines_of(path)
    change(lines)
    other = path.with_name("altered.gz")
    other.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return other


def test_records_that_cannot_be_read_are_refused_with_the_reason(tmp_path: Path) -> None:
    harness, recorder = record_small_run(tmp_path / "run.gz")
    harness.run()
    recorder.close()
    kinds = [line[0] for line in lines_of(tmp_path / "run.gz")[1:]]
    index = 1 + kinds.index("update")

    def lose_a_row(lines: list[Any]) -> None:
        lines[index][3].pop()

    changes: dict[str, Callable[[list[Any]], None]] = {
        "of version 9, and this version of everystop reads only versions 1, 2": lambda lines: lines[0].update(
            everystop_record=9
        ),
        "is not a record of a run": lambda lines: lines[0].pop("everystop_record"),
        "has a header that this version cannot read": lambda lines: lines[0].pop("kv"),
        r"has a line that means nothing: \['dream', 3\]": lambda lines: lines.insert(5, ["dream", 3]),
        "has a line that means nothing: 7": lambda lines: lines.append(7),
        "cannot be repeated": lose_a_row,
        "the plan of step . in .* is not what this version plans": lambda lines: lines[3].__setitem__(5, 40),
    }
    for message, change in changes.items():
        with pytest.raises(RecordError, match=message):
            history_of_record(altered(tmp_path / "run.gz", change))
