"""The CPU's own kernels on every kind of decoder: as near to transformers as the sessions are.

Both compute with 8-bit weights and activations, so neither is exact; the errors must be alike. The
sizes are whole blocks, which the kernels need.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from engine.export.exporter import import_checkpoint
from engine.panel_weights import has_panels
from tests.loaded_model import load_model
from tests.parity.checkpoints import Logits, prefill, save
from tests.parity.families import FAMILIES, Family, adapted

pytestmark = pytest.mark.usefixtures("kernels")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WHOLE = {"hidden_size": 64, "intermediate_size": 96, **HEADS}
NAMES = [
    "llama-2-gqa-bias", "llama-3.1", "mistral", "qwen2", "qwen2-window", "qwen3", "gemma2",
    "gemma3", "smollm3-window", "granite", "olmo2",
]  # fmt: skip
KERNEL_FAMILIES: Mapping[str, Family] = {
    **{name: adapted(name, **WHOLE) for name in NAMES},
    "phi3.5-long": adapted("phi3.5-long", hidden_size=96, num_attention_heads=4,
                           num_key_value_heads=2, intermediate_size=96),
}  # fmt: skip


def relative_rms(found: Logits, expected: Logits) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.parametrize("name", KERNEL_FAMILIES)
def test_the_kernels_err_no_more_than_the_sessions(tmp_path: Path, name: str) -> None:
    family = KERNEL_FAMILIES[name]
    saved = save(family, tmp_path / "saved")
    source = saved.folder / "model.safetensors"
    bundle = import_checkpoint(source, tmp_path / "bundle", "tiny", lambda *_: None)
    assert has_panels(bundle)
    errors = {
        kernels: relative_rms(
            prefill(
                load_model(bundle, "f32", max_model_len=family.max_model_len, kernels=kernels),
                saved.tokens,
            ),
            saved.expected,
        )
        for kernels in ("auto", "onnxruntime")
    }
    assert errors["auto"] < 1.2 * errors["onnxruntime"] + 0.005, errors
    assert errors["onnxruntime"] < 0.15


def test_every_family_is_here() -> None:
    model_types = {family.model_type for family in KERNEL_FAMILIES.values()}
    assert model_types == {family.model_type for family in FAMILIES.values()}
