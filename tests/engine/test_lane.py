"""The CPU lane: segments bound to its buffers, for every number of tokens and rows."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.bundle import Bundle
from engine.errors import BundleError
from engine.export.model import segment_file
from engine.lane import CpuLane, head
from tests.batches import int32

MAX_TOKENS, MAX_ROWS = 40, 12


@pytest.fixture
def lane(tiny_bundle: Bundle) -> CpuLane:
    return CpuLane(tiny_bundle.config, tiny_bundle.path, MAX_TOKENS, MAX_ROWS, 1)


def run_all(lane: CpuLane, seed: int, num_tokens: int, rows: list[int]) -> np.ndarray:
    """Logits of a step whose attention is made up: the queries of the same token."""
    rng = np.random.default_rng(seed)
    buffers = lane.begin(num_tokens)
    buffers.hidden[:] = rng.standard_normal((MAX_TOKENS, buffers.hidden.shape[1]))[:num_tokens]
    for index in range(2):
        lane.run(index)
        buffers.attention[:] = buffers.qkv[:, : buffers.attention.shape[1]]
    return head(lane, int32(rows)).copy()


def test_buffers_have_the_steps_size(lane: CpuLane, tiny_bundle: Bundle) -> None:
    config = tiny_bundle.config
    for num_tokens in (1, 40, 7):
        buffers = lane.begin(num_tokens)
        assert buffers.hidden.shape == (num_tokens, config.hidden_size)
        assert buffers.qkv.shape == (num_tokens, config.qkv_size)
        assert buffers.attention.shape == (num_tokens, config.num_heads * config.head_size)


def test_a_tokens_logits_are_the_same_in_every_step_and_row(lane: CpuLane) -> None:
    every = np.concatenate([run_all(lane, 0, 40, list(range(i, i + 10))) for i in (0, 10, 20, 30)])
    assert len(np.unique(every, axis=0)) == 40
    for num_tokens, rows in ((1, [0]), (5, [4, 0]), (40, [39]), (17, [3, 3, 16]), (40, [0, 39])):
        assert np.array_equal(run_all(lane, 0, num_tokens, rows), every[rows])


def test_a_step_leaves_nothing_behind_for_the_next(lane: CpuLane) -> None:
    first = run_all(lane, 0, 9, [8])
    run_all(lane, 1, 40, list(range(12)))
    assert np.array_equal(run_all(lane, 0, 9, [8]), first)


def test_a_token_that_is_not_finite_harms_no_other(lane: CpuLane) -> None:
    clean = run_all(lane, 0, 20, list(range(12)))
    buffers = lane.begin(20)
    buffers.hidden[:] = np.random.default_rng(0).standard_normal(
        (MAX_TOKENS, buffers.hidden.shape[1])
    )[:20]
    buffers.hidden[5] = np.nan
    for index in range(2):
        lane.run(index)
        assert np.isnan(buffers.qkv[5]).all()
        buffers.attention[:] = buffers.qkv[:, : buffers.attention.shape[1]]
    found = head(lane, int32(range(12)))
    assert np.isnan(found[5]).all()
    others = np.arange(12) != 5
    assert np.array_equal(found[others], clean[others])


@pytest.mark.parametrize("content", [b"", b"not a graph"])
def test_a_damaged_graph_is_refused_by_name(
    tiny_bundle: Bundle, tmp_path: Path, content: bytes
) -> None:
    folder = Path(shutil.copytree(tiny_bundle.path, tmp_path / "copy"))
    (folder / segment_file(1)).write_bytes(content)
    with pytest.raises(BundleError, match=r"cpu_segment_001\.onnx cannot be loaded: "):
        CpuLane(tiny_bundle.config, folder, 8, 8, 1)
