"""The lab of the real server: what it takes for a run, what it makes of a server that fails, and that none is left."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.claims.hash_server import NUM_IDS, text_of
from tests.claims.labs import make_lab
from tests.core.hash_model import HashModelRunner, solo

from everystop.assembly import Capacity, build_scheduler
from everystop.claims import fragmentation, server_lab, straggler
from everystop.claims.everything import CLAIMS
from everystop.claims.kv_memory import memory_use
from everystop.claims.lab import KV_CACHE_TOKENS, LabError, Trial, check_outputs
from everystop.claims.model_work import ModelWork
from everystop.claims.refill import mixed_answers, slot_gaps
from everystop.claims.results import read_results
from everystop.claims.server_lab import ModelFacts, ServerLab
from everystop.claims.steps import history_of, steps_of, useful_share
from everystop.cli import main
from everystop.config import Config
from everystop.core.request import SamplingParams
from everystop.engine.engine import Engine
from everystop.observe.comparison import Run
from everystop.observe.formulas import static_steps
from everystop.sim.workloads import Dice, Job, Workload
from everystop.trial.on_engine import EngineRun, Sampling

ROOT = Path(__file__).parents[2]
HASH_SERVER = (sys.executable, "-m", "tests.claims.hash_server")
FACTS = ModelFacts(
    num_valid_tokens=NUM_IDS,
    kv_token_bytes=1,
    num_spare_blocks=0,
    is_invariant=True,
    work=ModelWork(operations_per_row=1, bytes_per_step=1),
    described={},
)
POLICIES = ("static", "continuous")
NUM_SLOTS = 4


class Silence:
    """Watches nothing."""

    def begin(self, words: str) -> None:
        """As `Watcher`."""

    def advance(self, num_over: int, num_all: int) -> None:
        """As `Watcher`."""


class Impatience(Silence):
    """Presses Ctrl-C when the first run begins."""

    def begin(self, words: str) -> None:
        if "1 of" in words:
            raise KeyboardInterrupt


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The servers that a test starts, all of which have ended when it is over."""
    started: list[subprocess.Popen[bytes]] = []

    class Listed(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(subprocess, "Popen", Listed)
    yield started
    left = [process.pid for process in started if process.poll() is None]
    for process in started:
        process.kill()
    assert not left


def make_server_lab(model: str = "hash", num_repeats: int = 1, watcher: Silence | None = None) -> ServerLab:
    return ServerLab(Config(model=model), num_repeats, watcher or Silence(), command=HASH_SERVER, facts=FACTS)


def make_trials(workload: Workload, policies: Sequence[str] = POLICIES, **flags: Any) -> dict[str, Trial]:
    """A static batch waits until it is full, however long its clients are held up."""
    usual = {policy: {"max_num_seqs": NUM_SLOTS} for policy in policies}
    if "static" in usual:
        usual["static"]["batch_wait_ms"] = 60_000
    return {policy: Trial(workload, policy, usual[policy] | flags) for policy in policies}


def answers(num: int = 12) -> Workload:
    """Requests at once of many lengths, whose number is a multiple of the slots'."""
    dice = Dice("answers", 1)
    jobs = (Job(prompt=dice.prompt(5 + i % 7), max_tokens=4 + 5 * (i % 5)) for i in range(num))
    return Workload("answers", num, tuple(jobs))


def alone(job: Job) -> list[int]:
    """The tokens of a job that is the only one."""
    params = SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True)
    return solo(job.prompt, params, limit_tokens=4096).token_ids


def on_engine(workload: Workload, trial: Trial) -> Run:
    """The trial on an engine of this process."""
    config = trial.config(Config())
    num_blocks = KV_CACHE_TOKENS // config.block_size
    capacity = Capacity(num_blocks=num_blocks, block_size=config.block_size, num_bytes=0, max_model_len=4096)
    runner = HashModelRunner(num_blocks=num_blocks, block_size=config.block_size)
    engine = Engine(build_scheduler(config, capacity), runner, eos_token_ids=())
    return EngineRun(workload, engine, Sampling()).play(trial.policy, 0, config.max_num_seqs, lambda *_: None)


def rows_of(run: Run) -> list[int]:
    """The rows of each step."""
    return [step.num_rows for step in steps_of(run)]


