"""Stop strings across, inside and at the ends of pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystop.engine.stops import StopMatcher


def run(stops: tuple[str, ...], pieces: list[str], *, shows_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, shows_stop=shows_stop)
    shown = ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def reference(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """Character by character: the first stop to be complete, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (("DEFGHIJ",), ["ABC", "DE", "FG", "HIJ", "K"], ("ABC", "DEFGHIJ")),
        (("DE",), ["ABC", "DEF"], ("ABC", "DE")),
        (("DEFG",), ["ABC", "DEF", "X"], ("ABCDEFX", None)),
        (("DEFG",), ["ABCDEF"], ("ABCDEF", None)),
        (("EF", "BC"), ["ABCDEF"], ("A", "BC")),
        (("bc", "abcd"), ["abcd"], ("a", "bc")),
        (("abc", "bc"), ["abc"], ("", "abc")),
        (("aab",), ["aa", "a", "b"], ("a", "aab")),
        (("\n\n",), ["one\n", "two\n", "\nthree"], ("one\ntwo", "\n\n")),
        (("é🙂",), ["caf", "é", "🙂"], ("caf", "é🙂")),
        ((), ["abc"], ("abc", None)),
    ],
)
def test_stop_is_cut_and_the_rest_released(
    stops: tuple[str, ...], pieces: list[str], expected: tuple[str, str | None]
) -> None:
    assert run(stops, pieces) == expected
    text, stop = expected
    assert run(stops, pieces, shows_stop=True) == (text + (stop or ""), stop)


def test_only_a_possible_beginning_is_held() -> None:
    matcher = StopMatcher(("STOP",))
    assert matcher.feed("no ST") == ("no ", None)
    assert matcher.feed("A") == ("STA", None)
    assert matcher.feed("S") == ("", None)
    assert matcher.flush() == "S"
    assert matcher.flush() == ""


def test_nothing_is_held_where_the_stop_is_shown() -> None:
    matcher = StopMatcher(("STOP",), shows_stop=True)
    assert matcher.feed("no ST") == ("no ST", None)
    assert matcher.feed("OPQ") == ("OP", "STOP")
    assert matcher.feed("no ST") == ("no ST", None)
    assert matcher.flush() == ""


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    st.text("abc", max_size=40),
    st.lists(st.integers(0, 40), max_size=12),
)
def test_any_cut_into_pieces_gives_the_same(stops: tuple[str, ...], text: str, cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(borders)]
    shown, stop = reference(stops, text)
    assert run(stops, pieces) == (shown, stop)
    assert run(stops, pieces, shows_stop=True) == (shown + (stop or ""), stop)


@pytest.mark.parametrize(
    ("early", "rest", "expected"),
    [
        ("abXcd", "efXgh", ("abXcdef", "X")),
        ("ab", "Xcd", ("ab", "X")),
        ("abX", "cd", ("abXcd", None)),
    ],
)
def test_stop_that_is_complete_too_early_is_text(early: str, rest: str, expected: tuple[str, str | None]) -> None:
    matcher = StopMatcher(("X",))
    shown = matcher.feed(early, may_stop=False)[0]
    text, stop = matcher.feed(rest)
    assert (shown + text, stop) == expected


def test_stop_that_begins_too_early_may_end_the_text_later() -> None:
    matcher = StopMatcher(("STOP",))
    assert matcher.feed("abST", may_stop=False) == ("ab", None)
    assert matcher.feed("OPcd") == ("", "STOP")
