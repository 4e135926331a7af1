"""Stop strings against a search in the whole text, whatever the pieces (B010)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.engine.stop_strings import StopChecker


def feed(checker: StopChecker, pieces: list[str]) -> list[str]:
    shown = []
    for piece in pieces:
        shown.append(checker.push(piece))
        if checker.matched is not None:
            return shown
    return [*shown, checker.flush()]


def first_match(text: str, stop: list[str]) -> tuple[int, str] | None:
    """By definition: the shortest prefix of the text that ends with a stop string, and the longest such string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            return end, max(found, key=len)
    return None


@settings(max_examples=500, deadline=None)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 20), max_size=6),
    st.booleans(),
)
def test_equals_search_in_whole_text(text: str, stop: list[str], cuts: list[int], include: bool) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    checker = StopChecker(stop, include=include)
    shown = "".join(feed(checker, [text[a:b] for a, b in pairwise(bounds)]))
    match = first_match(text, stop)
    if match is None:
        assert (shown, checker.matched) == (text, None)
    else:
        end, string = match
        assert checker.matched == string
        assert shown == text[: end if include else end - len(string)]


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
def test_nothing_is_held_back_without_need(text: str, stop: list[str]) -> None:
    """After each character exactly the longest end of the text that begins a stop string waits."""
    checker = StopChecker(stop)
    shown = ""
    for i, char in enumerate(text, start=1):
        shown += checker.push(char)
        if checker.matched is not None:
            return
        begun = [k for k in range(i + 1) if any(s.startswith(text[i - k : i]) for s in stop)]
        assert shown == text[: i - max(begun)]


@pytest.mark.parametrize(
    ("stop", "want", "matched"),
    [
        (["STOP"], ["x", "y", "", "", "", ""], "STOP"),
        (["STOQ"], ["x", "y", "", "", "", "STOP", "z", ""], None),
        (["yS", "STOP"], ["x", "", ""], "yS"),
    ],
)
def test_streamed_pieces(stop: list[str], want: list[str], matched: str | None) -> None:
    checker = StopChecker(stop)
    assert feed(checker, list("xySTOPz")) == want
    assert checker.matched == matched


def test_match_that_may_not_stop_is_plain_text() -> None:
    checker = StopChecker(["ab"])
    assert checker.push("ab", can_stop=False) == "ab"
    assert checker.push("cab") == "c"
    assert checker.matched == "ab"


def test_included_stop_string_is_shown_at_once() -> None:
    checker = StopChecker(["STOP"], include=True)
    assert feed(checker, list("xSTOPz")) == ["x", "S", "T", "O", "P"]
