"""The documents name things that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tools.flag_table import PAGE, with_tables

from everystop.cli import settings
from everystop.config import Config

ROOT = Path(__file__).parent.parent


def test_the_life_of_a_request_is_short_and_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "request-life.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    named = re.findall(r"`((?:src|csrc)/[\w/]+\.(?:py|cpp|hpp))`", text)
    assert len(set(named)) >= 14
    missing = [name for name in named if not (ROOT / name).is_file()]
    assert not missing


def test_links_between_documents_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tables_of_options_are_those_of_the_configuration() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python -m tools.flag_table"


def test_deployments_use_options_and_paths_that_exist() -> None:
    variables = {f"EVERYSTOP_{field.name.upper()}" for field in settings.all_fields()} | set(settings.OTHER_VARIABLES)
    flags = {field.metadata["flag"] for field in settings.flag_fields()}
    files = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"\bEVERYSTOP_[A-Z_]+\b", text)) <= variables, path
        assert set(re.findall(r"everystop serve .*?(--[\w-]+)", text)) <= flags, path
        assert set(re.findall(r"/health[/\w]*", text)) <= {"/health", "/health/live", "/health/ready"}, path


def test_deployments_give_a_drain_the_time_that_it_takes() -> None:
    def number(path: str, pattern: str) -> int:
        found = re.search(pattern, (ROOT / "deploy" / path).read_text(encoding="utf-8"))
        assert found is not None, (path, pattern)
        return int(found[1])

    pod = "kustomize/deployment.yaml"
    drain_s = number("kustomize/kustomization.yaml", r"EVERYSTOP_SHUTDOWN_TIMEOUT=(\d+)")
    assert number(pod, r"terminationGracePeriodSeconds: (\d+)") >= drain_s + number(pod, r'"sleep", "(\d+)"') + 10
    unit = "systemd/everystop.service"
    assert number(unit, r"TimeoutStopSec=(\d+)") >= number(unit, r"--shutdown-timeout (\d+)") + 10
    compose = "compose/compose.yaml"
    assert number(compose, r"stop_grace_period: (\d+)s") >= number(compose, r'SHUTDOWN_TIMEOUT: "(\d+)"') + 10
    assert number(unit, r"WatchdogSec=(\d+)") > Config().stall_timeout
