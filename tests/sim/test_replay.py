"""A recorded run replays with identical plans, from counts and block keys alone."""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.core.fuzz import ABORT_RATES, STEPS_PER_EPISODE, Episode
from tests.core.harness import Harness, make_request
from tests.core.hash_model import EOS, HashModelRunner

import everystop.observe.recorder as recorder_module
from everystop import cli
from everystop.core.errors import RecordError, TenantQueueFull
from everystop.core.events import ArrivalEvent, FinishEvent, StepEvent
from everystop.core.kv_cache import KVCache
from everystop.core.limits import Limits
from everystop.core.policy import POLICIES, Policy, PolicySettings, Share, Targets, make_policy
from everystop.core.recording import RecordingScheduler
from everystop.core.request import SamplingParams
from everystop.core.scheduler import Scheduler
from everystop.core.step_time import UNKNOWN_STEP_TIMES, StepFeatures, StepTimeModel
from everystop.engine.engine import Engine
from everystop.engine.messages import Abort, StepOutput, Submit
from everystop.observe.recorder import CALLS_PER_BATCH, Recorder
from everystop.sim.record import Record
from everystop.sim.replay import recorded_events, replay

SHARES = {
    "key-of-ann": Share(0.5, token_rate=3_000.0, kv_share=0.6),
    "b": Share(2.0, 2, max_queued=3, ttft_ns=20_000_000),
    "c": Share(token_rate=400.0, kv_share=0.3),
}
SETTINGS = PolicySettings(
    batch_wait_ns=2_000_000, ageing_ns=3_000_000, shares=SHARES, quantum=70, targets=Targets(9_000_000, 2_000_000)
)
TTFT_NS = (None, 3_000_000, 50_000_000)
SENTINEL = 1_734_261_985


def record_workload(path: Path, *, policy: str = "continuous", depth: int = 0, num_requests: int = 40) -> Harness:
    """A small run with every kind of call, recorded; the prompts hold a sentinel token."""
    recorder = Recorder(path, policy, SETTINGS)
    kv = KVCache(num_blocks=24, block_size=4, enable_prefix_caching=True)
    limits = Limits(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=80)
    scheduler = RecordingScheduler(limits, kv, make_policy(policy, SETTINGS), recorder)
    harness = Harness(scheduler, depth=depth)
    for i in range(0, num_requests, 4):
        prompt = [SENTINEL] * 9 + [i % 8]
        harness.add_group(i, prompt, 3, max_tokens=20, temperature=1.0, seed=i, stop=("secret",), tenant="key-of-ann")
        harness.add(
            make_request(i + 3, 30, max_tokens=8, priority=i % 3, tenant="abc"[i % 3], ttft_target_ns=TTFT_NS[i % 3])
        )
        for _ in range(i % 7):
            harness.turn()
        harness.abort(i + 1)
    harness.run()
    recorder.close()
    return harness


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_record_replays_with_identical_plans(policy: str, depth: int, tmp_path: Path) -> None:
    harness = record_workload(tmp_path / "run.gz", policy=policy, depth=depth)
    report = replay(tmp_path / "run.gz")
    assert report.first_difference is None
    assert not report.is_truncated
    assert report.num_requests == len(harness.requests)
    assert report.recorded.num_tokens.total() == sum(map(len, harness.received.values()))
    assert report.recorded.finish_ns == {i: event.now_ns for i, event in harness.finished.items()}


