import pytest

from engine.sampler import Sampled
from scheduler.verify import verify


@pytest.mark.parametrize(
    ("drafts", "sampled", "expected"),
    [
        ([], [5], [5]),
        ([5, 6], [5, 6, 7], [5, 6, 7]),
        ([5, 6], [5, 9, 7], [5, 9]),
        ([5, 6], [4, 6, 7], [4]),
        ([5, 6], [5, None, 7], [5, None]),
    ],
)
def test_drafts_stand_up_to_the_first_that_was_not_sampled(
    drafts: list[int], sampled: list[int | None], expected: list[int | None]
) -> None:
    accepted = verify(drafts, [Sampled(token_id) for token_id in sampled])
    assert [token.token_id for token in accepted] == expected
