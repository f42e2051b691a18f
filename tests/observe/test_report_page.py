"""The page of a report: what it says, that nothing in a file's names can become part of it, and its size."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.observe.report_runs import make_comparison, mixed
from tools import hero

from everystop.observe.comparison import Comparison, RequestLine, from_json, to_json
from everystop.observe.history import History
from everystop.observe.report import write_report
from everystop.observe.report.__main__ import main as redraw
from everystop.observe.report.headline import verdict
from everystop.observe.report.page import render_page
from everystop.observe.report.pictures import draw_all
from everystop.observe.report.remarks import limits
from everystop.observe.report_data import report_data

pytest.importorskip("matplotlib")
MAX_BYTES = 5 << 20
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Checks that elements nest, and collects words, elements and scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.words).append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return make_comparison(num_repeats=3)


@pytest.fixture(scope="module")
def page(comparison: Comparison) -> str:
    return page_of(comparison)


def page_of(comparison: Comparison) -> str:
    return render_page(comparison, draw_all(comparison))


def with_lines(comparison: Comparison, change: Callable[[int], dict[str, Any]]) -> Comparison:
    """The comparison with fields of the requests of its last run changed."""
    last = comparison.runs[-1]
    lines = tuple(replace(line, **change(line.index)) for line in last.requests)
    return replace(comparison, runs=(*comparison.runs[:-1], replace(last, requests=lines)))


def test_the_page_says_gains_and_losses_alike(comparison: Comparison, page: str) -> None:
    said = verdict(comparison, "continuous")
    kinds = [card.verdict for card in said.cards]
    assert kinds.count("better") >= 3
    assert "worse" in kinds
    reader = Reader(page)
    assert said.sentence.replace("\u00a0", " ") in reader.text
    assert "Worse under continuous: " in said.sentence
    for kind in ("better", "worse"):
        cards = [attrs for tag, attrs in reader.seen if tag == "li" and attrs.get("class") == f"card {kind}"]
        assert len(cards) == kinds.count(kind)
    worse = [card.title for card in said.cards if card.verdict == "worse"]
    assert any("decode time of long" in title or "ITL" in title for title in worse)


def test_every_picture_has_words_and_a_table(page: str) -> None:
    reader = Reader(page)
    svgs = [attrs for tag, attrs in reader.seen if tag == "svg"]
    assert len(svgs) == 14
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in svgs)
    ids = [attrs["id"] for _, attrs in reader.seen if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert sum(tag == "details" for tag, _ in reader.seen) == 5
    assert "16 of 16 requests gave the same output in all 6 runs" in reader.text
    assert "Student's 95 % interval" in reader.text
    assert "3 of 3" in reader.text
    assert "from due to sent: median 0 s, at most 0 s, over 96 timed requests" in reader.text
    assert "what was demanded" not in reader.text


def test_nothing_is_fetched_and_only_its_own_script_runs(page: str) -> None:
    reader = Reader(page)
    policy = next(str(attrs["content"]) for tag, attrs in reader.seen if attrs.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(reader.scripts[1].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    for tag, attrs in reader.seen:
        assert "src" not in attrs, tag
        assert all(not key.startswith("on") for key in attrs), tag
        assert str(attrs.get("href", "#")).startswith("#"), tag
    assert not re.search(r"https?://(?!www\.w3\.org)", page)


def test_names_from_files_cannot_become_part_of_the_page(comparison: Comparison) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'"
    names = {"static": f"a{evil}", "continuous": f"b{evil}"}
    runs = tuple(
        replace(
            run,
            policy=names[run.policy],
            requests=tuple(replace(line, group=evil, error=evil if line.index == 3 else None) for line in run.requests),
        )
        for run in comparison.runs[:4]
    )
    hostile = replace(
        comparison, workload=evil, policies=tuple(names.values()), runs=runs, settings={evil: evil, "model_id": evil}
    )
    rendered = page_of(hostile)
    reader = Reader(rendered)
    assert "<img" not in rendered
    assert len(reader.scripts) == 2
    assert evil in reader.text
    data = json.loads(reader.scripts[0])
    assert data["policies"] == list(names.values())
    assert data["requests"][0][1] == evil
    labels = [str(attrs["aria-label"]) for tag, attrs in reader.seen if tag == "svg"]
    assert any(evil in label for label in labels)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)


def test_what_went_wrong_stands_before_the_figures(comparison: Comparison) -> None:
    broken = with_lines(
        comparison, lambda i: {"digest": "other"} if i == 5 else {"error": "timed out"} if i == 2 else {}
    )
    text = Reader(render_page(replace(broken, num_repeats_asked=5), [])).text
    assert "Outputs differ: 1 requests had not the same output in all runs (5)" in text
    assert "Interrupted: 5 repeats were asked for; there are 3 under static; 3 under continuous" in text
    assert "1 requests failed, over all runs; no figure counts them. The first: timed out" in text
    assert text.index("Outputs differ") < text.index("continuous finished")


def test_a_server_is_seen_from_outside_only(comparison: Comparison) -> None:
    runs = tuple(replace(run, history=None, max_num_seqs=0, start_ns=0) for run in comparison.runs_of("continuous"))
    outside = replace(comparison, policies=("continuous",), runs=runs)
    reader = Reader(page_of(outside))
    assert "not its scheduler: slots, steps and waste are unknown" in reader.text
    assert "Times are those of the client" in reader.text
    figures = [attrs["id"] for tag, attrs in reader.seen if tag == "figure"]
    assert figures == ["tokens", "durations"]
    assert "16 requests under continuous took" in reader.text


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_the_page_says_what_to_install(comparison: Comparison, tmp_path: Path) -> None:
    paths = write_report(comparison, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["report.html"]
    text = Reader(paths[0].read_text(encoding="utf-8")).text
    assert "matplotlib is not installed; install everystop[pictures]" in text
    assert "continuous finished in" in text


def test_a_report_can_be_drawn_again_from_its_data(comparison: Comparison, page: str) -> None:
    again = page_of(from_json(json.loads(json.dumps(to_json(comparison)))))
    assert Reader(again).text == Reader(page).text


def test_a_report_is_drawn_again_from_its_folder(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("everystop.observe.report.pictures.pictures", lambda comparison: [])
    (tmp_path / "report.json").write_text(json.dumps(report_data(comparison)))
    redraw([str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert "continuous finished in" in (tmp_path / "report.html").read_text(encoding="utf-8")
    for damaged in ("[]", "[" * 200_000):
        (tmp_path / "report.json").write_text(damaged)
        with pytest.raises(SystemExit, match="1"):
            redraw([str(tmp_path)])
        assert "report.json is no report of everystop compare" in capsys.readouterr().err


def test_the_picture_of_the_readme_names_what_it_shows(comparison: Comparison, tmp_path: Path) -> None:
    names = [path.name for path in hero.draw(comparison, tmp_path)]
    assert names == ["hero.svg", "hero.png", "hero-dark.svg", "hero-dark.png"]
    assert all((tmp_path / name).stat().st_size < 200_000 for name in names)
    assert "The same 16 requests on the same kernels, 8 slots: " in hero.caption(comparison)


@pytest.mark.parametrize("num", [160, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_large_comparison_stays_small_and_says_what_it_leaves_out(num: int) -> None:
    large = make_comparison(mixed(num, 4), num_repeats=1, max_num_seqs=32, max_num_batched_tokens=256)
    rendered = page_of(large)
    assert len(rendered.encode()) < MAX_BYTES
    text = Reader(rendered).text
    assert "is joined with its neighbour" in text
    assert f"Of {num:,} requests 150 are drawn" in text
    assert ("500 of 2,000 requests, evenly chosen" in text) == (num > 500)


ODD: dict[str, Callable[[RequestLine], dict[str, Any]]] = {
    "all tokens at once": lambda line: {"token_s": (line.end_s,) * len(line.token_s)},
    "no time at all": lambda line: {"token_s": (0.0,) * len(line.token_s), "sent_s": 0.0, "end_s": 0.0},
    "one token each": lambda line: {"token_s": line.token_s[:1], "num_output_tokens": 1},
    "no tokens": lambda line: {"token_s": (), "num_output_tokens": 0},
    "all failed": lambda line: {"token_s": (), "num_output_tokens": 0, "end_s": -1.0, "error": "refused"},
    "never sent": lambda line: {"token_s": (), "num_output_tokens": 0, "sent_s": -1.0, "end_s": -1.0, "error": "no"},
}


@pytest.mark.parametrize("oddity", ODD)
def test_odd_runs_are_reported_too(oddity: str) -> None:
    plain = make_comparison(((24, 4, 0), (30, 3, 5)), num_repeats=1)
    runs = tuple(
        replace(run, history=None, requests=tuple(replace(line, **ODD[oddity](line)) for line in run.requests))
        for run in plain.runs
    )
    reader = Reader(page_of(replace(plain, runs=runs)))
    assert "All figures" in reader.text


@pytest.mark.parametrize("num_idle", [1, 2])
def test_runs_in_which_nobody_boarded_are_reported_too(num_idle: int) -> None:
    plain = make_comparison(((24, 4, 0), (30, 3, 5)), num_repeats=1)
    failed = {"token_s": (), "num_output_tokens": 0, "end_s": -1.0, "error": "refused"}
    idle = [
        replace(run, history=History(), duration_s=0.0, requests=tuple(replace(r, **failed) for r in run.requests))
        for run in plain.runs[:num_idle]
    ]
    page = page_of(replace(plain, runs=(*idle, *plain.runs[num_idle:])))
    assert Reader(page).text.count("all 2 requests failed") == num_idle
    assert ("nobody waits" in page) == (num_idle == 1)
    assert ("<figure" in page) == (num_idle == 1)


def test_a_policy_that_served_nothing_is_not_compared(comparison: Comparison) -> None:
    """Its errors stand before the figures, the most frequent first; failing soon is no gain."""

    def failed(line: RequestLine) -> RequestLine:
        message = f"refused {line.index % 5 if line.index < 8 else 0}"
        return replace(line, token_s=(), num_output_tokens=0, end_s=line.sent_s, error=message)

    runs = tuple(
        replace(run, duration_s=1e-6, requests=tuple(map(failed, run.requests))) if run.policy == "continuous" else run
        for run in comparison.runs
    )
    text = Reader(render_page(replace(comparison, runs=runs), [])).text
    assert "Nothing was served under continuous: all 48 requests failed, over all its runs. " in text
    assert "refused 0 (30 times); " in text
    assert "; and 2 other messages" in text
    assert "continuous finished" not in text
    assert "× better" not in text
    data = report_data(replace(comparison, runs=runs))
    assert all(gain["times_better"] is None for gain in data["ratios"]["continuous"])


def test_nothing_is_said_of_how_long_failures_took() -> None:
    plain = make_comparison(((24, 4, 0),), ("continuous",), num_repeats=1)
    failed = tuple(replace(line, token_s=(), error="HTTP 500") for line in plain.runs[0].requests)
    text = Reader(render_page(replace(plain, runs=(replace(plain.runs[0], requests=failed),)), [])).text
    assert "HTTP 500 (once)" in text
    assert "under continuous took" not in text


def test_nothing_to_report_is_an_error(comparison: Comparison, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run was finished"):
        write_report(replace(comparison, runs=()), tmp_path)


def test_a_single_repeat_speaks_of_no_intervals() -> None:
    once, twice = list(limits(make_comparison(num_repeats=1))), list(limits(make_comparison(num_repeats=2)))
    assert any("no ratio has an interval" in line for line in once)
    assert not any("intervals are wide" in line for line in once)
    assert any("intervals are wide" in line for line in twice)
