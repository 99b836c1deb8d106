"""Two halves at once: the same bits as the step in one piece, and an error in either fails it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.errors import DeviceLost
from engine.halves import cut_batch
from engine.model_runner import LaneSteps, StepLanes
from engine.overlapped_step import OverlappedStep
from tests.batches import Span, make_batch
from tests.loaded_model import LoadedModel, load_model, spoil
from tests.simulated_lane import Device, Faults, Place, SimulatedLane, raising

LAYERS = 2
MIXED = [
    Span([7] * 70, [3, 1, 2, 0, 9]),
    Span([5], [4], 0),
    Span([1, 2, 3] * 20, [5, 6, 7, 8]),
    Span([9], [10], 0),
]


@pytest.fixture(scope="module")
def model(tiny_bundle: Bundle) -> LoadedModel:
    return load_model(tiny_bundle)


def lane_steps(model: LoadedModel) -> LaneSteps:
    assert isinstance(model.runner, LaneSteps)
    return model.runner


def lanes_on(model: LoadedModel, device: Device) -> StepLanes:
    return StepLanes.all_on(SimulatedLane(model.lane, device), LAYERS)


@pytest.mark.parametrize("token", [1, 16, 69, 70, 71, 100, 131])
@pytest.mark.parametrize("rows", ["all", "last", "none"])
def test_the_bits_are_those_of_one_piece(model: LoadedModel, token: int, rows: str) -> None:
    batch = make_batch(MIXED, 63, rows)
    spoil(model.cache)
    whole = model.runner.execute(batch).copy()
    spoil(model.cache, seed=1)
    step = OverlappedStep(lane_steps(model))
    lanes = StepLanes.all_on(model.lane, LAYERS)
    halves = step.execute(lanes, *cut_batch(batch, token)).copy()
    step.close()
    assert np.array_equal(halves, whole)


def test_what_the_halves_wrote_is_what_one_piece_writes(model: LoadedModel) -> None:
    following = make_batch([Span([3], span.table, len(span.token_ids)) for span in MIXED], 63)
    batch = make_batch(MIXED, 63)
    model.runner.execute(batch)
    expected = model.runner.execute(following).copy()
    spoil(model.cache)
    step = OverlappedStep(lane_steps(model))
    step.execute(lanes_on(model, Device(LAYERS)), *cut_batch(batch, 90))
    assert np.array_equal(step.execute(lanes_on(model, Device(LAYERS)), *cut_batch(following, 2)),
                          expected)  # fmt: skip
    step.close()


PLACES = [Place(segment, second) for segment in range(LAYERS) for second in (False, True)]


@pytest.mark.parametrize("place", [*PLACES, Place(LAYERS), Place(LAYERS + 1)], ids=str)
def test_an_error_in_either_half_fails_the_step_and_leaves_it_usable(
    model: LoadedModel, place: Place
) -> None:
    batch = make_batch(MIXED, 63)
    whole = model.runner.execute(batch).copy()
    spoil(model.cache)
    faults = Faults(place, raising(DeviceLost("gone")))
    device = Device(LAYERS, faults=faults)
    lanes = lanes_on(model, device)
    step = OverlappedStep(lane_steps(model))
    with pytest.raises(DeviceLost, match="gone"):
        step.execute(lanes, *cut_batch(batch, 71))
    assert faults.num_acted == 1
    assert np.array_equal(step.execute(lanes, *cut_batch(batch, 71)), whole)
    step.close()


class BrokenAttention:
    """Fails in one half's attention of layer 1."""

    def __init__(self, model: LoadedModel, num_tokens: int) -> None:
        self._model = model
        self._num_tokens = num_tokens

    def begin(self, batch):  # type: ignore[no-untyped-def]
        attend = self._model.attention.begin(batch)

        def broken(qkv, pages, out):  # type: ignore[no-untyped-def]
            if len(qkv) == self._num_tokens and pages is self._model.cache.layers[1]:
                raise ZeroDivisionError
            attend(qkv, pages, out)

        return broken


@pytest.mark.parametrize("num_tokens", [71, 61])
def test_any_other_error_ends_both_halves_too(model: LoadedModel, num_tokens: int) -> None:
    steps = lane_steps(model)
    broken = LaneSteps(BrokenAttention(model, num_tokens), steps.embedding, model.cache)
    step = OverlappedStep(broken)
    with pytest.raises(ZeroDivisionError):
        step.execute(lanes_on(model, Device(LAYERS)), *cut_batch(make_batch(MIXED, 63), 71))
    step.close()


def test_no_thread_is_started_before_the_first_step_and_none_is_left(model: LoadedModel) -> None:
    before = threading.active_count()
    step = OverlappedStep(lane_steps(model))
    assert threading.active_count() == before
    step.execute(lanes_on(model, Device(LAYERS)), *cut_batch(make_batch(MIXED, 63), 71))
    step.close()
    assert threading.active_count() == before
