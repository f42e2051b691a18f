from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import everystop.claims.everything
import everystop.claims.lab
import everystop.claims.results
import everystop.claims.server_lab
import everystop.observe.report.drawing
from everystop.claims.claim import Claim
from everystop.claims.findings import Condition, Findings, counted
from everystop.claims.lab import Lab
from everystop.cli import main
from everystop.cli.claims import default_folder
from everystop.config import Config
from everystop.core.errors import ConfigError
from everystop.sim.cost import CostModel


def make_claim(number: int, *, interrupted: bool = False) -> Claim:
    def measure(lab: Lab) -> Findings:
        if interrupted:
            raise KeyboardInterrupt
        return Findings(
            headline=f"{lab.num_repeats} repeats.",
            how="Nothing was run.",
            conditions=(Condition(figure=counted("repeats", [lab.num_repeats]), at_least=2),),
        )

    def draw(data: Mapping[str, Any], theme: Any) -> Any:
        return SimpleNamespace(write_png=lambda path: path.write_bytes(b"picture"))

    return Claim(
        number=number, name="x", title=f"Number {number}", statement="Yes.", test="yes.", measure=measure, draw=draw
    )


class NoLab(everystop.claims.lab.VirtualLab):
    """Takes what a `ServerLab` takes, and starts nothing."""

    bases: ClassVar[list[Config]] = []

    def __init__(self, base: Config, num_repeats: int, watcher: Any) -> None:
        NoLab.bases.append(base)
        super().__init__(CostModel(step_ns=1e6), num_repeats)


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[Claim]:
    """Three claims in place of the real ones; the list may be changed. Nothing is loaded or drawn."""
    found = [make_claim(0), make_claim(1), make_claim(2)]
    monkeypatch.setattr(everystop.claims.everything, "CLAIMS", found)
    monkeypatch.setattr(everystop.claims.server_lab, "ServerLab", NoLab)
    monkeypatch.setattr(everystop.claims.results, "drawing_style", lambda: _nothing())
    monkeypatch.setattr(everystop.observe.report.drawing, "matplotlib", lambda name="": None)
    return found


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def test_all_claims_are_measured_and_written(
    claims: list[Claim], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["claims", "--out", str(tmp_path), "--repeats", "3"]) == 0
    page = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert page.count("✔ held") >= 3
    assert (tmp_path / "claims" / "2-x-dark.png").read_bytes() == b"picture"
    assert "1. Number 1: held" in capsys.readouterr().err


def test_what_computes_is_chosen_as_for_serve(
    claims: list[Claim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flags, the environment or a file; what else a file for serve has means nothing here."""
    monkeypatch.setenv("EVERYSTOP_DTYPE", "bfloat16")
    (tmp_path / "c.toml").write_text('deterministic = true\npolicy = "fair"\nmax-num-seqs = 3\n')
    words = ["claims", "some-model", "--out", str(tmp_path), "--device", "torch", "--config", str(tmp_path / "c.toml")]
    assert main(words) == 0
    assert NoLab.bases[-1] == Config(model="some-model", device="torch", dtype="bfloat16", deterministic=True)
    monkeypatch.delenv("EVERYSTOP_DTYPE")
    assert main(["claims", "--out", str(tmp_path), "--device", "cpu", "--threads", "2"]) == 0
    assert NoLab.bases[-1] == Config(device="cpu", threads=2)


def test_only_some_are_measured_again(claims: list[Claim], tmp_path: Path) -> None:
    assert main(["claims", "--out", str(tmp_path), "--repeats", "3"]) == 0
    assert main(["claims", "--out", str(tmp_path), "--repeats", "1", "--only", "1"]) == 0
    page = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert page.count("| ✔ held | 3 repeats. |") == 2
    assert page.count("| ✘ did not hold | 1 repeats. |") == 1


def test_an_interrupted_run_keeps_what_is_done(claims: list[Claim], tmp_path: Path) -> None:
    claims[1] = make_claim(1, interrupted=True)
    assert main(["claims", "--out", str(tmp_path)]) == 130
    page = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert "| 0 | [Number 0](#claim-0) | ✔ held |" in page
    assert "| 2 | Number 2 | not measured |" in page


def test_pictures_are_drawn_again_without_measuring(claims: list[Claim], tmp_path: Path) -> None:
    assert main(["claims", "--out", str(tmp_path)]) == 0
    (tmp_path / "claims" / "0-x.png").unlink()
    claims[0] = make_claim(0, interrupted=True)  # to be measured would end it
    assert main(["claims", "--out", str(tmp_path), "--draw"]) == 0
    assert (tmp_path / "claims" / "0-x.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "7"], "--only names claim 7; there are 0, 1, 2"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--draw"], "has no results"),
        (["--device", "cuda", "--threads", "2"], "--threads has no effect with --device cuda"),
        (["--device", "cpu", "--dtype", "bfloat16"], "--dtype bfloat16 cannot be had with --device cpu"),
    ],
)
def test_what_cannot_be_done_is_said(
    claims: list[Claim], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["claims", "--out", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(
    claims: list[Claim], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["claims", "--out", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_without_matplotlib_nothing_is_measured(
    claims: list[Claim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["claims", "--out", str(tmp_path)]) == 1
    assert "everystop[pictures]" in capsys.readouterr().err


def test_a_clone_gets_its_page_in_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_folder() == Path("claims")
    (tmp_path / "docs").mkdir()
    (tmp_path / "src" / "everystop" / "claims").mkdir(parents=True)
    assert default_folder() == Path("docs")


def test_numbers_of_claims_are_told_from_the_model(claims: list[Claim]) -> None:
    from everystop.cli.claims import choose

    assert [claim.number for claim in choose(claims, [2, 0, 2])] == [0, 2]
    with pytest.raises(ConfigError):
        choose(claims, [3])
