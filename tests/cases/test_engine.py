"""Cases about blocks, prefixes and aborts: the real scheduler over scripted pages, and the real
engine with a tiny random model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.bundle import Bundle
from scheduler.messages import GenerationRequest
from tests.engine_rig import greedy_with_logprobs, serve, serve_alone
from tests.fakes import Rig, expected_tokens, make_request, make_rig
from tests.loaded_model import LoadedModel, load_model

B = 16
"""Tokens of a block of the real engine."""


@pytest.fixture(scope="module")
def model(tiny_bundle: Bundle) -> LoadedModel:
    return load_model(tiny_bundle, "int8", num_blocks=64)


def prompt(length: int, start: int = 3) -> tuple[int, ...]:
    return tuple((start + 7 * i) % 60 for i in range(length))


@pytest.mark.case("CC-01")
@pytest.mark.parametrize("length", [B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 7 * B + 3])
def test_a_prefix_hit_gives_the_text_of_a_miss_at_every_border(
    model: LoadedModel, length: int
) -> None:
    first = GenerationRequest("first", prompt(length), greedy_with_logprobs(8))
    same = replace(first, request_id="same")
    other = replace(first, request_id="other", prompt_token_ids=prompt(length - 5) + prompt(9, 1))
    shorter = replace(first, request_id="shorter", prompt_token_ids=prompt(max(1, length - B)))
    replies = serve(model, {0: [first], 50: [same, other, shorter]}).replies
    for request in (first, same, other, shorter):
        name, num_tokens = request.request_id, len(request.prompt_token_ids)
        alone = serve_alone(model, replace(request, cache_salt=f"alone {name} {length}"))
        assert replies[name].content == alone.content
        assert alone.num_cached_tokens == 0
        assert replies[name].num_cached_tokens % B == 0
        assert replies[name].num_cached_tokens < num_tokens
    assert replies["same"].num_cached_tokens == (length - 1) // B * B


def run_until(rig: Rig, request_id: str, num_tokens: int) -> None:
    while len(rig.tokens(request_id)) < num_tokens:
        rig.step()


@pytest.mark.case("ST-12")
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 9])
def test_what_an_aborted_request_computed_is_reused_up_to_its_last_whole_block(
    num_tokens: int,
) -> None:
    rig = make_rig()
    history = tuple(range(1, 18))
    rig.worker.add(make_request("left", history, max_tokens=20))
    run_until(rig, "left", num_tokens)
    rig.worker.abort("left")
    said = rig.tokens("left")
    again = make_request("again", (*history, *said, 50, 51), max_tokens=5)
    rig.worker.add(again)
    rig.run()
    assert rig.tokens("again") == expected_tokens(again, 64)[0]
    # The newest token was sampled but never computed, so its block is not whole.
    computed = len(history) + len(said) - 1
    assert rig.outputs["again"][0].num_cached_tokens == computed // 4 * 4


@pytest.mark.case("CC-15")
@pytest.mark.parametrize("phase", ["unknown", "queued", "prefill", "decode", "finished", "twice"])
def test_an_abort_in_any_phase_leaves_the_witnesses_alone(phase: str) -> None:
    rig = make_rig(max_num_seqs=3)
    witnesses = [make_request(f"w{i}", (i + 1,) * 9, max_tokens=12) for i in range(2)]
    for request in witnesses:
        rig.worker.add(request)
    rig.step()
    rig.worker.add(make_request("left", (5,) * 40, max_tokens=4 if phase == "finished" else 15))
    steps = {"prefill": 1, "decode": 6, "twice": 6, "finished": 9}
    for _ in range(steps.get(phase, 0)):
        rig.step()
    for name in ["nobody"] if phase == "unknown" else ["left"] * (1 + (phase == "twice")):
        rig.worker.abort(name)
    rig.run()
    for request in witnesses:
        assert rig.tokens(request.request_id) == expected_tokens(request, 64)[0]
    assert rig.scheduler.kv.num_free_blocks == 32