def test_clients_and_record_are_joined_request_by_request(servers: list[Any]) -> None:
    workload = answers()
    runs = make_server_lab(num_repeats=2).runs(make_trials(workload))
    assert len(servers) == len(POLICIES)
    seen = set()
    for policy, each in runs.items():
        assert [(run.policy, run.repeat, run.max_num_seqs) for run in each] == [(policy, i, NUM_SLOTS) for i in (0, 1)]
        for run in each:
            trails = history_of(run).trails
            assert len(trails) == len(workload.jobs)
            for line, job in zip(run.requests, workload.jobs, strict=True):
                assert line.request_id is not None
                trail = trails[line.request_id]
                assert trail.arrival is not None
                assert trail.finish is not None
                assert trail.client is not None
                assert trail.client.given_name.endswith(f"-{line.index}")
                assert trail.arrival.num_prompt_tokens == line.num_prompt_tokens == len(job.prompt)
                assert trail.finish.num_output_tokens == line.num_output_tokens == job.max_tokens == len(line.token_s)
                assert line.sent_s <= run.seconds(trail.arrival.now_ns) <= run.seconds(trail.finish.now_ns)
                assert run.seconds(trail.finish.now_ns) <= line.end_s <= run.duration_s
                seen.add((policy, line.request_id))
            assert sum(sum(step.num_outputs) for step in steps_of(run)) == run.num_output_tokens
    assert len(seen) == 2 * len(POLICIES) * len(workload.jobs), "no request is in two runs of a server"


def test_what_clients_get_is_what_an_engine_makes(servers: list[Any]) -> None:
    workload = answers()
    trials = make_trials(workload)
    for policy, [run] in make_server_lab().runs(trials).items():
        tokens = [alone(job) for job in workload.jobs]
        texts = [hashlib.sha256(text_of(ids).encode()).hexdigest()[:16] for ids in tokens]
        assert [line.digest for line in run.requests] == texts
        ids = [hashlib.sha256(array("i", ids).tobytes()).hexdigest()[:16] for ids in tokens]
        assert [line.digest for line in on_engine(workload, trials[policy]).requests] == ids


def test_the_server_takes_the_static_steps_that_virtual_time_says(servers: list[Any]) -> None:
    trials = make_trials(answers(), ["static"])
    [real], [virtual] = make_server_lab().runs(trials)["static"], make_lab().runs(trials)["static"]
    assert useful_share(real) == useful_share(virtual)
    assert rows_of(real) == rows_of(virtual)


def test_a_repeat_finds_nothing_in_the_prefix_cache_and_all_blocks_free(servers: list[Any]) -> None:
    dice = Dice("long", 1)
    workload = Workload("long", 4, tuple(Job(prompt=dice.prompt(100), max_tokens=3) for _ in range(4)))
    first, second = make_server_lab(num_repeats=2).runs(make_trials(workload, ["static"], block_size=16))["static"]
    assert sum(sum(step.nums) for step in steps_of(first)) == sum(sum(step.nums) for step in steps_of(second))
    assert memory_use(first, 16) == memory_use(second, 16)
    assert steps_of(second)[-1].num_free_blocks == KV_CACHE_TOKENS // 16


def test_a_server_that_plans_one_step_ahead_is_measured_too(servers: list[Any]) -> None:
    """As one on a GPU: a slot comes free when the next step has been launched."""
    workload = answers()
    lab = ServerLab(Config(model="hash", device="cuda"), 1, Silence(), command=HASH_SERVER, facts=FACTS)
    runs = lab.runs(make_trials(workload))
    assert {"--device=cuda"} <= set(servers[0].args)
    assert set(slot_gaps(runs["continuous"][0])) == {2}
    assert useful_share(runs["static"][0]) == useful_share(make_lab().runs(make_trials(workload))["static"][0])
    for [run] in runs.values():
        assert [line.num_output_tokens for line in run.requests] == [job.max_tokens for job in workload.jobs]


def test_texts_may_differ_where_nobody_has_promised_equal_ones() -> None:
    jobs = make_trials(answers(), ["continuous"])
    run = make_lab().runs(jobs)["continuous"][0]
    other = replace(run, requests=tuple(replace(line, digest="another") for line in run.requests))
    longer = replace(run, requests=tuple(replace(line, num_output_tokens=99) for line in run.requests))
    check_outputs(jobs, {"continuous": [run, other]}, same_texts=False)
    for wrong, same_texts in ((other, True), (longer, False)):
        with pytest.raises(LabError, match="outputs of the same requests differ"):
            check_outputs(jobs, {"continuous": [run, wrong]}, same_texts=same_texts)


