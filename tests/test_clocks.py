"""Durations are differences of a clock that nobody can set; the calendar's clock only stamps."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest
from tests.server.parrot import parrot, wait_until
from tests.server.test_lifecycle import Stream

SOURCE = Path(__file__).parent.parent / "src" / "everystop"
STAMPS = {  # file: how often it looks at the calendar, each time to stamp something
    "cli/cache.py": 1,  # the age of files, whose times are the calendar's
    "cli/claims.py": 1,
    "cli/compare.py": 1,
    "model/chat_template.py": 1,  # a template asks for the date
    "observe/otel/export.py": 1,  # spans carry times of the calendar
    "server/crash_file.py": 2,
    "server/logs.py": 2,
    "server/replies.py": 1,  # "created"
    "server/state.py": 1,
}
CALENDAR = {"time": {"time", "time_ns", "gmtime", "localtime"}, "datetime": {"now", "utcnow", "today"}}


def calendar_calls(path: Path) -> int:
    """Calls of the calendar's clock; `strftime` and `gmtime` with an argument only format."""
    num = 0
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        of = node.func.value
        module = of.id if isinstance(of, ast.Name) else ""
        num += node.func.attr in CALENDAR.get(module, ()) and not (node.func.attr.endswith("time") and bool(node.args))
    return num


def test_only_stamps_are_taken_from_the_calendar() -> None:
    found = {str(path.relative_to(SOURCE)): calendar_calls(path) for path in SOURCE.rglob("*.py")}
    assert {name: num for name, num in found.items() if num} == STAMPS


@pytest.mark.parametrize("jump_s", [-86_400 * 365, 86_400 * 365])
def test_a_clock_that_is_set_ends_nothing_and_moves_no_duration(jump_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    lines: list[dict[str, object]] = []
    with parrot(log_request=lambda message, fields: lines.append(dict(fields)), stall_timeout=600.0) as server:
        server.runner.step_s = 0.005
        stream = Stream(server, ignore_eos=True, max_tokens=60)
        assert stream.started.wait(60)
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        events = stream.events()
        assert len(events) == 60 + 2
        assert server.get("/health/live")[0] == 200
        assert server.complete("ab")[1]["created"] == pytest.approx(real() + jump_s, abs=300)
        wait_until(lambda: len(lines) == 2)
        assert all(0 <= float(str(line["e2e_ms"])) < 300_000 for line in lines)
        server.stop()
        assert server.join() == 0
