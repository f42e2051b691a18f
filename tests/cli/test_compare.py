"""`everystop compare`: its options, its files and its exit codes, on the hash model."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.core.hash_model import HashModelRunner
from tests.trial.fake_server import HEAD, LAST_CHUNK, ending, event, fake_server, in_chunks, whole_answer
from tests.trial.stand import make_engine, make_runner, stragglers

from everystop import cli, scheduling
from everystop.cli.compare import command
from everystop.config import Config
from everystop.engine.engine import Engine
from everystop.observe.comparison import from_json
from everystop.sim.workloads import Workload

TRACE = "arrival_s,input_tokens,output_tokens\n0,5,3\n0.01,40,4\n0.02,6,2\n"
Command = Callable[..., Any]


class FakeBench:
    """A bench over the hash model; `configs` are those of the engines that were asked for."""

    configs: list[Config]
    num_valid_tokens = 30_000
    runner_type: type[HashModelRunner] = HashModelRunner

    def __init__(self, config: Config) -> None:
        self._runner = make_runner()
        FakeBench.configs = []

    def engine(self, config: Config) -> Engine:
        FakeBench.configs.append(config)
        wait_ms = scheduling.batch_wait_ms(config)
        return make_engine(self._runner, config.policy, max_num_seqs=config.max_num_seqs, batch_wait_ms=wait_ms)

    def describe(self) -> dict[str, Any]:
        return {"model_id": "hash"}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("EVERYSTOP_CONFIG", "EVERYSTOP_POLICY", "EVERYSTOP_MAX_NUM_SEQS", "EVERYSTOP_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("everystop.trial.bench.Bench", FakeBench)
    monkeypatch.setattr("everystop.observe.report.pictures.pictures", lambda comparison: [])  # they take their time
    monkeypatch.chdir(tmp_path)
    write(stragglers(), tmp_path / "w.jsonl")
    (tmp_path / "t.csv").write_text(TRACE)


def write(workload: Workload, path: Path) -> None:
    path.write_text("\n".join(workload.lines()))


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command with two repeats; returns report.json."""

    def run(*words: str, code: int = 0) -> Any:
        assert cli.main(["compare", "--out", "out", "--repeats", "2", *words]) == code
        return json.loads(Path("out/report.json").read_text())

    return run


def test_a_workload_is_run_in_turns_and_reported(compare: Command, capsys: pytest.CaptureFixture[str]) -> None:
    data = compare("--workload", "w.jsonl", "--max-num-seqs", "4")
    comparison = from_json(data["comparison"])
    assert [(run.policy, run.repeat) for run in comparison.runs] == [
        ("static", 0), ("continuous", 0), ("continuous", 1), ("static", 1)
    ]  # fmt: skip
    assert data["outputs"] == {"num_equal": 8, "different": [], "num_uncompared": 0}
    assert data["by_policy"]["static"]["total_output_tokens"] == 2 * 90
    assert data["by_policy"]["static"]["slots"]["num_slots"] == 4
    steps = {policy: data["by_policy"][policy]["slots"]["num_steps"] for policy in ("static", "continuous")}
    assert steps == {"static": 60, "continuous": 35}
    assert data["settings"]["model_id"] == "hash"
    assert data["settings"]["command"].endswith("--max-num-seqs 4")
    assert data["settings"]["flags"] == {"max_num_seqs": 4}
    assert data["settings"]["batch_wait_ms"] == {"static": 50}
    shown = capsys.readouterr()
    assert "continuous against static" in shown.out
    assert "report.json, report.html" in shown.err
    assert "continuous finished" in Path("out/report.html").read_text()


def test_the_default_is_the_stragglers_at_their_own_number_of_slots(compare: Command) -> None:
    data = compare("--repeats", "1", "--policies", "continuous")
    assert data["workload"] == "straggler"
    assert {config.max_num_seqs for config in FakeBench.configs} == {16}
    assert [config.policy for config in FakeBench.configs] == ["continuous"] * 2
    data = compare("--repeats", "1", "--policies", "continuous", "--max-num-seqs", "8")
    assert data["settings"]["max_num_seqs"] == 8


