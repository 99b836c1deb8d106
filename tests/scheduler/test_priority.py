"""Who goes first, who gives way, and that everybody ends (cases CC-04, 06, 07, 09, 10)."""

import pytest

from scheduler.messages import FinishReason, Priority
from tests.fakes import Rig, expected_tokens, make_request, make_rig

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW


def assert_undisturbed(rig: Rig, request_id: str, prompt: list[int], max_tokens: int) -> None:
    expected, _ = expected_tokens(make_request("x", prompt, max_tokens), 64)
    assert rig.tokens(request_id) == expected


def add(
    rig: Rig, request_id: str, prompt: list[int], max_tokens: int, priority: Priority = NORMAL
) -> None:
    rig.worker.add(make_request(request_id, prompt, max_tokens, priority))


def two_low_run(rig: Rig) -> None:
    for index in range(2):
        add(rig, f"low{index}", [index, 1, 2], 20, LOW)
    for _ in range(4):
        rig.step()
        rig.clock.now_s += 0.01


def test_a_high_arrival_gets_a_seat_at_the_next_step_and_the_victim_is_undisturbed() -> None:
    rig = make_rig(max_num_seqs=2)
    two_low_run(rig)
    add(rig, "high", [9, 9], 3, HIGH)
    rig.step()
    assert len(rig.tokens("high")) == 1
    assert rig.scheduler.totals.preemptions == 1
    rig.run()
    for index in range(2):
        assert_undisturbed(rig, f"low{index}", [index, 1, 2], 20)
    pause = 5  # the step that computes the prompt of the better class
    assert rig.steps_with_token["low0"] == [step for step in range(1, 22) if step != pause]


@pytest.mark.parametrize("better", [HIGH, NORMAL])
def test_a_prompt_of_a_better_class_has_its_steps_for_itself(better: Priority) -> None:
    rig = make_rig(max_num_seqs=4, max_num_batched_tokens=16, max_prefill_tokens_with_decodes=8)
    two_low_run(rig)
    add(rig, "late", [7] * 12, 2, LOW)
    add(rig, "better", [9] * 20, 3, better)
    for _ in range(3):
        rig.step()
    assert rig.runner.batch_sizes[-3:] == [8, 8, 4]
    rig.step()
    assert rig.runner.batch_sizes[-1] == 3 + 8  # all decode again, and the other prompt goes on
    rig.run()
    for index in range(2):
        assert_undisturbed(rig, f"low{index}", [index, 1, 2], 20)


def test_who_pauses_ages_and_is_served_though_better_prompts_never_end() -> None:
    rig = make_rig(max_num_seqs=4, aging_s=10.0)
    two_low_run(rig)
    for number in range(30):
        add(rig, f"high{number}", [number, 9], 1, HIGH)
        rig.step()
        rig.clock.now_s += 1.0
    served = [step for step in rig.steps_with_token["low0"] if step > 4]
    assert served[0] == 25  # after 20 s it is of the best class, too
    assert served == list(range(served[0], 35))


def test_an_equal_arrival_never_pushes_anybody_out_however_long_it_waits() -> None:
    rig = make_rig(max_num_seqs=2)
    two_low_run(rig)
    add(rig, "late", [9, 9], 3, LOW)
    for _ in range(10):
        rig.clock.now_s += 60.0
        rig.step()
    rig.run()
    assert rig.scheduler.totals.preemptions == 0
    assert rig.steps_with_token["late"][0] == 21


def test_a_high_arrival_gets_blocks_when_low_holds_all_of_them() -> None:
    rig = make_rig(num_blocks=8, enable_prefix_caching=False)
    add(rig, "low0", [0, 1, 2], 14, LOW)
    add(rig, "low1", [1, 1, 2], 14, LOW)
    for _ in range(12):
        rig.step()
    assert rig.scheduler.kv.num_free_blocks == 0
    add(rig, "high", [9] * 10, 3, HIGH)
    rig.step()
    assert len(rig.tokens("high")) == 1
    rig.run()
    for index in range(2):
        assert_undisturbed(rig, f"low{index}", [index, 1, 2], 14)


