"""A server as a child: it gets the configuration as flags, and never outlives whoever started it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from everystop.cli import settings
from everystop.config import Config
from everystop.trial import server_process
from everystop.trial.server_process import ServerFailed, ServerProcess, command_line, without_settings


def read_back(config: Config) -> Config:
    """What `serve` makes of the words."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    settings.add_options(parser)
    return settings.make_config(parser.parse_args(command_line(config)), {})


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(model="other.gguf", max_num_seqs=3, kv_cache_memory=12345, port=0, seed=-1, target_itl_ms=0.1),
        Config(policy="static", batch_wait_ms=0, enable_prefix_caching=False, record="a b.gz", record_prompts=True),
        Config(served_model_name=("a", "b"), log_requests=False, uds="/x/y"),
    ],
)
def test_a_configuration_comes_back_from_its_command_line(config: Config) -> None:
    assert read_back(config) == config


def test_defaults_are_not_repeated() -> None:
    assert command_line(Config(max_num_seqs=9)) == ["smollm2", "--max-num-seqs=9"]


def test_settings_of_the_environment_do_not_reach_the_server() -> None:
    given = {"PATH": "/bin", "EVERYSTOP_HOME": "/h", "EVERYSTOP_ISA": "avx2", "EVERYSTOP_PORT": "1", "EVERYSTOP_X": ""}
    assert without_settings(given) == {"PATH": "/bin", "EVERYSTOP_HOME": "/h", "EVERYSTOP_ISA": "avx2"}


def child(program: str, folder: Path) -> ServerProcess:
    """A server whose program is this."""
    return ServerProcess([], folder, (sys.executable, "-c", program))


SERVES = "print('Serving on http://127.0.0.1:7 (try it)', flush=True);"


def test_it_is_told_where_it_serves_and_ended_gently(tmp_path: Path) -> None:
    waits = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); print('loading');" + SERVES
    with child(waits + "signal.sigwait([15])", tmp_path) as server:
        assert server.url() == "http://127.0.0.1:7"
        assert server.pid
        server.check()
    with pytest.raises(ServerFailed, match="ended by itself with status 0"):
        server.check()


def test_ends_that_were_not_asked_for_are_named(tmp_path: Path) -> None:
    fails = "import sys; print('one\\ntwo\\nthree\\nthe cause', file=sys.stderr); sys.exit(4)"
    with pytest.raises(ServerFailed, match="ended by itself with status 4: two / three / the cause"):
        wait_for(child(fails, tmp_path))
    with pytest.raises(ServerFailed, match="ended by itself with SIGABRT"):
        wait_for(child("import os; os.abort()", tmp_path))


def wait_for(server: ServerProcess) -> str:
    with server:
        return server.url()


def test_a_server_that_does_not_serve_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "START_S", 0.2)
    with pytest.raises(ServerFailed, match=r"did not serve within 0\.2 s"):
        wait_for(child("import signal; signal.pause()", tmp_path))


def test_a_server_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "END_S", 0.2)
    stays = "import signal; signal.signal(15, signal.SIG_IGN);" + SERVES
    server = child(stays + "\nwhile True: signal.pause()", tmp_path)
    with pytest.raises(ServerFailed, match=r"did not end within 0\.2 s"):
        wait_for(server)
    with pytest.raises(ServerFailed, match="SIGKILL"):
        server.check()


def test_a_server_that_ends_badly_is_named(tmp_path: Path) -> None:
    program = "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [15]);" + SERVES
    with pytest.raises(ServerFailed, match="the server ended with status 1"):
        wait_for(child(program + "sys.exit(signal.sigwait([15]) == 15)", tmp_path))


def test_what_is_raised_ends_the_server_at_once(tmp_path: Path) -> None:
    server = child(
        "import signal; signal.signal(15, signal.SIG_IGN);" + SERVES + "\nwhile True: signal.pause()", tmp_path
    )
    with pytest.raises(KeyboardInterrupt):
        interrupt(server)
    with pytest.raises(ServerFailed, match="SIGKILL"):
        server.check()


def interrupt(server: ServerProcess) -> None:
    with server:
        server.url()
        raise KeyboardInterrupt
