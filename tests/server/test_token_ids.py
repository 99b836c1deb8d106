"""`return_token_ids` and `truncate_prompt_tokens`, with vLLM's meaning."""

from typing import Any

import pytest

from tests.server.byte_tokenizer import IM_END
from tests.server.http_client import app_of, chat, complete, error_of, events
from tests.server.scripted_client import FakeEngine, saying

HELLO = [*b"hello", IM_END]


def streamed_ids(chunks: list[Any], index: int = 0) -> list[int]:
    choices = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == index]
    return [token_id for choice in choices for token_id in choice.get("token_ids", [])]


def test_a_chat_answer_holds_the_ids_of_its_prompt_and_of_each_choice() -> None:
    engine = FakeEngine(saying("hello"))
    body = chat(app_of(engine), return_token_ids=True, n=2).json()
    assert body["prompt_token_ids"] == list(engine.requests[0].prompt_token_ids)
    assert [choice["token_ids"] for choice in body["choices"]] == [HELLO, HELLO]
    assert len(body["choices"][0]["token_ids"]) * 2 == body["usage"]["completion_tokens"]


@pytest.mark.parametrize("tokens_per_step", [1, 4, 100])
def test_a_chat_stream_has_the_prompts_ids_first_and_every_other_id_once(
    tokens_per_step: int,
) -> None:
    engine = FakeEngine(saying("hello"), tokens_per_step=tokens_per_step)
    chunks = events(chat(app_of(engine), return_token_ids=True, n=2, stream=True))
    assert chunks[0]["prompt_token_ids"] == list(engine.requests[0].prompt_token_ids)
    assert not any("prompt_token_ids" in chunk for chunk in chunks[2:-1])
    assert streamed_ids(chunks) == streamed_ids(chunks, 1) == HELLO


@pytest.mark.parametrize("stream", [True, False])
def test_ids_are_told_also_where_the_text_is_held_back(stream: bool) -> None:
    app = app_of(FakeEngine(saying("ab stop cd")))
    answer = chat(app, return_token_ids=True, stop=" stop", stream=stream)
    ids = streamed_ids(events(answer)) if stream else answer.json()["choices"][0]["token_ids"]
    assert bytes(ids) == b"ab stop"


def test_nobody_who_did_not_ask_gets_ids() -> None:
    app = app_of(FakeEngine(saying("a")))
    for answer in (chat(app), chat(app, stream=True), complete(app), complete(app, stream=True)):
        assert "token_ids" not in answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_completions_have_both_lists_in_each_choice(stream: bool) -> None:
    app = app_of(FakeEngine(saying("hello")))
    answer = complete(app, prompt=["ab", "cd"], return_token_ids=True, stream=stream)
    if not stream:
        choices = answer.json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], [99, 100]]
        assert [choice["token_ids"] for choice in choices] == [HELLO, HELLO]
        return
    chunks = events(answer)
    prompts = [c for chunk in chunks[:-1] for c in chunk["choices"] if "prompt_token_ids" in c]
    assert [(c["index"], c["prompt_token_ids"]) for c in prompts] == [(0, [97, 98]), (1, [99, 100])]
    assert streamed_ids(chunks, 1) == HELLO


def test_completions_that_generate_nothing_still_tell_their_prompt() -> None:
    body = complete(app_of(FakeEngine(saying("a"))), max_tokens=0, return_token_ids=True).json()
    assert body["choices"][0]["prompt_token_ids"] == [97, 98]


@pytest.mark.parametrize(("keep", "seen"), [(3, b"efg"), (7, b"abcdefg"), (100, b"abcdefg")])
def test_a_prompt_is_cut_to_its_last_tokens(keep: int, seen: bytes) -> None:
    engine = FakeEngine(saying("a"))
    body = complete(app_of(engine), prompt="abcdefg", truncate_prompt_tokens=keep, echo=True).json()
    assert bytes(engine.requests[0].prompt_token_ids) == seen
    assert body["choices"][0]["text"] == seen.decode() + "a"
    assert body["usage"]["prompt_tokens"] == len(seen)


def test_minus_one_cuts_to_what_leaves_room_for_the_answer() -> None:
    engine = FakeEngine(saying("a"))
    app = app_of(engine)
    assert complete(app, prompt="x" * 900, truncate_prompt_tokens=-1, max_tokens=12).json()
    long = [{"role": "user", "content": "x" * 900}]
    assert chat(app, messages=long, truncate_prompt_tokens=-1).status_code == 200
    assert [len(r.prompt_token_ids) for r in engine.requests] == [500, 511]


@pytest.mark.parametrize("keep", [0, -2, 513, "3"])
def test_a_length_that_cannot_be_kept_is_named(keep: Any) -> None:
    answer = chat(app_of(FakeEngine(saying("a"))), truncate_prompt_tokens=keep)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "truncate_prompt_tokens")
