"""What `serve` refuses of its options, the doctor says in the same words; each flag has wrong values here."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.model.builders import tiny_model, write_folder
from tests.model.vocabularies import sentencepiece_inner, write_tokenizer

from everystop import cli
from everystop.cli.settings import flag_fields
from everystop.server import opening, tracing
from everystop.server.opening import Opening

TLS = Path(__file__).parent.parent / "server" / "tls"
CERT, KEY, OTHER_KEY, ENCRYPTED_KEY = (
    str(TLS / f"{name}.pem") for name in ("cert", "key", "other-key", "encrypted-key")
)

REFUSED_BY_PARSER = [
    "--device tpu",
    "--dtype int3",
    "--cuda-graphs sometimes",
    "--max-num-seqs many",
    "--kv-cache-memory much",
    "--kv-cache-dtype int3",
    "--policy best",
    "--admission all",
    "--seed x",
    "--generation-config some",
    "--on-engine-failure wait",
    "--log-format xml",
    "--log-level loud",
    "--api-key sha256:no",
    "--admin-key sha256:no",
]
REFUSED = [  # the finding that tells, and the options; {} is a folder with the files that `files` makes
    ("options", "--config {}/none"),
    ("options", "--config {}/not.toml"),
    ("options", "--port 70000"),
    ("address", "--port {taken}"),
    ("address", "--host 203.0.113.1"),
    ("address", "--uds {}/none/s"),
    ("address", "--uds {}/not.toml"),
    ("address", "--uds {}/" + "x" * 120),
    ("options", "--uds {}/s --port 8001"),
    ("options", "--served-model-name a --served-model-name a"),
    ("keys", "--api-key-file {}/none"),
    ("keys", "--api-key-file {}/empty"),
    ("keys", "--api-key-file {}/blanks"),
    ("keys", "--api-key-file {}/gold --tenants {}/silver.toml"),
    ("keys", "--api-key k --allowed-host llm.example"),
    ("options", "--allowed-host http://a"),
    ("options", f"--ssl-certfile {CERT}"),
    ("certificate", f"--ssl-certfile {{}}/none --ssl-keyfile {KEY}"),
    ("certificate", f"--ssl-certfile {CERT} --ssl-keyfile {{}}/none"),
    ("certificate", f"--ssl-certfile {CERT} --ssl-keyfile {OTHER_KEY}"),
    ("certificate", f"--ssl-certfile {CERT} --ssl-keyfile {ENCRYPTED_KEY}"),
    ("certificate", f"--ssl-certfile {{}}/empty --ssl-keyfile {KEY}"),
    ("kernels", "--device cuda --threads 2"),
    ("kernels", "--device cpu --dtype fp8"),
    ("kernels", "--device torch --dtype int8"),
    ("kernels", "--device cpu --cuda-graphs lazy"),
    ("kernels", "--device cpu --gpu-memory-utilization 0.5"),
    ("kernels", "--device torch --kv-cache-dtype int8"),
    ("KV cache", "--device cpu --max-model-len 9000"),
    ("KV cache", "--device cpu --kv-cache-memory 1"),
    ("KV cache", "--device cpu --kv-cache-memory 1000000GiB"),
    ("KV cache", "--device torch --kv-cache-memory 1"),
    ("KV cache", "--device torch --max-model-len 9000"),
    ("options", "--gpu-memory-utilization 2"),
    ("options", "--max-num-seqs 0"),
    ("options", "--max-num-batched-tokens 1"),
    ("options", "--max-num-prefill-tokens 0"),
    ("options", "--max-prefill-per-decode 70000"),
    ("options", "--target-itl-ms 0"),
    ("options", "--block-size 17"),
    ("options", "--policy fair-prefix --no-enable-prefix-caching"),
    ("options", "--batch-wait-ms 5"),
    ("options", "--ageing 5"),
    ("tenants", "--tenants {}/none"),
    ("tenants", "--tenants {}/not.toml"),
    ("tenants", "--tenants {}/weights.toml"),
    ("tenants", "--policy fair --tenants {}/shared.toml"),
    ("options", "--fair-quantum 5"),
    ("options", "--ttft-target-ms 5"),
    ("options", "--itl-target-ms 5"),
    ("options", "--threads 0"),
    ("chat template", "--chat-template {}/none"),
    ("chat template", "--chat-template {}/not.jinja"),
    ("options", "--shutdown-timeout -1"),
    ("options", "--stall-timeout 0"),
    ("options", "--crash-dir {} --max-crash-files 0"),
    ("options", "--max-crash-files -1"),
    ("options", "--max-num-queued-reqs 0"),
    ("options", "--max-num-queued-tokens 0"),
    ("options", "--max-request-seconds 0"),
    ("options", "--stats-interval -1"),
    ("options", "--explain-history -1"),
    ("options", "--slow-log 5 --explain-history 0"),
    ("options", "--otlp-traces-endpoint localhost"),
    ("record", "--record {}/none/x"),
    ("record", "--record {}"),
    ("record", "--record {}/empty/x"),
    ("record", "--record {}/" + "x" * 300),
    ("options", "--record-prompts"),
]
ALWAYS_RIGHT = {"--deterministic", "--log-requests", "--enable-per-request-metrics"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("tiny") / "model", tiny_model("llama", vocab_size=1000))
    write_tokenizer(folder, sentencepiece_inner(), bos_token="<s>", eos_token="</s>")
    return folder


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, text in {
        "empty": "",
        "blanks": "a b c\n",
        "gold": "gold: k\n",
        "not.toml": "a = = b\n",
        "not.jinja": "{% if %}",
        "weights.toml": "[tenant.a]\nweight = 3\n",
        "silver.toml": '[tenant.silver]\nkeys = ["k"]\n',
        "shared.toml": '[tenant.a]\nkeys = ["k"]\n[tenant.b]\nkeys = ["k"]\n',
        "right.toml": '[tenant.a]\nkeys = ["k"]\nweight = 3\n',
        "right.jinja": "{{ messages[0].content }}",
    }.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("EVERYSTOP_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EVERYSTOP_HOME", str(tmp_path / "home"))


class Served(Exception):
    """Nothing was refused."""


@pytest.fixture(autouse=True)
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that would listen for requests ends instead; what needs PyTorch is refused while the model loads."""

    def run(opened: Opening, *_: Any) -> NoReturn:
        if opened.config.device != "cpu":
            opened.load()
        raise Served

    monkeypatch.setattr(opening, "run", run)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield int(other.getsockname()[1])