@pytest.mark.parametrize("policies", ["static-padded,continuous", "static,static-padded,shortest"])
def test_any_policies_can_be_compared(compare: Command, policies: str) -> None:
    data = compare("--workload", "w.jsonl", "--policies", policies, "--repeats", "1")
    assert list(data["by_policy"]) == policies.split(",")
    assert list(data["ratios"]) == policies.split(",")[1:]


def test_a_trace_is_an_open_loop_unless_there_are_clients(compare: Command) -> None:
    data = compare("--trace", "t.csv", "--dilate-time", "2", "--repeats", "1")
    run = from_json(data["comparison"]).runs[0]
    assert [line.scheduled_s for line in run.requests] == [0.0, 0.02, 0.04]
    assert [(line.num_prompt_tokens, line.num_output_tokens) for line in run.requests] == [(5, 3), (40, 4), (6, 2)]
    assert data["arrival_lag_ms"]["max"] >= 0
    data = compare("--trace", "t.csv", "--clients", "2", "--limit", "2", "--repeats", "1")
    run = from_json(data["comparison"]).runs[0]
    assert [line.scheduled_s for line in run.requests] == [None, None]
    assert data["by_policy"]["static"]["max_concurrency"] == 2


def test_an_option_of_one_policy_reaches_that_one(compare: Command) -> None:
    compare("--workload", "w.jsonl", "--policies", "static,fair-prefix", "--fair-quantum", "99", "--batch-wait-ms", "7")
    found = {(config.policy, config.fair_quantum, config.batch_wait_ms) for config in FakeBench.configs}
    assert found == {("static", None, 7), ("fair-prefix", 99, None)}


