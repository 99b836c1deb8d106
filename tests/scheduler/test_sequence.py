from scheduler.messages import FinishReason
from scheduler.sequence import FINISHED_STATUS, Sequence, Status
from tests.fakes import make_request


def test_resumed_tokens_are_output_that_exists_already() -> None:
    request = make_request("r", [1, 2, 3], max_tokens=5, resumed_token_ids=(7, 8))
    sequence = Sequence(request, 0, 0.0, 64)
    assert sequence.token_ids == [1, 2, 3, 7, 8]
    assert (sequence.num_prompt_tokens, sequence.num_output_tokens) == (3, 2)
    assert sequence.num_pending_tokens == 5
    assert sequence.max_num_tokens == 8


def test_the_context_bounds_the_length() -> None:
    assert Sequence(make_request("r", [1, 2, 3], 100), 0, 0.0, 64).max_num_tokens == 64


def test_keys_are_never_needed_for_the_last_token_but_for_all_of_a_prompt() -> None:
    assert Sequence(make_request("r", [1, 2, 3], 5), 0, 0.0, 64).max_num_computed_tokens == 7
    assert Sequence(make_request("r", [1, 2, 3], 0), 0, 0.0, 64).max_num_computed_tokens == 3


def test_every_finish_reason_has_a_status_above_running() -> None:
    assert set(FINISHED_STATUS) == set(FinishReason)
    assert all(status > Status.RUNNING for status in FINISHED_STATUS.values())


def test_a_request_without_arrival_arrives_when_it_is_added() -> None:
    assert Sequence(make_request("r"), 0, 12.0, 64).arrival_s == 12.0
    assert Sequence(make_request("r", arrival_s=3.0), 0, 12.0, 64).arrival_s == 3.0