def words_of(options: str, files: Path, taken: int = 0) -> list[str]:
    words = options.replace("{taken}", str(taken)).replace("{}", str(files)).split(" ")
    return words if {"--port", "--uds"} & set(words) else [*words, "--port", "0"]


def examined(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    status = cli.main(["doctor", "--json", *words])
    return status, {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["serve", *words]) > 0
    return capsys.readouterr().err.removeprefix("everystop: ").rstrip("\n")


def tree(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize(("name", "options"), REFUSED, ids=[options for _, options in REFUSED])
def test_the_doctor_says_what_serve_would(
    name: str,
    options: str,
    model: Path,
    files: Path,
    taken: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, before = [str(model), *words_of(options, files, taken)], tree(tmp_path)
    status, found = examined(capsys, *words)
    assert tree(tmp_path) == before, "the doctor changes nothing"
    assert (status, found[name]["status"]) == (1, "fail")
    assert found[name]["text"] == refusal(capsys, *words)


@pytest.mark.parametrize("options", REFUSED_BY_PARSER)
def test_what_is_no_such_value_is_refused_alike(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for command in ("doctor", "serve"):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, *options.split()])
        said.append((ended.value.code, capsys.readouterr().err.partition(" error: ")[2]))
    assert said[0] == said[1]
    assert said[0][0] == 2


def test_each_flag_has_a_wrong_value_here() -> None:
    tried = {word for options in (*REFUSED_BY_PARSER, *(options for _, options in REFUSED)) for word in options.split()}
    flags = {field.metadata["flag"] for field in flag_fields()}
    untried = {flag for flag in flags if flag not in tried and flag.replace("--", "--no-", 1) not in tried}
    assert untried == ALWAYS_RIGHT


def test_a_model_that_serve_refuses_fails_with_its_words(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    mute, hot = (Path(shutil.copytree(model, tmp_path / name)) for name in ("mute", "hot"))
    (mute / "tokenizer.json").unlink()
    (hot / "generation_config.json").write_text('{"temperature": -1}')
    for path in (tmp_path / "none.gguf", damaged, mute, hot, "nobody"):
        status, found = examined(capsys, str(path), "--port", "0")
        assert (status, found["model"]["status"]) == (1, "fail")
        assert found["model"]["text"] == refusal(capsys, str(path), "--port", "0")
    unreadable = Path(shutil.copytree(model, tmp_path / "unreadable"))
    (unreadable / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    status, found = examined(capsys, str(unreadable), "--port", "0")
    assert (status, found["chat template"]["status"]) == (1, "fail")
    assert found["chat template"]["text"] == refusal(capsys, str(unreadable), "--port", "0")


def test_traces_that_cannot_be_sent_are_refused_alike(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracing, "MODULES", ("no_such_module",))
    words = [str(model), "--port", "0", "--otlp-traces-endpoint", "http://localhost:4318"]
    status, found = examined(capsys, *words)
    assert (status, found["traces"]["status"]) == (1, "fail")
    assert found["traces"]["text"] == refusal(capsys, *words)


def test_what_depends_on_a_model_that_is_not_there_is_not_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examined(capsys, "--port", "0", "--max-model-len", "9000")
    assert status == 0, "a model that can be fetched is no failure"
    for name in ("KV cache", "chat template"):
        assert (found[name]["status"], "not looked at" in found[name]["text"]) == ("warn", True)


def test_a_chat_template_is_looked_at_without_a_model(
    model: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("none", "not.jinja"):
        words = ["--port", "0", "--chat-template", str(files / name)]
        status, found = examined(capsys, *words)
        assert (status, found["chat template"]["status"]) == (1, "fail")
        assert found["chat template"]["text"] == refusal(capsys, str(model), *words)


def test_right_options_are_served(model: Path, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        f"--device cpu --max-model-len 32 --kv-cache-memory 1MiB --policy fair --tenants {files}/right.toml "
        f"--api-key-file {files}/gold --chat-template {files}/right.jinja --record {files}/run.gz "
        f"--ssl-certfile {CERT} --ssl-keyfile {KEY}"
    )
    (files / "gold").write_text("gold: other\n")
    words, before = [str(model), *words_of(options, files)], tree(tmp_path)
    status, found = examined(capsys, *words)
    assert (status, tree(tmp_path)) == (0, before)
    assert found["tenants"]["text"].startswith("1 in ")
    assert found["keys"]["text"] == "2 of clients, 0 of admins"
    assert "requests of up to 32 tokens" in found["KV cache"]["text"]
    with pytest.raises(Served):
        cli.main(["serve", *words])
