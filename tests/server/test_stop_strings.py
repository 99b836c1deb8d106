from hypothesis import given
from hypothesis import strategies as st

from server.stop_strings import StopMatcher

SMALL_TEXT = st.text("ab ", max_size=30)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3)


def run(stop: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stop, include_in_output=include)
    text = "".join([matcher.push(piece) for piece in pieces])
    return text + matcher.flush(), matcher.matched


@given(STOPS, SMALL_TEXT, st.lists(st.integers(1, 5), min_size=30, max_size=30), st.booleans())
def test_the_result_does_not_depend_on_how_the_text_was_cut(
    stop: list[str], text: str, sizes: list[int], include: bool
) -> None:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert run(stop, pieces, include) == run(stop, list(text), include)


@given(STOPS, SMALL_TEXT)
def test_the_text_is_a_prefix_without_any_stop_string(stop: list[str], text: str) -> None:
    shown, matched = run(stop, list(text))
    assert text.startswith(shown)
    assert not any(s in shown for s in stop)
    assert (matched is None) == (shown == text and not any(s in text for s in stop))


@given(STOPS, SMALL_TEXT)
def test_what_is_shown_at_once_never_has_to_be_taken_back(stop: list[str], text: str) -> None:
    matcher, final = StopMatcher(stop), run(stop, [text])[0]
    shown = ""
    for character in text:
        shown += matcher.push(character)
        assert final.startswith(shown)


def test_a_stop_string_over_two_pieces_leaks_nothing() -> None:
    matcher = StopMatcher(["beta gamma"])
    assert [matcher.push(p) for p in ["alpha be", "ta", " gam", "ma delta"]] == [
        "alpha ",
        *[""] * 3,
    ]
    assert matcher.matched == "beta gamma"


def test_a_false_start_is_shown_as_soon_as_it_is_one() -> None:
    matcher = StopMatcher(["five s"])
    assert [matcher.push(p) for p in ["four five", " ", "x"]] == ["four ", "", "five x"]


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")


def test_the_stop_string_can_be_part_of_the_output() -> None:
    assert run(["bc"], ["ab", "cd"], include=True) == ("abc", "bc")
