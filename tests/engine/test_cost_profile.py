"""The arithmetic of measured costs, and their JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.cost_profile import KINDS, LaneCosts, WholeCosts, profile_from_json
from tests.batches import Span, make_batch
from tests.simulated_lane import profile

POINTS = ((1, 10.0), (8, 24.0), (32, 30.0))
STAIRS = LaneCosts(1.0, dict.fromkeys(KINDS, POINTS), is_bucketed=True)
LINE = replace(STAIRS, is_bucketed=False)


@pytest.mark.parametrize(
    ("rows", "stairs", "line"),
    [(1, 10.0, 10.0), (2, 24.0, 12.0), (8, 24.0, 24.0), (9, 30.0, 24.25), (32, 30.0, 30.0),
     (33, 40.0, 30.9375), (64, 60.0, 60.0), (70, 84.0, 65.625)],
)  # fmt: skip
def test_between_and_beyond_the_points(rows: int, stairs: float, line: float) -> None:
    assert STAIRS.seconds("middle", rows) == stairs
    assert LINE.seconds("middle", rows) == line


def test_a_whole_step_costs_what_the_next_larger_one_does() -> None:
    costs = WholeCosts(((1, 64, 1.0), (1, 1024, 2.0), (8, 1024, 3.0)))
    assert costs.seconds(1, 10) == 1.0
    assert costs.seconds(1, 65) == 2.0
    assert costs.seconds(2, 10) == 3.0
    assert costs.seconds(16, 10) == 6.0


def test_attention_is_counted_for_each_sequence_by_what_it_does() -> None:
    costs = replace(
        profile(4),
        decode_attention=((64, 1.0), (256, 3.0)),
        chunk_attention=((64, 0.1), (256, 0.2)),
    )
    spans = [Span([1], list(range(4)), 63), Span([1] * 10, list(range(16)), 246), Span([1], [0], 0)]
    found = costs.sequence_attention_s(make_batch(spans, rows="last"))
    assert np.allclose(found, [1.0, 2.0, 1.0])
    longer = costs.sequence_attention_s(make_batch([Span([1], list(range(32)), 511)]))
    assert np.allclose(longer, [6.0])


def test_json_and_back_is_the_same() -> None:
    costs = replace(profile(4), whole={"npu-fused": WholeCosts(((1, 64, 0.5),))})
    assert profile_from_json(json.loads(json.dumps(costs.as_json()))) == costs


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("format",), 99, "format 99"),
        (("lanes", "npu", "segments", "middle"), [], "ascending"),
        (("lanes", "npu", "segments", "middle"), [[8, 1.0], [1, 1.0]], "ascending"),
        (("lanes", "npu", "segments", "middle"), [[1, -1.0]], "positive"),
        (("lanes", "npu", "segments"), {}, "not a cost profile"),
        (("copy_bytes_per_s",), "inf", "positive"),
        (("handover_s",), None, "not a cost profile"),
        (("whole",), {"npu-fused": []}, "no costs"),
    ],
)
def test_what_is_no_profile_is_refused(path: tuple[str, ...], value: Any, reason: str) -> None:
    document: Any = json.loads(json.dumps(profile(4).as_json()))
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ValueError, match=reason):
        profile_from_json(document)
