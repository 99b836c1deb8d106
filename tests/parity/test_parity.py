"""Every architecture against transformers in float32, through the whole runner.

The measure: the largest absolute difference of any logit of any token of a text of 64 to 160
tokens; the logits' spread is about one, and a test of its own keeps it so.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from engine.export.graph import SegmentBuilder
from tests.parity.checkpoints import (
    PATHS,
    Saved,
    change_settings,
    difference,
    import_file,
    import_folder,
    load,
    make_model,
    prefill,
    save,
    text_and_logits,
)
from tests.parity.families import FAMILIES, GGUF_FAMILIES
from tests.parity.gguf_conversion import write_as_gguf

pytestmark = pytest.mark.usefixtures("kernels")
TOLERANCE = 1e-4
VISIBLE = 1e-2
MUTATIONS = [(name, key) for name, family in FAMILIES.items() for key in family.without]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    root = tmp_path_factory.mktemp("parity")
    return {name: save(family, root / name) for name, family in FAMILIES.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_agree_with_transformers(
    checkpoints: dict[str, Saved], tmp_path: Path, name: str
) -> None:
    saved = checkpoints[name]
    assert 0.3 < saved.expected.std() < 3
    bundle = import_folder(saved.folder, tmp_path / "bundle")
    model = load(bundle, saved.family.max_model_len)
    for path, logits_of in PATHS.items():
        found = difference(logits_of(model, saved.tokens), saved.expected)
        assert found < TOLERANCE, f"{name}, {path}: the largest difference is {found:.3g}"


@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_the_same_model_as_a_gguf_agrees(tmp_path: Path, name: str) -> None:
    family = GGUF_FAMILIES[name]
    reference = make_model(family)
    tokens, expected = text_and_logits(reference, family)
    source = write_as_gguf(reference, family, tmp_path / "tiny.gguf")
    model = load(import_file(source, tmp_path / "bundle"), family.max_model_len)
    found = difference(prefill(model, tokens), expected)
    assert found < TOLERANCE, f"{name}: the largest difference is {found:.3g}"


@pytest.mark.parametrize(("name", "key"), MUTATIONS)
def test_a_setting_that_is_dropped_is_seen(
    checkpoints: dict[str, Saved], tmp_path: Path, name: str, key: str
) -> None:
    saved = checkpoints[name]
    changes = {key: saved.family.without[key]}
    folder = change_settings(saved.folder, tmp_path / "changed", changes)
    bundle = import_folder(folder, tmp_path / "bundle")
    max_model_len = min(saved.family.max_model_len, bundle.config.context_length)
    found = prefill(load(bundle, max(max_model_len, len(saved.tokens))), saved.tokens)
    assert difference(found, saved.expected) > VISIBLE


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2"])
def test_a_query_key_norm_that_is_dropped_is_seen(
    checkpoints: dict[str, Saved], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentBuilder, "_query_key_norm", lambda self, graph, x, weight: x)
    saved = checkpoints[name]
    bundle = import_folder(saved.folder, tmp_path / "bundle")
    found = prefill(load(bundle, saved.family.max_model_len), saved.tokens)
    assert difference(found, saved.expected) > VISIBLE


def test_a_stored_head_that_is_tied_is_not_read(
    checkpoints: dict[str, Saved], tmp_path: Path
) -> None:
    """And a vocabulary that is larger than the tokenizer's is served whole."""
    saved = checkpoints["smollm2"]
    folder = Path(shutil.copytree(saved.folder, tmp_path / "copy"))
    bundle = import_folder(folder, tmp_path / "bundle")
    assert bundle.config.tied_embeddings
    assert bundle.config.vocab_size == saved.expected.shape[1]
    assert np.isfinite(prefill(load(bundle, 256), saved.tokens)).all()