def test_a_comparison_that_served_nothing_has_no_headline(compare: Command, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = (json.dumps({**job.to_dict(), "max_tokens": 10**9}) for job in stragglers().jobs)
    Path("w.jsonl").write_text("\n".join([json.dumps({"workload": "x", "num_clients": 8}), *jobs]))
    data = compare("--workload", "w.jsonl", code=1)
    assert data["num_errors"] == 32
    assert all(gain["times_better"] is None for gain in data["ratios"]["continuous"])
    shown, page = capsys.readouterr().out, Path("out/report.html").read_text()
    for policy in ("static", "continuous"):
        assert f"NOTHING WAS SERVED under {policy}: all 16 requests failed, over all its runs." in shown
        assert f"Nothing was served under {policy}: all 16 requests failed, over all its runs. " in page
    assert "(16 times)" in shown
    assert "(16 times)" in page
    assert "better" not in shown
    assert "finished in" not in page
    assert "the same work was done" not in page
    assert "there are no outputs to compare" in page


ONE = '{"workload": "one", "num_clients": 1}\n{"prompt": [1, 2, 3], "max_tokens": 1}\n'


def test_waiting_for_company_is_not_reported_as_a_gain_alone(
    compare: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("w.jsonl").write_text(ONE)
    data = compare("--workload", "w.jsonl")
    waits = data["by_policy"]["static"]["batch_wait"]
    assert waits["num_batches"] == 2
    assert waits["median_ms"] >= 50
    assert data["by_policy"]["continuous"]["batch_wait"]["num_batches"] == 0
    shown = capsys.readouterr().out
    said = "static waited for company before 2 batches, "
    method = "static waits up to 50 ms for a batch to fill"
    page = Path("out/report.html").read_text()
    for text in (shown, page):
        assert said in text
        assert "(--batch-wait-ms 50): time in which it computed nothing" in text
        assert method in text
    assert shown.index(said) < shown.index("better")
    assert page.index(said) < page.index("continuous finished")


def test_a_batch_wait_of_nothing_is_stated_and_not_remarked_on(
    compare: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("w.jsonl").write_text(ONE)
    data = compare("--workload", "w.jsonl", "--batch-wait-ms", "0")
    assert data["settings"]["batch_wait_ms"] == {"static": 0}
    assert data["by_policy"]["static"]["batch_wait"]["num_batches"] == 0
    shown = capsys.readouterr().out
    assert "waited for company" not in shown
    assert "static waits up to 0 ms for a batch to fill" in shown


def test_policies_that_never_wait_have_no_batch_wait(compare: Command, capsys: pytest.CaptureFixture[str]) -> None:
    data = compare("--workload", "w.jsonl", "--policies", "continuous,shortest", "--repeats", "1")
    assert data["settings"]["batch_wait_ms"] == {}
    assert "a batch to fill" not in capsys.readouterr().out


def test_a_file_made_for_serve_will_do(compare: Command) -> None:
    Path("c.toml").write_text('policy = "shortest"\nrecord = "r.gz"\nport = 1\nmax-num-seqs = 3\n')
    data = compare("--config", "c.toml", "--repeats", "1", "--preset", "straggler")
    assert list(data["by_policy"]) == ["static", "continuous"]
    assert {config.max_num_seqs for config in FakeBench.configs} == {3}
    assert {config.record for config in FakeBench.configs} == {None}


@pytest.mark.parametrize(
    ("words", "is_told"),
    [([], False), (["--device", "torch"], True), (["--device", "torch", "--deterministic"], False)],
)
def test_outputs_that_differ_end_with_1(
    compare: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    is_told: bool,
) -> None:
    """Where nobody has promised equal ones, it is told what would make them so."""
    usual = FakeBench.engine

    def spoilt(self: FakeBench, config: Config) -> Engine:
        engine = usual(self, config)
        if config.policy == "continuous":
            engine._eos_token_ids = tuple(range(32))
        return engine

    monkeypatch.setattr(FakeBench, "engine", spoilt)
    jobs = tuple(json.dumps({**job.to_dict(), "ignore_eos": False}) for job in stragglers().jobs)
    Path("w.jsonl").write_text("\n".join([json.dumps({"workload": "x", "num_clients": 8}), *jobs]))
    data = compare("--workload", "w.jsonl", *words, code=1)
    assert data["outputs"]["different"]
    shown = capsys.readouterr()
    assert "OUTPUTS DIFFER" in shown.out
    assert ("--deterministic makes outputs equal" in shown.err) == is_told


def test_requests_that_fail_are_counted_and_end_with_1(compare: Command, capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.csv").write_text(TRACE + "0.03,900,1\n")
    data = compare("--trace", "t.csv", "--repeats", "1", code=1)
    assert data["num_errors"] == 2
    assert data["by_policy"]["static"]["failed"] == 1
    assert "ERRORS: 2 requests failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preset", "nobody"], "choose one of straggler, chat"),
        (["--workload", "none.jsonl"], "cannot be read"),
        (["--limit", "3"], "no effect without --trace"),
        (["--trace", "t.csv", "--workload-seed", "3"], "no effect on a file"),
        (["--trace", "t.csv", "--clients", "3", "--dilate-time", "2"], "no effect with --clients"),
        (["--clients", "0"], "at least 1"),
        (["--clients", "1000000000"], "--clients is 1,000,000,000; it must be at least 1, and at most 100,000"),
        (["--slo-ttft-ms", "-3"], "--slo-ttft-ms is -3"),
        (["--seed", "3"], "no effect on greedy"),
        (["--temperature", "-1"], "must be 0 to 100"),
        (["--repeats", "0"], "must be 1 to"),
        (["--policies", "static,fastest"], "'fastest'"),
        (["--policies", "static,static"], "twice"),
        (["--policies", ""], "--policies names ''"),
        (["--policies", "continuous", "--batch-wait-ms", "3"], "--batch-wait-ms needs --policy static"),
        (["--api-key", "x"], "--api-key: only for a server"),
        (["--ca-file", "x", "--allow-remote"], "--ca-file and --allow-remote: only for a server"),
        (["--prompts", "text"], "--prompts: only for a server"),
        (["--extra", "{}"], "--extra: only for a server"),
        (["--url", "http://127.0.0.1:1", "--extra", "{"], "--extra is no JSON"),
        (["--url", "http://127.0.0.1:1", "--extra", "[1]"], "must be a JSON object"),
        (["--url", "http://127.0.0.1:1", "--extra", "[" * 100_000], "--extra is nested too deeply"),
        (["--url", "http://127.0.0.1:1", "--extra", '{"stream": false, "n": 2}'], "sets n, stream, which"),
        (["--url", "ftp://127.0.0.1:1"], "must be like http://"),
        (["--url", "http://127.0.0.1:99999"], "a port up to 65,535"),
        (["--url", "http://127.0.0.1:80a"], "a port up to 65,535"),
        (["--url", "http://127.0.0.1:1", "--ca-file", "x"], "is no https URL"),
        (["--url", "http://127.0.0.1:1", "--api-key", "a\nb"], "cannot be printed"),
        (["--url", "http://192.0.2.1:8000"], "--allow-remote"),
        (["--url", "http://127.0.0.1:1", "--max-num-seqs", "3"], "--max-num-seqs has no effect with --url"),
        (["--url", "http://127.0.0.1:1", "--policies", "a,b"], "give the one name"),
        (["--url", "http://127.0.0.1:1", "--policies", ""], "--policies names none"),
        (["--config", "none.toml"], "cannot be read"),
    ],
)
def test_what_cannot_be_honoured_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--out", "out", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_damaged_workload_is_named_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    head = '{"workload": "w", "num_clients": 1}\n'
    for text, said in (
        ("", "no requests"),
        (head, "no requests"),
        ("[1]\n", "line 1"),
        (head + '{"prompt": [], "max_tokens": 1}\n', "line 2: the prompt must hold"),
        (head + '{"prompt": [1.5], "max_tokens": 1}\n', "line 2: the prompt must hold"),
        (head + '{"prompt": [1], "max_tokens": 0}\n', "line 2: max_tokens is 0"),
        (head + '{"prompt": [1], "max_tokens": 1, "at_s": -1}\n', "line 2: at_s is -1"),
        (
            head + '{"prompt": [1], "max_tokens": 1, "foo": 1}\n',
            "w.jsonl, line 2: unknown field 'foo'; a request has prompt, max_tokens, group, at_s, ignore_eos, tenant, ",
        ),
        ("[" * 200_000, "line 1: not a request: lists or objects are nested too deeply"),
        (head + "[" * 200_000, "line 2: not a request: lists or objects are nested too deeply"),
        (head + "{\n", "line 2: not JSON: Expecting property name .* at column 2"),
        (
            '{"workload": "w", "num_clients": 1000000000}\n{"prompt": [1], "max_tokens": 1}\n',
            "line 1: num_clients is 1,000,000,000; at most 100,000 can send; write a smaller number",
        ),
        ('{"workload": "w", "num_clients": 0}\n{"prompt": [1], "max_tokens": 1}\n', "num_clients is 0"),
    ):
        Path("w.jsonl").write_text(text)
        assert cli.main(["compare", "--out", "out", "--workload", "w.jsonl"]) == 2
        assert re.search(said, capsys.readouterr().err)