def test_events_can_be_made_again_from_a_record(tmp_path: Path) -> None:
    harness = record_workload(tmp_path / "run.gz", policy="fair")
    events = recorded_events(tmp_path / "run.gz")
    finished = {event.request_id: event.now_ns for event in events if isinstance(event, FinishEvent)}
    assert finished == {i: event.now_ns for i, event in harness.finished.items()}
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert sum(len(row) for step in steps for row in step.tokens) == sum(map(len, harness.received.values()))
    tenants = {event.request_id: event.tenant for event in events if isinstance(event, ArrivalEvent)}
    numbers = {name: str(number) for number, name in enumerate(SHARES)}
    assert {i: tenants[i] for i, request in harness.requests.items() if request.tenant in numbers} == {
        i: numbers[request.tenant] for i, request in harness.requests.items() if request.tenant in numbers
    }
    assert len(tenants) == len(harness.requests)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_fuzzed_traffic_replays_with_identical_plans(policy: str, depth: int, tmp_path: Path) -> None:
    """Over all parameters more than 10,000 steps, with everything that the fuzz does."""
    coverage: Counter[str] = Counter()
    for number in range(8):
        path = tmp_path / f"{number}.gz"
        rate = ABORT_RATES[number % len(ABORT_RATES)]
        episode = RecordedEpisode(f"replay:{number}:{policy}:{depth}", policy, depth, rate, path)
        episode.run(STEPS_PER_EPISODE)
        episode.recorder.close()
        assert replay(path).first_difference is None, f"episode {number}"
        coverage += episode.harness.counts
    assert coverage["steps"] > 10_000 / 12
    assert min(coverage[name] for name in ("prefix hits", "finished by abort")) >= 10
    assert min(coverage["preemptions"], coverage["forks"], coverage["prompts scored in pieces"]) >= 1


class RecordedEpisode(Episode):
    """An episode of the fuzz on a recording scheduler."""

    def __init__(self, seed: str, policy: str, depth: int, abort_rate: float, path: Path) -> None:
        super().__init__(seed, policy, depth, abort_rate)
        plain = self.harness.scheduler
        wait_ns = getattr(plain.policy, "batch_wait_ns", 0)
        settings = replace(SETTINGS, batch_wait_ns=wait_ns)
        self.recorder = Recorder(path, policy, settings)
        scheduler = RecordingScheduler(plain.limits, plain.kv, make_policy(policy, settings), self.recorder)
        self.harness = Harness(scheduler, depth=depth, is_checking=False)


@pytest.mark.parametrize("depth", [0, 1])
def test_run_of_the_engine_thread_replays_with_identical_plans(depth: int, tmp_path: Path) -> None:
    """Real clock, real arrival order: what other threads submit and abort while steps run."""
    recorder = Recorder(tmp_path / "run.gz", "continuous", PolicySettings())
    kv = KVCache(num_blocks=60, block_size=4, enable_prefix_caching=True)
    scheduler = RecordingScheduler(Limits(max_num_seqs=8, max_model_len=100), kv, make_policy("continuous"), recorder)
    engine = Engine(scheduler, HashModelRunner(num_blocks=60, block_size=4), eos_token_ids=(EOS,), depth=depth)
    outputs: list[StepOutput] = []
    engine.on_outputs = outputs.extend
    engine.start()
    for i in range(60):
        params = SamplingParams(max_tokens=5 + i % 30, n=1 + i % 2, seed=i)
        first = engine.allocate_ids(params.n)
        engine.submit(Submit(first, tuple(range(10 + i % 9)), params))
        if i % 8 == 7:
            engine.abort(Abort((first,)))
    deadline = time.monotonic() + 60
    while sum(output.finish_reason is not None for output in outputs) < 90 and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.stop()
    recorder.close()
    report = replay(tmp_path / "run.gz")
    assert engine.error is None
    assert report.first_difference is None
    assert len(report.recorded.finish_ns) == report.num_requests == 90
    assert report.recorded.num_tokens.total() == sum(len(output.token_ids) for output in outputs)


