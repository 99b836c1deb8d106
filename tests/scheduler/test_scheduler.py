"""Admission, chunks, ends and refusals. Priority and preemption: `test_priority.py`."""

import pytest

from engine.errors import DeviceError
from scheduler.messages import FinishReason
from scheduler.plan import StepResults
from tests.fakes import (
    Rig,
    expected_tokens,
    greedy,
    hashed_next_token,
    make_request,
    make_rig,
    make_scheduler,
)

PROMPT = [5, 6, 7, 8, 9]


def first_tokens(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(make_request("x", prompt, count), 64)[0]


def run_one(rig: Rig, **overrides: object) -> None:
    rig.worker.add(make_request("r", PROMPT, **overrides))  # type: ignore[arg-type]
    rig.run()


def test_a_sequence_alone_yields_max_tokens_tokens_and_leaves_no_block_behind() -> None:
    rig = make_rig()
    run_one(rig, max_tokens=6)
    assert rig.tokens("r") == first_tokens(PROMPT, 6)
    assert rig.reason("r") is FinishReason.LENGTH
    assert rig.scheduler.kv.num_free_blocks == 32


@pytest.mark.parametrize("max_tokens", [4, 9])
def test_a_stop_token_ends_it_is_reported_and_wins_over_length(max_tokens: int) -> None:
    stop = first_tokens(PROMPT, 4)[3]
    rig = make_rig()
    run_one(rig, sampling=greedy(max_tokens, stop_token_ids=(stop,)))
    assert rig.tokens("r") == first_tokens(PROMPT, 4)
    last = rig.outputs["r"][-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, stop)


def test_a_stop_token_before_min_tokens_does_not_end_it() -> None:
    rig = make_rig()
    rig.runner.next_token = lambda prefix: 7
    run_one(rig, sampling=greedy(9, min_tokens=4, stop_token_ids=(7,)))
    assert len(rig.tokens("r")) == 5
    assert rig.tokens("r").index(7) == 4


def test_a_full_context_ends_it_with_length() -> None:
    rig = make_rig(max_model_len=8)
    run_one(rig, max_tokens=100)
    assert rig.tokens("r") == first_tokens(PROMPT, 3)
    assert rig.reason("r") is FinishReason.LENGTH


def test_no_token_is_generated_when_none_is_wanted() -> None:
    rig = make_rig()
    run_one(rig, sampling=greedy(0), prompt_logprobs=2)
    (only,) = rig.outputs["r"]
    assert (only.new_token_ids, only.finish_reason) == ((), FinishReason.LENGTH)
    assert only.prompt_logprobs is not None
    assert [e and e.token_id for e in only.prompt_logprobs] == [None, *PROMPT[1:]]


def test_resumed_tokens_count_and_are_not_reported_again() -> None:
    tokens = first_tokens(PROMPT, 6)
    rig = make_rig()
    run_one(rig, max_tokens=6, resumed_token_ids=tuple(tokens[:4]))
    assert rig.tokens("r") == tokens[4:]


@pytest.mark.parametrize(
    ("request_kwargs", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1] * 65}, "65 tokens exceed the context of 64 tokens"),
        (
            {"prompt": [1] * 10, "max_tokens": 20},
            "10 prompt tokens and up to 20 new ones need 8 blocks of 4 tokens, the KV memory has 7",
        ),
        ({"prompt": [1, -1]}, "must not be negative, got -1"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_numbers(
    request_kwargs: dict[str, list[int]], message: str
) -> None:
    scheduler = make_scheduler(num_blocks=7)
    with pytest.raises(ValueError, match=message):
        scheduler.add(make_request("r", **request_kwargs))  # type: ignore[arg-type]
    assert not scheduler.has_work


def test_the_largest_request_that_fits_runs_to_its_end() -> None:
    rig = make_rig(num_blocks=7)
    rig.worker.add(make_request("r", [1] * 10, 19))
    rig.run()
    assert len(rig.tokens("r")) == 19


def test_an_id_that_is_in_use_is_refused_and_free_again_later() -> None:
    rig = make_rig()
    run_one(rig)
    rig.scheduler.add(make_request("r"))
    with pytest.raises(ValueError, match="'r' is already in use"):
        rig.scheduler.add(make_request("r"))


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    rig = make_rig()
    rig.worker.add(make_request("r", range(50), 2))
    rig.run()
    assert rig.runner.batch_sizes == [32, 18, 1]


def test_a_decode_and_a_chunk_travel_in_one_step() -> None:
    rig = make_rig()
    rig.worker.add(make_request("decode", [1, 2], 20))
    rig.step()
    rig.worker.add(make_request("prompt", range(30), 2))
    for _ in range(3):
        rig.step()
    assert rig.runner.batch_sizes == [2, 17, 15, 2]


def test_what_other_prefills_leave_goes_to_the_first() -> None:
    rig = make_rig()
    rig.worker.add(make_request("long", range(60), 1))
    rig.worker.add(make_request("short", [61, 62, 63], 1))
    rig.step()
    assert rig.runner.batch_sizes == [32]
    assert rig.tokens("short") == first_tokens([61, 62, 63], 1)


def test_the_total_lands_on_a_bucket_by_cutting_the_prompt() -> None:
    rig = make_rig(token_buckets=(1, 8, 16, 32))
    rig.worker.add(make_request("decode", [1, 2, 3], 8))
    rig.step()
    rig.worker.add(make_request("prompt", range(20, 38), 1))
    rig.run()
    assert rig.runner.batch_sizes[:3] == [3, 16, 4]
    assert rig.tokens("prompt") == first_tokens(list(range(20, 38)), 1)


def test_a_cached_prefix_is_not_computed_again_and_is_reported() -> None:
    rig = make_rig()
    for request_id in ("miss", "hit"):
        rig.worker.add(make_request(request_id, range(18), 2))
        rig.run()
    assert rig.runner.batch_sizes == [18, 1, 2, 1]
    assert [rig.outputs[r][0].num_cached_tokens for r in ("miss", "hit")] == [0, 16]
    assert rig.tokens("hit") == rig.tokens("miss")
    assert rig.scheduler.totals.cached_tokens == 16


def test_n_choices_that_arrive_together_compute_their_prompt_once() -> None:
    rig = make_rig()
    for index in range(4):
        rig.worker.add(make_request(f"n{index}", range(41), 3))
    rig.run()
    assert rig.runner.batch_sizes == [32, 9, 4, 4, 3]
    assert {tuple(rig.tokens(f"n{i}")) for i in range(4)} == {
        tuple(first_tokens(list(range(41)), 3))
    }


def test_without_prefix_caching_choices_start_at_once_and_share_nothing() -> None:
    rig = make_rig(enable_prefix_caching=False)
    for index in range(2):
        rig.worker.add(make_request(f"n{index}", range(9), 2))
    rig.run()
    assert rig.runner.batch_sizes == [18, 2]


def test_a_follower_takes_over_when_its_leader_is_aborted() -> None:
    rig = make_rig()
    for request_id in ("leader", "follower"):
        rig.worker.add(make_request(request_id, range(50), 2))
    rig.step()
    rig.worker.abort("leader")
    rig.run()
    assert rig.tokens("follower") == first_tokens(list(range(50)), 2)
    assert rig.runner.batch_sizes == [32, 18, 1]


def test_a_follower_of_another_salt_does_not_wait() -> None:
    rig = make_rig()
    rig.worker.add(make_request("a", range(9), 2, cache_salt="a"))
    rig.worker.add(make_request("b", range(9), 2, cache_salt="b"))
    rig.step()
    assert rig.runner.batch_sizes == [18]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_an_abort_in_any_phase_frees_everything_at_once(num_steps: int) -> None:
    rig = make_rig()
    rig.worker.add(make_request("witness", [1, 2, 3], 8))
    rig.worker.add(make_request("gone", range(10, 60), 8))
    for _ in range(num_steps):
        rig.step()
    for request_id in ("gone", "gone", "unknown"):
        rig.worker.abort(request_id)
    assert rig.scheduler.check_invariants() == []
    rig.run()
    assert rig.reason("gone") is FinishReason.ABORT
    assert rig.tokens("witness") == first_tokens([1, 2, 3], 8)
    assert rig.scheduler.kv.num_free_blocks == 32


def test_an_abort_between_schedule_and_commit_is_passed_over() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r"))
    plan = scheduler.schedule()
    scheduler.abort("r")
    (only,) = scheduler.commit(plan, StepResults(sampled=[[]]))
    assert only.finish_reason is FinishReason.ABORT
    assert not scheduler.has_work


def test_a_deadline_ends_waiting_and_running_sequences() -> None:
    rig = make_rig(max_num_seqs=1)
    rig.worker.add(make_request("runs", PROMPT, 50, deadline_s=1005.0))
    rig.worker.add(make_request("waits", PROMPT, 50, deadline_s=1003.0))
    rig.worker.add(make_request("free", PROMPT, 2))
    rig.step()
    rig.clock.now_s = 1003.0
    rig.step()
    assert (rig.reason("waits"), rig.reason("runs")) == (FinishReason.DEADLINE, None)
    rig.clock.now_s = 1005.0
    rig.step()
    assert rig.reason("runs") is FinishReason.DEADLINE
    rig.run()
    assert rig.reason("free") is FinishReason.LENGTH


def test_a_failed_step_leaves_the_state_usable() -> None:
    rig = make_rig()
    rig.runner.raise_at = {0: DeviceError("lost"), 3: DeviceError("lost")}
    run_one(rig, max_tokens=5)
    assert rig.tokens("r") == first_tokens(PROMPT, 5)
    assert rig.scheduler.totals.failed_steps == 2


def test_the_fakes_greedy_choice_depends_on_every_token() -> None:
    assert hashed_next_token((1, 2, 3)) != hashed_next_token((1, 3, 2))


def test_check_invariants_reports_what_the_scheduler_itself_got_wrong() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("r"))
    scheduler._ranking.num_running = 9
    assert scheduler.check_invariants() == ["0 sequences run, counted 9, seats 4"]