def test_a_cache_takes_what_the_model_s_tokens_take_and_the_spare_block() -> None:
    facts = replace(FACTS, kv_token_bytes=100, num_spare_blocks=1)
    assert [facts.kv_bytes(num, 32) for num in (1, 32, 33)] == [6_400, 6_400, 9_600]


def test_flags_and_tenants_reach_the_server(servers: list[Any]) -> None:
    dice = Dice("tenants", 1)
    jobs = tuple(Job(prompt=dice.prompt(6), max_tokens=5, at_s=0.0, tenant=("a", "b")[i % 2]) for i in range(6))
    workload = Workload("tenants", 0, jobs)
    [run] = make_server_lab().runs(make_trials(workload, ["fair"], max_num_seqs=2, block_size=64))["fair"]
    arrivals = [trail.arrival for trail in history_of(run).trails.values()]
    assert len({arrival.tenant for arrival in arrivals if arrival is not None}) == 2
    assert max(rows_of(run)) == 2
    words = servers[0].args
    assert {"--policy=fair", "--max-num-seqs=2", "--block-size=64"} <= set(words)


def test_equal_settings_share_a_server_and_others_do_not(servers: list[Any]) -> None:
    trials = {
        "one": Trial(answers(4), "continuous"),
        "same": Trial(answers(8), "continuous", {"max_num_batched_tokens": 256}),
        "other": Trial(answers(4), "continuous", {"max_num_batched_tokens": 128}),
    }
    runs = make_server_lab().runs(trials)
    assert len(servers) == 2
    assert [len(history_of(runs[name][0]).trails) for name in trials] == [4, 8, 4]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("dies-at-once", "the server ended by itself with status 3: there is no such model"),
        ("dies", "the server ended by itself with SIGKILL: .*the roof is on fire"),
    ],
)
def test_a_server_that_dies_is_named_with_its_last_words(
    servers: list[Any], model: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_lab, "DEATH_S", 60.0)
    with pytest.raises(LabError, match=words):
        make_server_lab(model).runs(make_trials(answers()))


def test_a_server_that_hangs_is_ended(servers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_lab, "MAX_RUN_S", 2.0)
    with pytest.raises(LabError, match=r"request \d+ failed \(not ended when the run was, after 2 s\)"):
        make_server_lab("hangs").runs(make_trials(answers(), ["continuous"]))
    assert len(servers) == 1


def test_ctrl_c_ends_the_servers(servers: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_server_lab(watcher=Impatience()).runs(make_trials(answers()))
    assert len(servers) == len(POLICIES)


def test_token_ids_that_the_model_has_not_are_refused_before_anything_starts(servers: list[Any]) -> None:
    workload = Workload("wrong", 1, (Job(prompt=(NUM_IDS,), max_tokens=1),))
    with pytest.raises(LabError, match="token id 32,768"):
        make_server_lab().runs(make_trials(workload))
    assert not servers


@pytest.mark.model
def test_the_real_server_takes_the_steps_that_virtual_time_says() -> None:
    workload = mixed_answers(24)
    trials = make_trials(workload, max_num_seqs=8)
    real, virtual = ServerLab(Config(), 1, Silence()).runs(trials), make_lab().runs(trials)
    lengths = [job.max_tokens for job in workload.jobs]
    assert useful_share(real["static"][0]) == useful_share(virtual["static"][0])
    assert useful_share(real["static"][0]) == sum(lengths) / (8 * static_steps(lengths, 8))
    assert rows_of(real["static"][0]) == rows_of(virtual["static"][0])
    assert set(slot_gaps(real["continuous"][0])) == {1}


@pytest.mark.model
def test_the_real_server_reserves_the_blocks_that_virtual_time_says() -> None:
    jobs = fragmentation.conversations().jobs[:8]
    trial = make_trials(Workload("few", 8, jobs), ["static"], block_size=16)["static"]
    [real], [virtual] = ServerLab(Config(), 1, Silence()).runs({"x": trial})["x"], make_lab().runs({"x": trial})["x"]
    assert memory_use(real, 16) == memory_use(virtual, 16)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_command_measures_every_claim(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["claims", "--out", str(tmp_path), "--repeats", "1"]) == 0
    results = read_results(tmp_path)
    assert list(results) == [claim.number for claim in CLAIMS]
    assert all(result.client_cpu_s > 0 for result in results.values())
    counts = {c.figure.name: c.verdict.value for c in results[1].findings.conditions}
    assert counts["steps of a single row"] == "held"
    assert (tmp_path / "claims" / f"{straggler.CLAIM.number}-{straggler.CLAIM.name}.png").exists()