def test_replay_names_the_first_step_whose_plan_differs(tmp_path: Path) -> None:
    record_workload(tmp_path / "run.gz")
    lines = gzip.decompress((tmp_path / "run.gz").read_bytes()).decode().splitlines()
    schedules = [i for i, line in enumerate(lines) if line.startswith('["schedule"')]
    call = json.loads(lines[schedules[17]])
    call[-1] = "0" * 16
    lines[schedules[17]] = json.dumps(call)
    (tmp_path / "altered.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    report = replay(tmp_path / "altered.gz")
    assert report.first_difference == 17
    assert report.num_plans == 18


def test_record_holds_neither_token_ids_nor_text_nor_names(tmp_path: Path) -> None:
    harness = record_workload(tmp_path / "run.gz")
    text = gzip.decompress((tmp_path / "run.gz").read_bytes()).decode()
    assert str(SENTINEL) not in text
    assert "secret" not in text
    assert "ann" not in text
    keys = {key.hex() for request in harness.requests.values() for key in request.block_keys}
    assert keys
    assert not any(key[:16] in text for key in keys), "keys must be hashed again"


def test_two_records_of_one_run_share_no_key(tmp_path: Path) -> None:
    keys = []
    for name in ("a.gz", "b.gz"):
        record_workload(tmp_path / name)
        lines = gzip.decompress((tmp_path / name).read_bytes()).decode().splitlines()
        keys.append({key for line in lines if line.startswith('["keys"') for key in json.loads(line)[2]})
    assert keys[0]
    assert not keys[0] & keys[1]


def test_names_of_tenants_do_not_fill_the_memory_and_replay_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients who name themselves may come under a new name each time; those behind the first are told apart too."""
    monkeypatch.setattr(recorder_module, "MAX_NUMBERED_TENANTS", 5)
    recorder = Recorder(tmp_path / "run.gz", "fair", SETTINGS)
    kv = KVCache(num_blocks=24, block_size=4, enable_prefix_caching=True)
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=24, max_model_len=80)
    harness = Harness(RecordingScheduler(limits, kv, make_policy("fair", SETTINGS), recorder))
    for i in range(30):
        harness.add(make_request(i, 5, max_tokens=6, tenant=f"visitor {i % 10}"))
    harness.run()
    recorder.close()
    assert len(recorder._formatter._tenants) == 5
    assert replay(tmp_path / "run.gz").first_difference is None
    events = recorded_events(tmp_path / "run.gz")
    numbers = [event.tenant for event in events if isinstance(event, ArrivalEvent)]
    assert numbers[:10] == numbers[10:20] == numbers[20:]
    assert len(set(numbers)) == 10
    assert numbers[:2] == ["3", "4"], "behind the three that have a share"


def test_record_that_was_cut_off_replays_up_to_there(tmp_path: Path) -> None:
    record_workload(tmp_path / "run.gz", num_requests=400)
    whole = (tmp_path / "run.gz").read_bytes()
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) * 2 // 3])
    report = replay(tmp_path / "cut.gz")
    assert report.is_truncated
    assert 0 < report.num_plans < replay(tmp_path / "run.gz").num_plans


def test_record_that_was_altered_replays_up_to_there(tmp_path: Path) -> None:
    record_workload(tmp_path / "run.gz", num_requests=400)
    data = bytearray((tmp_path / "run.gz").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = b"\xff" * 64
    (tmp_path / "altered.gz").write_bytes(data)
    report = replay(tmp_path / "altered.gz")
    assert report.is_truncated
    assert 0 < report.num_plans < replay(tmp_path / "run.gz").num_plans


def test_another_policy_serves_the_same_tokens_in_virtual_time(tmp_path: Path) -> None:
    record_workload(tmp_path / "run.gz")
    report = replay(tmp_path / "run.gz", policy="static")
    assert report.policy == "static"
    assert report.first_difference is None
    assert report.replayed.finish_ns.keys() == report.recorded.finish_ns.keys()
    whole = {i for i in report.recorded.num_tokens if i % 4 != 1}  # not aborted
    assert {i: report.replayed.num_tokens[i] for i in whole} == {i: report.recorded.num_tokens[i] for i in whole}
    assert report.replayed.num_steps > report.recorded.num_steps
    assert sum(report.replayed.e2e_ns()) > sum(report.recorded.e2e_ns())


def test_refusals_of_a_full_queue_replay_and_stay_away_under_other_policies(tmp_path: Path) -> None:
    settings = PolicySettings(shares={"b": Share(max_running=1, max_queued=2)})
    recorder = Recorder(tmp_path / "run.gz", "fair", settings)
    kv = KVCache(num_blocks=24, block_size=4, enable_prefix_caching=True)
    scheduler = RecordingScheduler(Limits(max_num_seqs=4), kv, make_policy("fair", settings), recorder)
    harness = Harness(scheduler)
    for i in range(40):
        with suppress(TenantQueueFull):
            harness.add(make_request(i, 5, max_tokens=6, tenant="ab"[i % 2]))
        harness.turn()
    harness.run()
    recorder.close()
    report = replay(tmp_path / "run.gz")
    assert report.first_difference is None
    assert report.num_requests == 40 - len(harness.refused)
    assert len(harness.refused) >= 5
    lines = gzip.decompress((tmp_path / "run.gz").read_bytes()).decode().splitlines()
    assert sum(line.startswith('["refuse"') for line in lines) == len(harness.refused)
    other = replay(tmp_path / "run.gz", policy="continuous").replayed
    assert other.finish_ns.keys() == harness.finished.keys()


def test_what_another_policy_refuses_does_not_end_its_replay(tmp_path: Path) -> None:
    """The limits are in the record whatever its policy, but only `fair` holds to them."""
    settings = PolicySettings(shares={"": Share(max_running=1, max_queued=0)})
    recorder = Recorder(tmp_path / "run.gz", "continuous", settings)
    kv = KVCache(num_blocks=24, block_size=4, enable_prefix_caching=True)
    harness = Harness(RecordingScheduler(Limits(), kv, make_policy("continuous"), recorder))
    for i in range(6):
        harness.add(make_request(i, 5, max_tokens=6))
    harness.run()
    recorder.close()
    report = replay(tmp_path / "run.gz", policy="fair")
    assert len(report.recorded.finish_ns) == 6
    assert list(report.replayed.finish_ns) == [0]


def record_crowd(path: Path, shares: dict[str, Share]) -> None:
    """Twenty requests each of ann and then bob at once, under `continuous`, four at a time; a step takes 1 ms."""
    settings = PolicySettings(shares=shares)
    recorder = Recorder(path, "continuous", settings)
    kv = KVCache(num_blocks=200, block_size=4, enable_prefix_caching=True)
    policy = make_policy("continuous", settings)
    harness = Harness(RecordingScheduler(Limits(max_num_seqs=4), kv, policy, recorder))
    for i in range(40):
        harness.add(make_request(i, 5, max_tokens=6, tenant="ann" if i < 20 else "bob"))
    harness.run()
    recorder.close()


def mean_ttft_ms(figures: dict[str, Any], tenant: str) -> float:
    return float(figures["tenant_ttft_ms"][tenant]["mean"])


def test_tenants_of_a_record_get_the_weights_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_crowd(tmp_path / "run.gz", {"ann": Share(), "bob": Share()})
    path = tmp_path / "tenants.toml"
    path.write_text("[tenant.ann]\n[tenant.bob]\nweight = 9", encoding="utf-8")
    results = []
    for words in ([], ["--tenants", str(path)]):
        words = ["replay", str(tmp_path / "run.gz"), "--policy", "fair", "--json", *words]
        assert cli.main(words) == 0
        results.append(json.loads(capsys.readouterr().out))
    equal, weighted = (results[i]["replayed"] for i in range(2))
    assert mean_ttft_ms(equal, "1") < 0.8 * mean_ttft_ms(results[0]["baseline"], "1"), "bob came last"
    assert mean_ttft_ms(weighted, "1") < 0.8 * mean_ttft_ms(equal, "1")
    assert mean_ttft_ms(weighted, "0") > 1.1 * mean_ttft_ms(equal, "0")


def test_settings_of_the_recorded_policy_can_be_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_workload(tmp_path / "run.gz", policy="static")
    assert cli.main(["replay", str(tmp_path / "run.gz"), "--batch-wait-ms", "900"]) == 0
    assert "changed*" in capsys.readouterr().out
    report = replay(tmp_path / "run.gz", change=lambda policy, settings: replace(settings, batch_wait_ns=9 * 10**8))
    assert report.baseline is not None
    assert report.policy == report.recorded_policy == "static"
    assert max(report.replayed.ttft_ns()) > 800_000_000 > max(report.baseline.ttft_ns())


def test_option_without_effect_on_what_is_replayed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_workload(tmp_path / "run.gz", policy="fair")
    for words in (["--ageing", "3"], ["--policy", "deadline", "--fair-quantum", "9"]):
        assert cli.main(["replay", str(tmp_path / "run.gz"), *words]) != 0
        assert (
            f"it has no effect under the policy {'deadline' if len(words) > 2 else 'fair'}" in capsys.readouterr().err
        )


def test_deadline_knows_step_times_in_a_replay_of_a_record_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_workload(tmp_path / "run.gz")
    seen: list[StepTimeModel] = []
    make = Record.make_scheduler

    def note(record: Record, policy: Policy | None = None, step_times: StepTimeModel | None = None) -> Scheduler:
        scheduler = make(record, policy, step_times)
        seen.append(scheduler.roster.view.step_times)
        return scheduler

    monkeypatch.setattr(Record, "make_scheduler", note)
    replay(tmp_path / "run.gz", policy="deadline")
    replay(tmp_path / "run.gz", policy="fair")
    known = [model != UNKNOWN_STEP_TIMES for model in seen]
    assert known == [False, True, False, False, False, False]  # the repetition, the other policy, the recorded one
    assert seen[1].execute_ns(StepFeatures(1, 9, 0, 1)) > 0


def test_older_record_with_a_time_that_no_model_has_is_read(tmp_path: Path) -> None:
    record_workload(tmp_path / "run.gz", policy="fair")
    lines = gzip.decompress((tmp_path / "run.gz").read_bytes()).decode().splitlines()
    header = json.loads(lines[0])
    header["step_times"]["no_such_ns"] = 7.0
    header["shares"] = [list(share) for share in SHARES.values()]
    header["targets"] = list(SETTINGS.targets)
    (tmp_path / "old.gz").write_bytes(gzip.compress("\n".join([json.dumps(header), *lines[1:]]).encode()))
    assert replay(tmp_path / "old.gz").first_difference is None


def test_files_that_are_no_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_text("hello")
    (tmp_path / "other.gz").write_bytes(gzip.compress(b'{"everystop_record": 0}\n'))
    (tmp_path / "folder.gz").mkdir()
    for name in ("text.gz", "other.gz", "absent.gz", "folder.gz"):
        with pytest.raises(RecordError, match=name):
            replay(tmp_path / name)


def test_full_disk_ends_the_record_but_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(Path("/dev/full"), "continuous", PolicySettings())
    with caplog.at_level(logging.WARNING):
        for i in range(50 * CALLS_PER_BATCH):
            recorder.aborted(i, i)
        recorder.close()
    assert "ends here" in caplog.text


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_that_score_their_prompt_or_generate_nothing_replay(tmp_path: Path, depth: int) -> None:
    """They find less in the prefix cache, and end at once: a replay must know both."""
    recorder = Recorder(tmp_path / "run.gz", "continuous", SETTINGS)
    kv = KVCache(num_blocks=24, block_size=4, enable_prefix_caching=True)
    scheduler = RecordingScheduler(
        Limits(max_num_seqs=4, max_num_batched_tokens=12), kv, make_policy("continuous", SETTINGS), recorder
    )
    harness = Harness(scheduler, depth=depth)
    prompt = list(range(21))
    for i, (max_tokens, wish) in enumerate(((3, None), (3, 1), (0, None), (0, 0), (30, 2), (25, None), (20, 0))):
        harness.add(make_request(i, prompt, max_tokens=max_tokens, prompt_logprobs=wish))
        harness.turn()
    harness.add_group(7, 18, 3, max_tokens=4, prompt_logprobs=0)
    harness.run()
    recorder.close()
    assert harness.counts["preemptions"]
    assert harness.counts["prefix hits"]
    assert harness.counts["scored tokens"] == 4 * 20 + 17
    report = replay(tmp_path / "run.gz")
    assert report.first_difference is None
    made = {e.request_id: e for e in recorded_events(tmp_path / "run.gz") if isinstance(e, FinishEvent)}
    assert {i: (end.now_ns, end.num_output_tokens) for i, end in made.items()} == {
        i: (end.now_ns, end.num_output_tokens) for i, end in harness.finished.items()
    }
    other = replay(tmp_path / "run.gz", policy="static")
    assert set(other.replayed.finish_ns) == set(range(10))


def test_record_of_version_1_is_still_read(tmp_path: Path) -> None:
    record_workload(tmp_path / "run.gz")
    lines = gzip.decompress((tmp_path / "run.gz").read_bytes()).splitlines()
    header = json.loads(lines[0])
    assert header["everystop_record"] == 2
    lines[0] = json.dumps(header | {"everystop_record": 1}).encode()
    (tmp_path / "old.gz").write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    assert replay(tmp_path / "old.gz").first_difference is None
