"""The modules under the pages, asked directly: numbers as words, times as pixels, messages as a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from tests.browser.fake_server import fake_server
from tests.browser.schedule import BEGIN_NS, MS, Run

pytestmark = pytest.mark.browser

Ask = Callable[..., Any]
SERVER = {"policy": "continuous", "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 8, "sees": "all"}


@pytest.fixture(scope="module")
def ask(browser: Any) -> Iterator[Ask]:
    """Runs a function of JavaScript, given all modules that it may need, and an argument."""
    with fake_server() as server:
        page = browser.new_page()
        page.goto(f"{server.url}/ui/r/nobody")
        names = ("format", "timeline", "view", "model", "blockmap", "words", "span", "targets", "pace")
        loads = ", ".join(f"import('/ui/{name}.js')" for name in names)

        def run(function: str, argument: Any = None) -> Any:
            body = f"async arg => ({function})(Object.assign({{}}, ...await Promise.all([{loads}])), arg)"
            return page.evaluate(body, argument)

        yield run
        page.close()


def request(request_id: int, slot: int, **fields: Any) -> dict[str, Any]:
    told = dict.fromkeys(("num_cached_tokens", "finish_ns", "finish_reason", "first_token_ns", "max_gap_ns", "blame"))
    counts = {"num_prompt_tokens": 40, "num_output_tokens": 0, "num_preemptions": 0}
    times = {"arrival_ns": BEGIN_NS, "admit_ns": BEGIN_NS}
    return (
        told | counts | times | {"id": request_id, "name": f"r{request_id}", "state": "running", "slot": slot} | fields
    )


def step(step_id: int, rows: list[list[int]], *, held: int = 0, padded: int = 0, took_ns: int = 20 * MS) -> list[Any]:
    end_ns = BEGIN_NS + step_id * 20 * MS
    flat = [number for row in rows for number in row]
    return [step_id, end_ns - took_ns, end_ns, took_ns, 0, 0, padded, len(rows), 0, held, 4, 0, 0, flat]


def message(steps: list[Any], requests: list[Any], **extra: Any) -> dict[str, Any]:
    now_ns = max((one[2] for one in steps), default=BEGIN_NS)
    return {"full": False, "now_ns": now_ns, "uptime_s": 1.0, "steps": steps, "requests": requests} | extra


KINDS = """({LiveModel}, messages) => {
    const model = new LiveModel();
    for (const message of messages) model.take(message);
    const kinds = step => Object.fromEntries(step.cells.map(cell => [cell.slot, cell.kind]));
    return model.timeline.steps.map(kinds);
}"""


@pytest.mark.parametrize(
    ("ns", "words"),
    [
        (0, "0 ms"),
        (850_000, "850 µs"),
        (999_600, "1.00 ms"),
        (18_240_000, "18.2 ms"),
        (1_239_000_000, "1.24 s"),
        (59_960_000_000, "1 min 00 s"),
        (125_000_000_000, "2 min 05 s"),
        (11_520_000_000_000, "3 h 12 min"),
        (-5_000_000_000, "−5.00 s"),
        (None, "–"),
    ],
)
def test_durations_have_three_figures(ask: Ask, ns: int | None, words: str) -> None:
    assert ask("({duration}, ns) => duration(ns)", ns) == words


def test_numbers_shares_and_ticks_are_plain(ask: Ask) -> None:
    assert ask("({count}) => [count(1234567), count(null)]") == ["1,234,567", "–"]
    assert ask("({percent}) => [0, 0.0001, 0.0042, 0.713, 1].map(percent)") == [
        "0 %",
        "< 0.1 %",
        "0.4 %",
        "71 %",
        "100 %",
    ]
    assert ask("({tick}) => [5e9, 2.5e9, 2e8, 1e11, -6e10].map(tick)") == ["5 s", "2.5 s", "200 ms", "100 s", "−60 s"]
    assert ask("({ticks}) => ticks(0, 430, 2)") == [0, 200, 400]
    assert ask("({ticks}) => ticks(-30, 0, 6)") == [-30, -25, -20, -15, -10, -5, 0]
    assert ask("({ticks}) => ticks(3, 3, 4)") == []


def test_the_rows_of_a_step_say_what_each_slot_did(ask: Ask) -> None:
    first_ns = BEGIN_NS + 2 * 20 * MS
    requests = [request(1, 0, first_token_ns=first_ns), request(2, 1)]
    steps = [step(1, [[0, 1, 30, 0]]), step(2, [[0, 1, 10, 1]]), step(3, [[0, 1, 1, 1], [1, 2, 40, 0]])]
    steps += [step(4, [[1, 2, 8, 0]]), step(5, [[0, 1, 12, 0]]), step(6, [[0, 1, 3, 1]])]
    kinds = ask(KINDS, [message(steps, requests, full=True, server=SERVER)])
    assert [one["0"] for one in kinds] == ["prefill", "prefill", "decode", "skipped", "recompute", "recompute"]
    assert [one.get("1") for one in kinds] == [None, None, "prefill", "prefill", "skipped", "skipped"]


LONGEST = """({LiveModel}, messages) => {
    const model = new LiveModel();
    for (const message of messages) model.take(message);
    return [...model.requests.values()].map(request => [model.itlP99(request), model.longestGap(request)]);
}"""


def test_no_gap_is_longer_than_the_longest(ask: Ask) -> None:
    """The stream tells the longest gap of a request that runs once a second only; the page has seen its steps since."""
    told = request(1, 0, first_token_ns=BEGIN_NS + 20 * MS, max_gap_ns=20 * MS, num_output_tokens=3)
    decode = [[0, 1, 1, 1]]
    begun = message(
        [step(1, [[0, 1, 40, 1]]), step(2, decode), step(3, decode)], [told], full=True, server=SERVER, waiting=[]
    )
    late = message([step(8, decode)], [])
    assert ask(LONGEST, [begun]) == [[20 * MS, 20 * MS]]
    assert ask(LONGEST, [begun, late]) == [[100 * MS, 100 * MS]]
    other = request(1, 0, first_token_ns=BEGIN_NS + 20 * MS, max_gap_ns=300 * MS, num_output_tokens=9)
    assert ask(LONGEST, [begun, message([], [other])]) == [[None, 300 * MS]]  # not all of its tokens were seen
    assert ask(LONGEST, [message([], [request(2, 1)], full=True, server=SERVER)]) == [[None, None]]


PACE = """({StepPace}, [steps, asked]) => {
    const pace = new StepPace();
    for (const [numRows, took] of steps) pace.addDecode(numRows, took);
    return asked.map(([numRows, took]) => pace.isSlow(numRows, took));
}"""


def test_a_step_is_slow_beside_steps_with_about_as_many_rows(ask: Ask) -> None:
    ones, many = [[1, 10]] * 16, [[32, 40], [40, 44]] * 8
    assert ask(PACE, [[], [[1, 1e12]]]) == [False]
    assert ask(PACE, [ones + many, [[1, 20], [1, 21], [33, 80], [33, 89]]]) == [False, True, False, True]
    assert ask(PACE, [ones, [[8, 20], [8, 21]]]) == [False, True]  # no step of that size yet
    assert ask(PACE, [ones[1:], [[1, 21]]]) == [False]  # too few to know


def test_a_finished_member_holds_its_slot_until_the_batch_ends(ask: Ask) -> None:
    end_ns = BEGIN_NS + 2 * 20 * MS
    ended = request(1, 0, state="finished", finish_ns=end_ns, first_token_ns=BEGIN_NS + 20 * MS)
    other = request(2, 1, first_token_ns=BEGIN_NS + 20 * MS)
    both = [[0, 1, 1, 1], [1, 2, 1, 1]]
    steps = [
        step(1, both),
        step(2, both),
        step(3, both[1:], held=1),
        step(4, both[1:], held=1),
        step(5, [[0, 3, 9, 0]]),
    ]
    kinds = ask(KINDS, [message(steps, [ended, other, request(3, 0)], full=True, server=SERVER)])
    assert [one.get("0") for one in kinds] == ["prefill", "decode", "waste", "waste", "prefill"]
    padded = step(3, [[1, 2, 1, 1], [0, 1, 1, 0]], padded=1, held=1)
    kinds = ask(KINDS, [message([*steps[:2], padded], [ended, other], full=True, server=SERVER)])
    assert kinds[2] == {"0": "waste", "1": "decode"}


def test_a_step_of_more_than_twice_the_median_is_slow(ask: Ask) -> None:
    rows = [[0, 1, 1, 1]]
    steps = [step(i, rows) for i in range(1, 40)] + [step(43, rows, took_ns=50 * MS), step(44, rows)]
    kinds = ask(KINDS, [message(steps, [request(1, 0, first_token_ns=BEGIN_NS)], full=True, server=SERVER)])
    assert [one["0"] for one in kinds[-3:]] == ["decode", "slow", "decode"]


def test_tokens_are_counted_in_the_second_of_their_step(ask: Ask) -> None:
    run = Run()
    messages = [run.full(300) | {"more": True}, run.message(300) | {"now_ns": run.now_ns + 10**9}, run.message(10)]
    told = [one for one in messages for one in one["steps"]]
    wanted: dict[int, int] = {}
    for one in told:
        second = one[2] // 10**9
        wanted[second] = wanted.get(second, 0) + sum(one[-1][3::4])
    counted = ask(
        """({LiveModel}, messages) => {
            const model = new LiveModel();
            for (const message of messages) model.take(message);
            return model.tokensPerSecond;
        }""",
        messages,
    )
    assert {point["ns"] // 10**9: point["value"] for point in counted if point["value"]} == wanted
    seconds = [point["ns"] // 10**9 for point in counted]
    assert seconds == list(range(seconds[0], seconds[-1] + 1))


def test_runs_join_equal_steps_and_what_is_old_is_forgotten(ask: Ask) -> None:
    found = ask(
        """({Timeline}) => {
            const timeline = new Timeline(2, 100);
            const cell = (slot, request, kind) => ({slot, request, tokens: 1, outputs: 1, kind});
            for (let i = 0; i < 200; i += 1) {
                const cells = [cell(0, i < 150 ? 1 : 2, i % 50 === 49 ? "slow" : "decode")];
                timeline.add({id: i, begin_ns: i * 10, end_ns: i * 10 + 10, cells});
            }
            const runs = timeline.runsBetween(0, 140, 160).map(run => [run.kind, run.request, run.first, run.last]);
            const stays = timeline.staysBetween(0, 140, 160).map(stay => [stay.request, stay.first, stay.last]);
            return {start: timeline.start, end: timeline.end, runs, stays, at: timeline.positionAt(1555),
                early: timeline.positionAt(-1), cell: timeline.cell(151, 0).request, none: timeline.cell(151, 1)};
        }"""
    )
    assert found["end"] == 200
    assert 75 <= found["start"] <= 100
    assert found["runs"] == [["decode", 1, 100, 148], ["slow", 1, 149, 149], ["decode", 2, 150, 198]]
    assert found["stays"] == [[1, 0, 149], [2, 150, 199]]
    assert (found["at"], found["cell"], found.get("none")) == (155, 2, None)
    assert found["early"] == found["start"] - 1


def test_an_axis_maps_steps_and_times_both_ways(ask: Ask) -> None:
    found = ask(
        """({Timeline, View}) => {
            const timeline = new Timeline(1);
            const step = i => ({id: 1000 + i, begin_ns: i * 1e7, end_ns: i * 1e7 + 8e6, cells: []});
            for (let i = 0; i < 100; i += 1) timeline.add(step(i));
            const view = new View(timeline, {span_ns: 5e8, spanSteps: 50});
            const result = {};
            for (const mode of ["time", "steps"]) {
                view.show(mode);
                const axis = view.axis(100, 500);
                const middle = position => axis.ofStep(position, timeline.at(position)).reduce((a, b) => (a + b) / 2);
                result[mode] = {
                    there: [60, 75, 99].every(position => axis.positionAt(middle(position)) === position),
                    last: axis.ofStep(99, timeline.at(99)),
                    time: axis.ofTime(timeline.at(75).begin_ns) - axis.ofStep(75, timeline.at(75))[0],
                    range: [axis.first, axis.last],
                };
            }
            view.show("time");
            view.pause(true);
            view.zoom(0.5, 0.25);
            const held = view.domain;
            view.pan(-100);
            return {...result, held, left: view.domain.to, ends: view.newest};
        }"""
    )
    for mode in ("time", "steps"):
        assert found[mode]["there"]
        assert found[mode]["last"][1] == pytest.approx(600)
        assert found[mode]["time"] == pytest.approx(0, abs=1e-6)
    assert found["steps"]["range"] == [50, 99]
    width = found["held"]["to"] - found["held"]["from"]
    assert width == pytest.approx(2.5e8)
    assert found["held"]["from"] + width * 0.25 == pytest.approx(998e6 - 5e8 * 0.75)
    assert found["left"] == pytest.approx(2.5e8 / 4)


CLOCK = """({Timeline, View}, [width, span_ns]) => {
    const timeline = new Timeline(1);
    timeline.now_ns = 700e9;
    timeline.offset_ms = new Date(2026, 11, 1, 14, 2, 40, 250).getTime() - 700e3;
    for (let i = 0; i < 70; i += 1) timeline.add({id: i, begin_ns: i * 1e10, end_ns: i * 1e10 + 9e9, cells: []});
    const view = new View(timeline, {span_ns});
    const told = [view.axis(0, width).labels()];
    view.pause(true);
    told.push(view.axis(0, width).labels());
    timeline.now_ns = 1000e9;
    timeline.offset_ms += 5e3;
    told.push(view.axis(0, width).labels());
    view.pan(-10);
    told.push(view.axis(0, width).labels());
    return told;
}"""


@pytest.mark.parametrize(
    ("width", "span_ns", "live", "held", "back"),
    [
        (600, 30e9, ["−30 s", "now"], ["14:02:10", "14:02:40"], ["13:57:10", "13:57:40"]),
        (300, 30e9, ["−30 s", "now"], ["14:02:10", "14:02:40"], ["13:57:10", "13:57:40"]),
        (600, 37e9, ["−30 s", "now"], ["14:02:03", "14:02:40"], ["13:55:53", "13:56:30"]),
        (600, 0.2e9, ["−200 ms", "now"], ["14:02:40.050", "14:02:40.250"], ["14:02:38.050", "14:02:38.250"]),
    ],
)
def test_what_is_not_live_says_at_both_ends_when_it_was(
    ask: Ask, width: int, span_ns: float, live: list[str], held: list[str], back: list[str]
) -> None:
    """By the clock, which does not move with later messages; the words stand apart."""
    told = ask(CLOCK, [width, span_ns])
    ends = [[label["text"] for label in (labels[0], labels[-1])] for labels in told]
    assert ends == [live, held, held, back]
    for labels in told[1:]:
        places = [label["x"] for label in labels]
        assert (places[0], places[-1]) == (pytest.approx(0), pytest.approx(width))
        assert min(after - before for before, after in pairwise(places)) > 80


def test_days_are_told_with_their_zone(browser: Any) -> None:
    with fake_server() as server:
        for zone, words in (
            ("UTC", "14:02:40 UTC"),
            ("Asia/Kolkata", "19:32:40 UTC+05:30"),
            ("America/New_York", "09:02:40 UTC−05:00"),
        ):
            page = browser.new_page(timezone_id=zone)
            page.goto(f"{server.url}/ui/r/nobody")
            told = page.evaluate(
                "async () => (await import('/ui/format.js')).dayAndTime(new Date(Date.UTC(2026, 11, 1, 14, 2, 40)))"
            )
            assert told == f"2026-12-01 {words}"
            page.close()


def test_words_of_an_axis_of_steps_stand_apart(ask: Ask) -> None:
    """Also where few steps have been taken so far, which fill the right end of the axis."""
    found = ask(
        """({Timeline, View}) => [30, 130, 290, 900].map(num => {
            const timeline = new Timeline(1);
            for (let i = 0; i < num; i += 1) timeline.add({id: i, begin_ns: i * 1e7, end_ns: i * 1e7 + 8e6, cells: []});
            const view = new View(timeline);
            view.show("steps");
            return view.axis(58, 750).labels().map(({x}) => x);
        })"""
    )
    for places in found:
        assert places
        assert all(right - left >= 80 for left, right in pairwise(places))


def test_blocks_are_found_under_a_point(ask: Ask) -> None:
    found = ask(
        """({gridOf, blockAt, blockCounts}) => {
            const runs = [["s", 2, -1], ["p", 5, 7], ["f", 93, -1]];
            const grid = gridOf(100, 200, 120);
            const at = (column, line) => blockAt(runs, grid, (column + 0.5) * grid.size, (line + 0.5) * grid.size);
            return {grid, counts: blockCounts(runs), first: at(0, 0), owned: at(3, 0), none: at(grid.columns, 0),
                big: gridOf(100000, 300, 150)};
        }"""
    )
    grid = found["grid"]
    assert -(-100 // grid["columns"]) * grid["size"] <= 120
    assert found["counts"] == {"s": 2, "p": 5, "f": 93, "e": 0}
    assert found["first"] == {"block": 0, "kind": "s", "owners": [], "numOwners": 0}
    assert found["owned"] == {"block": 3, "kind": "p", "owners": [7], "numOwners": 1}
    assert found["none"] is None
    assert found["big"]["size"] == 1


def test_a_block_names_who_shares_it_and_counts_who_may_not_be_seen(ask: Ask) -> None:
    requests = [request(number, number) for number in (4, 7, 9)]
    said = ask(
        """({LiveModel, blockAt, blockWords}, {message, runs}) => {
            const model = new LiveModel();
            model.take(message);
            const grid = {size: 10, columns: 100, numBlocks: runs.length};
            return runs.map((run, i) => blockWords(model, blockAt(runs, grid, 10 * i + 5, 5)));
        }""",
        {
            "message": message([], requests, full=True, server=SERVER, acts=[], dropped=0, tiles=None),
            "runs": [
                ["s", 1, 4, 8, 7, 9],
                ["s", 1, 4, 2, 7],
                ["s", 1, -2, 8, 7, -3],
                ["s", 1, -2, 2, -3],
                ["p", 1, 4],
                ["f", 1, -1],
            ],
        },
    )
    assert said == [
        "block 0: shared by 8: r4, r7, r9 and 5 others",
        "block 1: shared by 2: r4 and r7",
        "block 2: shared by 8: r7 and 7 others",
        "block 3: shared by 2 requests",
        "block 4: private, r4",
        "block 5: free",
    ]


def test_the_span_of_a_life_stays_within_it(ask: Ask) -> None:
    found = ask(
        """({Span}) => {
            const span = new Span();
            span.setTotal(1e9);
            const ends = () => [span.from, span.to];
            const whole = ends();
            span.zoom(0.5, 0);
            span.pan(-3);
            const left = ends();
            span.pan(9);
            const right = ends();
            span.setTotal(2e9);
            const kept = ends();
            span.zoom(1e9);
            const all = ends();
            span.setTotal(3e9);
            return {whole, left, right, kept, all, grown: ends()};
        }"""
    )
    assert found["whole"] == [0, 1e9]
    assert found["left"] == [0, 5e8]
    assert found["right"] == found["kept"] == [5e8, 1e9]
    assert found["all"] == [0, 2e9]
    assert found["grown"] == [0, 3e9]


GAPS = """({LiveModel}, messages) => {
    const model = new LiveModel();
    for (const message of messages) model.take(message);
    return [...model.requests.values()].map(request => model.itlP99(request));
}"""


def test_gaps_of_a_request_are_told_where_all_its_tokens_were_seen(ask: Ask) -> None:
    ends_ns = [BEGIN_NS + i * 20 * MS for i in range(5)]
    steps = [step(i, [[0, 1, 1, 1], [1, 2, 1, 1]]) for i in (1, 2, 4)]
    seen = request(1, 0, num_output_tokens=3, finish_ns=ends_ns[4], first_token_ns=ends_ns[1])
    older = request(2, 1, num_output_tokens=9, first_token_ns=BEGIN_NS - MS)
    new = request(3, 2, num_output_tokens=0)
    first = message(steps, [seen, older, new], full=True, server=SERVER)
    assert ask(GAPS, [first]) == [40 * MS, None, None]
    another = message([step(5, [[1, 2, 1, 1], [2, 3, 9, 1]])], [request(3, 2, num_output_tokens=1)])
    assert ask(GAPS, [first, another]) == [40 * MS, None, None]
    last = message([step(6, [[2, 3, 1, 1]])], [request(3, 2, num_output_tokens=2)])
    assert ask(GAPS, [first, another, last]) == [40 * MS, None, 20 * MS]


def test_steps_that_come_after_the_end_was_told_still_count(ask: Ask) -> None:
    ended = request(1, 0, num_output_tokens=3, finish_ns=BEGIN_NS + 60 * MS, first_token_ns=BEGIN_NS + 20 * MS)
    steps = [step(i, [[0, 1, 1, 1]]) for i in (1, 2, 3)]
    first = message(steps[:1], [ended], full=True, server=SERVER)
    assert ask(GAPS, [first]) == [None]
    assert ask(GAPS, [first, message(steps[1:], [])]) == [20 * MS]


@pytest.mark.parametrize(
    ("fields", "targets", "score"),
    [
        ({}, (250, 60), "100 %"),
        ({}, (249, None), "0 %"),
        ({}, (None, 59), "0 %"),
        ({"finish_reason": "error"}, (250, 60), "0 %"),
        ({"finish_reason": "abort"}, (250, 60), "–"),
        ({"name": None}, (250, 60), "–"),
        ({"finish_ns": None}, (250, 60), "–"),
        ({"first_token_ns": None, "num_output_tokens": 0}, (250, 60), "0 %"),
        ({"first_token_ns": None}, (250, 60), "–"),
    ],
)
def test_targets_judge_requests_that_are_over(
    ask: Ask, fields: dict[str, Any], targets: tuple[int | None, int | None], score: str
) -> None:
    times = {"first_token_ns": BEGIN_NS + 250 * MS, "finish_ns": BEGIN_NS + 900 * MS, "max_gap_ns": 60 * MS}
    judged = request(1, 0, num_output_tokens=9, finish_reason="stop", **times) | fields
    function = """({scoreOf, scoreText}, [request, [ttft_ms, itl_ms], now_ns]) =>
        scoreText(scoreOf([request], {ttft_ms, itl_ms}, now_ns))"""
    assert ask(function, [judged, targets, BEGIN_NS + 10**9]) == score
    assert ask(function, [judged, targets, BEGIN_NS + 62 * 10**9]) == "–"


def test_a_share_that_is_not_whole_is_never_said_to_be(ask: Ask) -> None:
    function = "({scoreText}, scores) => scores.map(([kept, judged]) => scoreText({kept, judged}))"
    assert ask(function, [[999, 1000], [1000, 1000], [1, 3], [0, 5]]) == ["> 99 %", "100 %", "33 %", "0 %"]


PAST = """({LiveModel}, [whole, messages, past]) => {
    const oracle = new LiveModel();
    oracle.take(whole);
    const model = new LiveModel();
    for (const message of messages) model.take(message);
    const marked = model.timeline.at(0);
    for (const message of past) model.takePast(message);
    const told = one => ({
        steps: one.timeline.steps.map(({id, begin_ns, end_ns, cells}) => [id, begin_ns, end_ns, cells]),
        runs: one.timeline.runs.map(runs => runs.map(({request, kind, begin_ns, end_ns, tokens}) =>
            [request, kind, begin_ns, end_ns, tokens])),
        stays: one.timeline.stays.map(stays => stays.map(stay => [stay.request, stay.last - stay.first, stay.end_ns])),
        requests: [...one.requests.keys()],
        tokens: one.tokensPerSecond, running: one.running, acts: one.acts, firsts: one.firstTokens,
    });
    return {wanted: told(oracle), found: told(model), start: model.timeline.start,
        stays: model.timeline.at(0) === marked, before: model.timeline.at(-1).id};
}"""


def test_the_past_goes_before_what_is_there_and_positions_stay(ask: Ask) -> None:
    told = request(1, 0, first_token_ns=BEGIN_NS + 20 * MS)
    other = request(2, 1, first_token_ns=BEGIN_NS + 60 * MS, finish_ns=BEGIN_NS + 80 * MS, state="finished")
    steps = [step(1, [[0, 1, 40, 1]])] + [
        step(i, [[0, 1, 1, 1], *([[1, 2, 1, 1]] * (i in (3, 4)))]) for i in range(2, 9)
    ]
    acts = [[BEGIN_NS, i, f"step {i}"] for i in range(1, 9)]
    full = {"full": True, "server": SERVER, "waiting": []}
    whole = message(steps, [other, told], acts=acts, **full)
    late = [message(steps[6:], [told], acts=acts[6:], **full)]
    past = [message(steps[3:6], [other, told], acts=acts[3:6]), message(steps[:4], [other, told], acts=acts[:3])]
    found = ask(PAST, [whole, late, past])
    assert (found["start"], found["stays"], found["before"]) == (-6, True, 6)
    for what in ("steps", "runs", "stays", "requests", "tokens", "acts", "firsts"):
        assert sorted(found["found"][what], key=str) == sorted(found["wanted"][what], key=str), what


def test_a_row_on_its_way_when_its_request_ended_is_waste(ask: Ask) -> None:
    over = request(1, 0, first_token_ns=BEGIN_NS + 20 * MS, finish_ns=BEGIN_NS + 40 * MS, state="finished")
    rows = [step(1, [[0, 1, 40, 1]]), step(2, [[0, 1, 1, 1]]), step(3, [[0, 1, 1, 0]])]
    kinds = ask(KINDS, [message(rows, [over], full=True, server=SERVER, waiting=[])])
    assert [kind["0"] for kind in kinds] == ["prefill", "decode", "waste"]
