import pytest

from engine.sampling_params import SamplingParams
from scheduler.messages import FinishReason
from scheduler.output import end_of
from scheduler.sequence import Sequence
from tests.fakes import greedy, make_request, make_rig

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("params", "new_ids", "expected"),
    [
        (greedy(9), (5,), (1, None)),
        (greedy(2), (5, 6), (2, LENGTH)),
        (greedy(2), (5, 6, 7), (2, LENGTH)),
        (greedy(9, stop_token_ids=(6,)), (5, 6, 7), (2, STOP)),
        (greedy(2, stop_token_ids=(6,)), (5, 6), (2, STOP)),
        (greedy(9, stop_token_ids=(6,), min_tokens=3), (6, 6, 6, 6), (3, STOP)),
        (greedy(99), (5, 6, 7, 8, 9), (5, LENGTH)),
    ],
)
def test_a_sequence_ends_at_the_first_stop_token_or_at_the_limit(
    params: SamplingParams, new_ids: tuple[int, ...], expected: tuple[int, FinishReason | None]
) -> None:
    sequence = Sequence(make_request("r", [1, 2, 3], sampling=params), 0, 0.0, max_model_len=8)
    assert end_of(sequence, new_ids) == expected


def test_logprobs_come_with_every_token_that_asked_for_them() -> None:
    rig = make_rig()
    rig.worker.add(make_request("r", sampling=greedy(3, logprobs=2)))
    rig.worker.add(make_request("plain"))
    rig.run()
    for output in rig.outputs["r"]:
        assert output.logprobs is not None
        (entry,) = output.logprobs
        assert entry.token_id == output.new_token_ids[0] == entry.top[0][0]
        assert len(entry.top) == 2 and entry.logprob == entry.top[0][1]
    assert all(output.logprobs is None for output in rig.outputs["plain"])


def test_prompt_logprobs_are_gathered_over_chunks_and_sent_once_with_the_first_token() -> None:
    prompt = [*range(40)]
    whole = make_rig(max_logits_rows=64, max_num_batched_tokens=64)
    chunked = make_rig(max_logits_rows=8)
    for rig in (whole, chunked):
        rig.worker.add(make_request("r", prompt, 3, prompt_logprobs=1))
        rig.run()
    first, *rest = chunked.outputs["r"]
    assert first.prompt_logprobs == whole.outputs["r"][0].prompt_logprobs
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None
    assert [e.token_id for e in first.prompt_logprobs if e is not None] == prompt[1:]
    assert all(output.prompt_logprobs is None for output in rest)
    assert chunked.runner.batch_sizes == [5] * 8 + [1, 1]


def test_a_nan_ends_only_the_sequence_whose_logits_held_it() -> None:
    rig = make_rig()
    rig.runner.nan_token = 63
    rig.worker.add(make_request("bad", [1, 63, 2]))
    rig.worker.add(make_request("good", [1, 2, 3]))
    rig.run()
    (bad,) = rig.outputs["bad"]
    assert (bad.finish_reason, bad.new_token_ids) == (FinishReason.ERROR, ())
    assert bad.error == "the model returned NaN for this sequence, so no token could be chosen"
    assert rig.reason("good") is LENGTH
    assert rig.scheduler.kv.num_free_blocks == 32


def test_a_nan_among_the_prompts_logprobs_is_an_error_too() -> None:
    rig = make_rig()
    rig.runner.nan_token = 63
    rig.worker.add(make_request("bad", [1, 63, *range(30)], prompt_logprobs=0))
    rig.step()
    assert rig.reason("bad") is FinishReason.ERROR