def test_a_victim_finds_its_published_blocks_again() -> None:
    rig = make_rig(max_num_seqs=1)
    add(rig, "low", list(range(10)), 6, LOW)
    rig.step()
    add(rig, "high", [40, 41], 1, HIGH)
    rig.run()
    assert rig.runner.batch_sizes == [10, 2, 3, 1, 1, 1, 1]
    assert rig.outputs["low"][0].num_cached_tokens == 0
    assert rig.scheduler.totals.prompt_tokens == 12


def test_high_arrivals_of_one_step_each_take_a_victim() -> None:
    rig = make_rig(max_num_seqs=2)
    two_low_run(rig)
    add(rig, "high0", [9, 9], 3, HIGH)
    add(rig, "high1", [8, 9], 3, HIGH)
    rig.step()
    assert (len(rig.tokens("high0")), len(rig.tokens("high1"))) == (1, 1)


def test_nobody_is_pushed_out_for_one_who_would_not_fit_anyway() -> None:
    rig = make_rig(num_blocks=10, enable_prefix_caching=False)
    add(rig, "high", [1] * 20, 8, HIGH)
    add(rig, "low", [2] * 8, 4, LOW)
    rig.step()
    add(rig, "too big", [3] * 30, 2, HIGH)
    rig.step()
    assert rig.scheduler.totals.preemptions == 0
    rig.run()
    assert_undisturbed(rig, "too big", [3] * 30, 2)


def test_aging_brings_low_to_a_seat_under_a_steady_stream_of_high() -> None:
    rig = make_rig(max_num_seqs=1, aging_s=10.0)
    add(rig, "low", [1, 2, 3], 2, LOW)
    add(rig, "high0", [0, 9], 5, HIGH)
    for number in range(1, 12):
        add(rig, f"high{number}", [number, 9], 5, HIGH)
        for _ in range(5):
            rig.step()
            rig.clock.now_s += 1.0
    assert rig.reason("low") is FinishReason.LENGTH
    assert rig.steps_with_token["low"][0] <= 20 + 5 + 1


def test_an_aged_sequence_is_protected_while_it_runs() -> None:
    rig = make_rig(max_num_seqs=1, aging_s=10.0)
    add(rig, "high", [0, 9], 3, HIGH)
    add(rig, "low", [1, 2, 3], 4, LOW)
    rig.step()
    rig.clock.now_s += 25.0
    rig.step()
    rig.step()
    rig.step()
    add(rig, "late", [5, 9], 1, HIGH)
    rig.run()
    assert rig.scheduler.totals.preemptions == 0


def test_high_passes_an_aged_low_that_waits_for_memory_by_replacing_a_victim() -> None:
    rig = make_rig(max_num_seqs=2, aging_s=10.0)
    two_low_run(rig)
    add(rig, "aged", [7, 7], 2, LOW)
    rig.clock.now_s += 30.0
    add(rig, "high", [9, 9], 3, HIGH)
    rig.step()
    assert len(rig.tokens("high")) == 1
    assert rig.tokens("aged") == []


def test_growth_takes_blocks_from_the_lowest_rank_and_both_texts_are_as_alone() -> None:
    rig = make_rig(num_blocks=7)
    add(rig, "a", [1] * 9, 11)
    add(rig, "b", [2] * 9, 11)
    rig.run()
    assert rig.scheduler.totals.preemptions >= 1
    assert_undisturbed(rig, "a", [1] * 9, 11)
    assert_undisturbed(rig, "b", [2] * 9, 11)
    assert rig.steps_with_token["a"] == list(range(1, 12))


@pytest.mark.parametrize("aborts_oldest", [False, True])
@pytest.mark.parametrize("prompt_len", [4, 20])
def test_eight_growing_sequences_in_an_exhausted_pool_all_finish(
    aborts_oldest: bool, prompt_len: int
) -> None:
    rig = make_rig(num_blocks=15, max_num_seqs=8, enable_prefix_caching=False)
    for index in range(8):
        add(rig, f"r{index}", [index] * prompt_len, 25 - prompt_len)
    for _ in range(6):
        assert rig.step() or rig.runner.batch_sizes[-1] > 0
    if aborts_oldest:
        rig.worker.abort("r0")
    rig.run(max_steps=400)
    for index in range(int(aborts_oldest), 8):
        assert_undisturbed(rig, f"r{index}", [index] * prompt_len, 25 - prompt_len)


