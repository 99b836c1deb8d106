"""The step as a whole: faults, drafts, statistics."""

import logging

import pytest

from engine.batch import Batch, Float32Array
from engine.errors import DeviceUnavailable
from engine.lane_usage import LaneUsage, Usage
from scheduler.messages import FinishReason
from scheduler.sequence import Sequence
from tests.fakes import Rig, expected_tokens, hashed_next_token, make_request, make_rig


def add_three(rig: Rig, *prompts: list[int]) -> None:
    for index, prompt in enumerate(prompts):
        rig.worker.add(make_request(f"r{index}", prompt, 5))


def test_a_step_that_fails_once_is_simply_tried_again() -> None:
    rig = make_rig()
    rig.runner.raise_at = {2: RuntimeError("hiccup")}
    add_three(rig, [1], [2, 3], [4, 5, 6])
    rig.run()
    for index, prompt in enumerate(([1], [2, 3], [4, 5, 6])):
        expected, _ = expected_tokens(make_request("x", prompt, 5), 64)
        assert rig.tokens(f"r{index}") == expected
    assert rig.scheduler.totals.failed_steps == 1


def test_only_the_culprit_of_a_failing_step_fails(caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig()
    rig.runner.poison_token = 63
    add_three(rig, [1], [2, 63], [4, 5, 6])
    with caplog.at_level(logging.CRITICAL):
        rig.step()
    (bad,) = rig.outputs["r1"]
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error == "the model failed repeatedly while computing this request"
    rig.runner.poison_token = None
    rig.run()
    for request_id, prompt in (("r0", [1]), ("r2", [4, 5, 6])):
        assert rig.tokens(request_id) == expected_tokens(make_request("x", prompt, 5), 64)[0]
    assert rig.scheduler.totals.failed_steps == 3


def test_a_device_that_is_gone_fails_every_sequence_and_not_the_loop() -> None:
    rig = make_rig()
    rig.runner.raise_at = {number: RuntimeError("gone") for number in range(5)}
    add_three(rig, [1], [2], [3])
    rig.step()
    assert {rig.reason(f"r{index}") for index in range(3)} == {FinishReason.ERROR}
    assert not rig.worker.has_work
    rig.worker.add(make_request("later", [1], 5))
    rig.run()
    assert rig.reason("later") is FinishReason.LENGTH


def test_without_its_only_device_a_step_is_refused_at_once_with_the_reason() -> None:
    rig = make_rig()
    rig.runner.raise_at = {1: DeviceUnavailable("the NPU is closed: SSR")}
    add_three(rig, [1], [2])
    rig.step()
    rig.step()
    for name in ("r0", "r1"):
        end = rig.outputs[name][-1]
        assert (end.finish_reason, end.error) == (
            FinishReason.UNAVAILABLE,
            "the NPU is closed: SSR",
        )
    assert rig.runner.num_executed == 2, "it has waited already: nothing is tried again"
    assert not rig.worker.has_work
    rig.worker.add(make_request("later", [1], 5))
    rig.run()
    assert rig.tokens("later") == expected_tokens(make_request("x", [1], 5), 64)[0]


def test_a_sequence_says_which_devices_worked_for_it() -> None:
    rig = make_rig()
    devices = iter([("cpu",), ("npu", "cpu"), ("npu",), ("npu",), ("npu",), ("npu",)])
    lanes = (LaneUsage("npu", 3), LaneUsage("cpu", 2))
    rig.worker._usage = lambda: Usage(rig.runner.devices, lanes)  # type: ignore[attr-defined]
    execute = rig.runner.execute

    def execute_somewhere(batch: Batch) -> Float32Array:
        rig.runner.devices = next(devices)  # type: ignore[attr-defined]
        return execute(batch)

    rig.runner.execute = execute_somewhere  # type: ignore[method-assign]
    rig.worker.add(make_request("early", [1], 3))
    result = rig.worker.step()
    assert (result.stats.devices, result.stats.lanes) == (("cpu",), lanes)
    rig.step()
    rig.worker.add(make_request("late", [2], 2))
    rig.run()
    assert rig.outputs["early"][-1].devices == ("cpu", "npu")
    assert rig.outputs["late"][-1].devices == ("npu",)


def test_a_refused_request_ends_with_the_reason_and_costs_no_execution() -> None:
    rig = make_rig()
    rig.worker.add(make_request("r", [1] * 100))
    (refused,) = rig.step()
    assert refused.finish_reason is FinishReason.ERROR
    assert refused.error == "100 tokens exceed the context of 64 tokens"
    assert rig.runner.num_executed == 0 and not rig.worker.has_work


class Oracle:
    """Proposes what will be sampled, but every third draft wrong."""

    def propose(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            tokens = list(sequence.token_ids)
            for _ in range(3):
                tokens.append(hashed_next_token(tuple(tokens)) + (len(tokens) % 3 == 0))
            sequence.draft_token_ids = tokens[sequence.num_tokens :]


def test_right_drafts_are_accepted_wrong_ones_cost_nothing_but_time() -> None:
    plain, drafted = make_rig(), make_rig(proposer=Oracle())
    for rig in (plain, drafted):
        rig.worker.add(make_request("r", [1, 2, 3], 30))
        rig.run()
    assert drafted.tokens("r") == plain.tokens("r")
    assert drafted.num_steps < plain.num_steps / 2


def test_drafts_never_push_anybody_out_of_memory_or_over_the_limit_of_rows() -> None:
    rig = make_rig(proposer=Oracle(), num_blocks=9, max_logits_rows=5)
    for index in range(4):
        rig.worker.add(make_request(f"r{index}", [index], 8))
    rig.run()
    assert rig.scheduler.totals.preemptions == 0
    for index in range(4):
        assert rig.tokens(f"r{index}") == expected_tokens(make_request("x", [index], 8), 64)[0]


def test_drafts_stay_within_the_token_budget_of_the_step() -> None:
    rig = make_rig(proposer=Oracle(), max_num_batched_tokens=7, max_prefill_tokens_with_decodes=1)
    for index in range(4):
        rig.worker.add(make_request(f"r{index}", [index], 12))
    rig.run()
    assert max(rig.runner.batch_sizes) == 7
    assert rig.scheduler.totals.failed_steps == 0


def test_drafts_leave_prompts_their_share_of_the_step() -> None:
    rig = make_rig(proposer=Oracle(), max_num_batched_tokens=8, max_prefill_tokens_with_decodes=5)
    rig.worker.add(make_request("a", [1], 30))
    rig.step()
    rig.step()
    rig.worker.add(make_request("b", [*range(20)], 1))
    for _ in range(4):
        rig.step()
    assert rig.runner.batch_sizes[-4:] == [8, 8, 8, 8]
    assert rig.reason("b") is FinishReason.LENGTH


def test_drafts_are_not_computed_past_the_end_that_is_known() -> None:
    rig = make_rig(proposer=Oracle())
    rig.worker.add(make_request("r", [1, 2, 3], 4))
    rig.run()
    assert max(position for _, position, _ in rig.runner.pages.values()) == 3 + 4 - 2


def test_drafts_leave_every_running_sequence_a_block_to_grow_into() -> None:
    rig = make_rig(proposer=Oracle(), num_blocks=3)
    rig.worker.add(make_request("a", [1, 2, 3], 6))
    rig.worker.add(make_request("b", [4, 5, 6, 7], 4))
    rig.step()
    rig.step()
    assert rig.steps_with_token["b"] == [1, 2]


def test_stats_tell_the_state_after_the_step() -> None:
    rig = make_rig(max_num_seqs=1)
    rig.worker.add(make_request("a", range(6), 2, arrival_s=997.5))
    rig.worker.add(make_request("b", range(6), 2, arrival_s=998.0))
    stats = rig.worker.step().stats
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_blocks, stats.num_free_blocks, stats.num_step_tokens) == (32, 30, 6)
    assert (stats.total_steps, stats.total_generated_tokens) == (1, 1)
    assert stats.queue_times_s == (2.5,)
    assert min(stats.schedule_s, stats.execute_s, stats.sample_s, stats.commit_s) > 0.0
    rig.worker.step()
    stats = rig.worker.step().stats
    assert (stats.total_prompt_tokens, stats.total_prefix_queried_tokens) == (12, 12)
    assert stats.total_cached_tokens == 4
    assert stats.queue_times_s == (2.0,)
