from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.reasoning import Answer, ReasoningSplitter, Thought, starts_inside

FRAGMENTS = ["<think>", "</think>", "<", "</", "think>", "hm", " ", "\n", "ok", "é"]


def split(*pieces: str, inside: bool = False) -> tuple[str, str]:
    """Thought and answer."""
    splitter = ReasoningSplitter(starts_inside=inside)
    parts = [part for piece in pieces for part in splitter.feed(piece)] + splitter.finish()
    for part in parts:
        if isinstance(part, Answer):
            assert "".join(pieces)[part.start : part.start + len(part.text)] == part.text
    return (
        "".join(part.text for part in parts if isinstance(part, Thought)),
        "".join(part.text for part in parts if isinstance(part, Answer)),
    )


@pytest.mark.parametrize(
    ("text", "inside", "thought", "answer"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("\n <think>a < b</thin c</think>yes </think>", False, "a < b</thin c", "yes </think>"),
        ("hm\n</think>\n\nyes", True, "hm", "yes"),
        ("<think>hm</think>yes", True, "hm", "yes"),
        ("<think></think>\nyes", False, "", "yes"),
        ("yes <think>no</think>", False, "", "yes <think>no</think>"),
        ("  yes", False, "", "  yes"),
        ("<thi", False, "", "<thi"),
        ("<think>cut sho", False, "cut sho", ""),
        ("cut short </th", True, "cut short </th", ""),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_a_thought_is_split_from_the_answer(
    text: str, inside: bool, thought: str, answer: str
) -> None:
    assert split(text, inside=inside) == (thought, answer)
    assert split(*text, inside=inside) == (thought, answer)


@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join),
    inside=st.booleans(),
    size=st.integers(1, 9),
)
def test_any_cut_gives_the_same_split(text: str, inside: bool, size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert split(*pieces, inside=inside) == split(text, inside=inside)


def test_a_thought_streams() -> None:
    splitter = ReasoningSplitter(starts_inside=True)
    assert splitter.feed("a b ") == [Thought("a b")]
    assert splitter.feed("c</") == [Thought(" c")]
    assert splitter.feed("d") == [Thought("</d")]


def test_a_prompt_that_ends_with_the_tag_has_begun_the_thought() -> None:
    assert starts_inside("<|assistant|>\n<think>\n")
    assert not starts_inside("<|user|>\n<think>\n<|assistant|>\n")
    assert not starts_inside("<|assistant|><think>\n\n</think>\n\n")


def test_a_continued_message_tells_whether_it_is_still_thinking() -> None:
    assert starts_inside("…<think>because", "<think>because")
    assert not starts_inside("…<think>a</think>b", "<think>a</think>b")