def test_a_capped_sequence_is_no_victim_of_its_own_class_any_more() -> None:
    rig = make_rig(num_blocks=7, max_preemptions=1, enable_prefix_caching=False)
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        add(rig, name, [token] * 7, 17)
    rig.run()
    assert rig.scheduler.totals.preemptions <= 3
    for name, token in (("a", 1), ("b", 2), ("c", 3)):
        assert_undisturbed(rig, name, [token] * 7, 17)


def test_running_streams_get_their_token_in_every_step_of_a_long_prefill() -> None:
    rig = make_rig(max_num_seqs=6, num_blocks=64)
    for index in range(4):
        add(rig, f"stream{index}", [index, 1], 30)
    rig.step()
    add(rig, "long", [9] * 60, 1)
    rig.step()
    add(rig, "short", [8, 8, 8], 1)
    rig.run()
    for index in range(4):
        assert rig.steps_with_token[f"stream{index}"] == list(range(1, 31))
    assert max(rig.runner.batch_sizes[1:]) == 4 + 16
    assert rig.steps_with_token["short"][0] < rig.steps_with_token["long"][0]
    assert_undisturbed(rig, "long", [9] * 60, 1)


def test_a_long_prompt_progresses_in_every_step_under_a_steady_decode_load() -> None:
    rig = make_rig(max_num_seqs=5, num_blocks=64)
    for index in range(4):
        add(rig, f"stream{index}", [index, 1], 3 + index)
    rig.step()
    add(rig, "long", [9] * 48, 1)
    for number in range(10):
        add(rig, f"next{number}", [number, 2], 4)
        rig.step()
    bound = -(-48 // 12)
    assert rig.steps_with_token["long"][0] <= 1 + bound


def test_a_running_prefill_that_gets_nothing_ages_until_it_does() -> None:
    rig = make_rig(
        max_num_seqs=30, max_num_batched_tokens=31, max_logits_rows=30, num_blocks=400, aging_s=3.0
    )
    add(rig, "low", [7] * 40, 1, LOW)
    rig.step()
    for number in range(12):
        for kind in range(2):
            add(rig, f"high{number}.{kind}", [number, kind, *([2] * 28)], 1, HIGH)
        rig.step()
        rig.clock.now_s += 1.0
    assert rig.steps_with_token["low"] == [2 + 2 * 3]  # unserved from step 2 on, one class per 3 s


def test_admission_leaves_the_blocks_that_running_prefills_will_need() -> None:
    rig = make_rig(num_blocks=10, max_num_batched_tokens=8)
    add(rig, "long", [1] * 32, 2)
    add(rig, "next", [2] * 12, 2)
    rig.run()
    assert rig.scheduler.totals.preemptions == 0
    assert rig.steps_with_token["next"][0] > rig.steps_with_token["long"][-1]


def test_what_a_victim_still_needed_is_not_kept_for_it() -> None:
    rig = make_rig(num_blocks=10, max_num_batched_tokens=8)
    add(rig, "low", [1] * 36, 2, LOW)
    rig.step()
    add(rig, "high", [2] * 18, 2, HIGH)
    rig.run()
    assert rig.scheduler.totals.preemptions == 1
    assert rig.steps_with_token["high"][0] < rig.steps_with_token["low"][0]


def test_passing_a_refused_sequence_costs_a_victim_even_if_free_blocks_would_do() -> None:
    rig = make_rig(num_blocks=10, aging_s=10.0, enable_prefix_caching=False)
    add(rig, "runs", [1] * 20, 4, LOW)
    rig.step()
    add(rig, "aged", [2] * 20, 2, LOW)
    rig.clock.now_s += 30.0
    rig.step()
    assert (rig.scheduler.num_running, rig.scheduler.kv.num_free_blocks) == (1, 4)
    add(rig, "high", [3] * 7, 2, HIGH)
    rig.step()
    assert len(rig.tokens("high")) == 1
    assert rig.scheduler.totals.preemptions == 1
    rig.run()
    assert rig.steps_with_token["aged"][0] < rig.steps_with_token["runs"][-1]
