"""Cases on the small real model, over a socket, as a user would meet them."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cases.catalogue import body_of, catalogue, exchange
from tests.cases.real_server import CHAT, CONTEXT_LENGTH, NAMES, RealServer, text_of

pytestmark = pytest.mark.model

MAX_PROBE_S = 1.0
"""Generous: it is 0.25 s on a machine that does nothing else."""


def body(case_id: str, **changes: Any) -> dict[str, Any]:
    return body_of(case_id, NAMES, **changes)


def content(real: RealServer, asked: dict[str, Any]) -> str:
    text: str = real.chat(asked)["message"]["content"]
    return text


@pytest.mark.case("ST-06")
def test_completions_stop_alike_streamed_and_whole(real: RealServer) -> None:
    asked = body("ST-06")
    free = real.post("/v1/completions", asked | {"stream": False, "stop": None})
    text = free["choices"][0]["text"]
    stop = text[len(text) // 2 :][:6]
    whole = real.post("/v1/completions", asked | {"stream": False, "stop": stop})["choices"][0]
    chunks = real.chunks(asked | {"stop": [stop]}, "/v1/completions")
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == whole["text"]
    assert (whole["text"], whole["finish_reason"]) == (text[: text.index(stop)], "stop")


@pytest.mark.case("ST-07")
def test_streamed_usage_is_that_of_the_whole_answer(real: RealServer) -> None:
    asked = body("ST-07", temperature=0)
    chunks = real.chunks(asked | {"stream_options": {"include_usage": True}})
    whole = real.post(CHAT, asked | {"stream": False})["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == whole[name]


@pytest.mark.case("ST-08")
@pytest.mark.case("CX-02")
def test_a_stream_that_fills_the_context_ends_with_length(real: RealServer) -> None:
    messages = [{"role": "user", "content": "word " * (CONTEXT_LENGTH - 60)}]
    asked = body("ST-08", messages=messages, ignore_eos=True)
    chunks = real.chunks(asked | {"stream_options": {"include_usage": True}})
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]
    assert chunks[-1]["usage"]["total_tokens"] == CONTEXT_LENGTH


@pytest.mark.case("ST-10")
@pytest.mark.parametrize("num_chunks", [0, 1, 4])
def test_a_client_that_leaves_frees_all_blocks(real: RealServer, num_chunks: int) -> None:
    asked = body("ST-10", ignore_eos=True)
    with real.http.stream("POST", CHAT, json=asked) as response:
        lines = response.iter_lines()
        for _ in range(num_chunks):
            next(line for line in lines if line.startswith("data: {"))
    real.wait_until_idle(within_s=2)


@pytest.mark.case("CX-04")
def test_the_context_that_is_listed_is_the_one_that_is_enforced(real: RealServer) -> None:
    (listed,) = real.http.get("/v1/models").json()["data"]
    length = listed["max_model_len"]
    assert length == CONTEXT_LENGTH
    statuses = [
        real.http.post("/v1/completions", json={"prompt": [5] * n, "max_tokens": 1}).status_code
        for n in (length - 1, length, length + 1)
    ]
    assert statuses == [200, 400, 400]


@pytest.mark.case("TP-04")
@pytest.mark.case("TP-11")
@pytest.mark.parametrize("case_id", ["TP-04", "TP-11"])
def test_parts_give_the_answer_of_their_text(real: RealServer, case_id: str) -> None:
    asked = body(case_id)
    texts = [
        [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]
        for m in asked["messages"]
    ]
    as_parts = [m | {"content": t} for m, t in zip(asked["messages"], texts, strict=True)]
    as_text = [m | {"content": t[0]["text"]} for m, t in zip(as_parts, texts, strict=True)]
    answers = [real.post(CHAT, asked | {"messages": m}) for m in (as_text, as_parts)]
    first, second = ((a["choices"], a["usage"]["prompt_tokens"]) for a in answers)
    assert first == second


@pytest.mark.case("PA-01")
@pytest.mark.case("PA-06")
def test_everything_that_is_nearly_greedy_is_greedy(real: RealServer) -> None:
    case = catalogue()["PA-01"]
    texts = {
        content(real, json.loads(exchange(case, index, NAMES).content))
        for index in range(len(case.variants))
    }
    texts.add(content(real, body("PA-01", temperature=1.5, top_k=1, seed=3)))
    assert len(texts) == 1
    assert texts != {""}


@pytest.mark.case("PA-08")
def test_max_completion_tokens_ends_an_answer(real: RealServer) -> None:
    answer = real.post(CHAT, body("PA-08", ignore_eos=True))
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.case("PA-14")
def test_a_bias_forbids_and_forces_tokens(real: RealServer) -> None:
    asked = body("PA-14", temperature=0, max_tokens=1, logit_bias=None)
    greedy = content(real, asked)
    (greedy_id,) = real.post("/tokenize", {"prompt": greedy})["tokens"]
    (forced_id,) = real.post("/tokenize", {"prompt": "zebra"})["tokens"][:1]
    forced = real.post("/detokenize", {"tokens": [forced_id]})["prompt"]
    assert content(real, asked | {"logit_bias": {str(greedy_id): -100}}) != greedy
    assert content(real, asked | {"logit_bias": {str(forced_id): 100}}) == forced


@pytest.mark.case("PA-15")
def test_one_seed_gives_one_text_with_a_cold_and_a_warm_cache(real: RealServer) -> None:
    asked = body("PA-15", max_tokens=24)
    cold = content(real, asked | {"cache_salt": "cold"})
    assert {content(real, asked | {"cache_salt": "warm"}) for _ in range(3)} == {cold}
    assert content(real, asked | {"seed": 43}) != cold
    assert content(real, asked | {"seed": None}) != content(real, asked | {"seed": None})


@pytest.mark.case("ST-12")
def test_what_a_client_that_left_had_computed_is_a_hit(real: RealServer) -> None:
    history = [{"role": "user", "content": "The sea was calm that night. " * 25}]
    asked = {"model": NAMES.model, "messages": history, "temperature": 0, "ignore_eos": True}
    with real.http.stream("POST", CHAT, json=asked | {"stream": True}) as response:
        data = (line for line in response.iter_lines() if line.startswith("data: {"))
        said = text_of([json.loads(next(data)[6:]) for _ in range(12)])
    real.wait_until_idle()
    more = [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    again = asked | {"messages": history + more, "max_tokens": 16}
    hit = real.post(CHAT, again)
    miss = real.post(CHAT, again | {"cache_salt": "nobody had this"})
    assert hit["choices"] == miss["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (hit, miss)]
    assert cached[0] > 100 and cached[0] % 16 == 0 and cached[1] == 0


@pytest.mark.case("CC-11")
@pytest.mark.parametrize("text", ["a b " * 40_000, "x" * 2_000_000])
def test_probes_answer_beside_a_huge_prompt(real: RealServer, text: str) -> None:
    asked = {"messages": [{"role": "user", "content": text}]}
    slowest_s = 0.0
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(real.http.post, CHAT, json=asked)
        while not sent.done():
            began_s = time.monotonic()
            assert real.http.get("/live").status_code == 200
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            time.sleep(0.02)
    assert sent.result().status_code == 400
    assert slowest_s < MAX_PROBE_S


@pytest.mark.case("RS-01")
def test_requests_of_all_lengths_leave_nothing_behind(real: RealServer) -> None:
    for number in range(20):
        prompt = [(number * 31 + i) % 40_000 for i in range(1 + number * 37 % 200)]
        asked = {"prompt": prompt, "max_tokens": 1 + number % 4, "n": 1 + (number % 10 == 0)}
        if number % 5:
            real.post("/v1/completions", asked)
        else:
            with real.http.stream("POST", "/v1/completions", json=asked | {"stream": True}):
                pass
    real.wait_until_idle(within_s=3)
