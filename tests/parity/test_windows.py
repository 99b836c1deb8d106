"""Sliding windows and speculation: a draft that was rejected leaves nothing behind that is seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.export.exporter import import_checkpoint
from scheduler.messages import GenerationRequest
from scheduler.sequence import Sequence
from tests.engine_rig import greedy_with_logprobs, seeded_with_logprobs, serve
from tests.loaded_model import load_model, spoil
from tests.parity.checkpoints import save
from tests.parity.test_kernels import KERNEL_FAMILIES

pytestmark = pytest.mark.usefixtures("kernels")


class RandomDrafts:
    """Three drafts for everybody, of which hardly one is ever right."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self.num_drafts = 0

    def propose(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.set_drafts(self._rng.integers(3, 300, 3).tolist())
            self.num_drafts += 3


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
def test_rejected_drafts_leave_no_trace_in_a_window(
    tmp_path: Path, name: str, kernels: str
) -> None:
    family = KERNEL_FAMILIES[name]
    saved = save(family, tmp_path / "saved")
    source = saved.folder / "model.safetensors"
    bundle = import_checkpoint(source, tmp_path / "bundle", "tiny", lambda *_: None)
    windows = {layer.window for layer in bundle.config.layers}
    assert 0 < max(windows) < 40
    model = load_model(bundle, "int8", max_model_len=family.max_model_len, kernels=kernels)
    requests = [
        GenerationRequest("greedy", tuple(saved.tokens[:30]), greedy_with_logprobs(70)),
        GenerationRequest("seeded", tuple(saved.tokens[30:95]), seeded_with_logprobs(60, seed=4)),
    ]
    plain = serve(model, {0: requests})
    spoil(model.cache)
    proposer = RandomDrafts()
    drafted = serve(model, {0: requests}, proposer)
    assert proposer.num_drafts > 150
    for request in requests:
        found, expected = (run.replies[request.request_id] for run in (drafted, plain))
        assert found.content == expected.content