def test_a_folder_that_cannot_be_written_is_found_out_first(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert cli.main(["compare", "--out", "file/x"]) == 2
    assert "--out file/x cannot be written" in capsys.readouterr().err


def test_tokens_beyond_the_vocabulary_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeBench, "num_valid_tokens", 500)
    assert cli.main(["compare", "--out", "out", "--preset", "uniform"]) == 2
    assert "the model has 0 to 499" in capsys.readouterr().err


def test_a_server_is_measured_from_its_clients_side(
    compare: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYSTOP_API_KEY", "secret")
    with fake_server(whole_answer) as server:
        data = compare("model-x", "--url", f"{server.url}/v1", "--workload", "w.jsonl", "--policies", "theirs")
        assert {request["model"] for request in server.requests} == {"model-x"}
    assert list(data["by_policy"]) == ["theirs"]
    keys = data["by_policy"]["theirs"]
    assert (keys["completed"], keys["total_output_tokens"], keys["slots"]) == (16, 180, None)
    assert data["outputs"] == {"num_equal": 8, "different": [], "num_uncompared": 0}
    run = from_json(data["comparison"]).runs[0]
    assert run.history is None
    assert run.requests[0].request_id is None
    assert "clients were measured" in capsys.readouterr().out
    assert "secret" not in Path("out/report.json").read_text()


def test_a_report_takes_the_place_of_an_older_one(compare: Command) -> None:
    """The pictures of slots that an engine had would lie beside the report of a server, which shows none."""
    Path("out").mkdir()
    old = ("slots.svg", "slots-dark.png", "winners.png", "lengths-static-padded.svg", "slot-time-dark.svg")
    for name in (*old, "notes.txt"):
        Path("out", name).touch()
    with fake_server(whole_answer) as server:
        compare("model-x", "--url", server.url, "--workload", "w.jsonl", "--repeats", "1")
    assert {path.name for path in Path("out").iterdir()} == {"report.json", "report.html", "notes.txt"}


def test_a_server_that_takes_no_ids_is_asked_by_text_or_chat(
    compare: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a refusal of ids says to do is what helps."""

    def answer(request: dict[str, Any]) -> bytes:
        if "messages" not in request:
            return b"HTTP/1.1 400 Bad Request\r\nContent-Length: 7\r\n\r\nno ids!"
        deltas: list[Any] = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": " yes"}]
        pieces = b"".join(event({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas)
        return HEAD + in_chunks(pieces + ending(12, 2), 1 << 20) + LAST_CHUNK

    with fake_server(answer) as server:
        words = ["--url", server.url, "--workload", "w.jsonl", "--repeats", "1"]
        assert cli.main(["compare", "--out", "out", *words]) == 1
        assert "no ids! (prompts were sent as ids; --prompts text or chat may suit" in capsys.readouterr().err
        server.requests.clear()
        data = compare(*words, "--prompts", "chat", "--extra", '{"min_p": 0.5}')
    assert data["settings"]["prompts"] == "chat"
    assert data["settings"]["extra"] == {"min_p": 0.5}
    assert data["by_policy"]["server"]["total_output_tokens"] == 16
    assert [len(line.token_s) for line in from_json(data["comparison"]).runs[0].requests] == [2] * 8
    names = {"messages", "max_tokens", "temperature", "stream", "stream_options", "min_p"}
    assert {frozenset(request) for request in server.requests} == {frozenset(names)}


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--out", "out", "--url", "http://127.0.0.1:9", "--workload", "w.jsonl"]) == 1
    assert "no server at http://127.0.0.1:9" in capsys.readouterr().err


def test_an_interrupted_comparison_is_written_and_ends_with_130(
    compare: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = FakeBench.engine

    def interrupted(self: FakeBench, config: Config) -> Engine:
        if len(FakeBench.configs) == 4:
            raise KeyboardInterrupt
        return usual(self, config)

    monkeypatch.setattr(FakeBench, "engine", interrupted)
    data = compare("--workload", "w.jsonl", code=130)
    assert (data["is_complete"], data["num_repeats"]) == (False, {"static": 1, "continuous": 2})
    assert "INTERRUPTED: 2 repeats were asked for" in capsys.readouterr().out


def test_a_file_for_a_server_that_records_prompts_will_do(compare: Command, capsys: pytest.CaptureFixture[str]) -> None:
    Path("serve.toml").write_text('record = "run.gz"\nrecord-prompts = true\n')
    compare("--config", "serve.toml", "--workload", "w.jsonl", "--repeats", "1")
    assert not Path("run.gz").exists()
    with pytest.raises(SystemExit):
        cli.main(["compare", "--help"])
    assert "--record-prompts" not in capsys.readouterr().out


def test_an_interrupt_in_the_first_run_says_that_nothing_is_written(
    compare: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(self: FakeBench, config: Config) -> Engine:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeBench, "engine", interrupted)
    assert cli.main(["compare", "--out", "out", "--workload", "w.jsonl"]) == 130
    assert "interrupted before the end of the first run; nothing is written" in capsys.readouterr().err


def test_the_command_that_is_shown_holds_no_key() -> None:
    words = ["compare", "--url", "http://x", "--api-key", "secret", "--out", "a b", "--api-key=secret"]
    shown = command(words)
    assert "secret" not in shown
    assert shlex.split(shown) == [
        "everystop", "compare", "--url", "http://x", "--api-key", "…", "--out", "a b", "--api-key=…"
    ]  # fmt: skip
