"""Damaged and hostile files: one clear line, no large allocation, and nothing but ImportFailed."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.architectures.hf import HF_ARCHITECTURES
from engine.errors import ImportFailed
from engine.export.exporter import import_checkpoint, open_checkpoint
from tests.engine.broken_files import CORPUS, sentencepiece_bytes
from tests.engine.gguf_files import write_tiny_llama_gguf
from tests.engine.hf_folders import CONFIG, random_llama, write_folder, write_shards

MAX_MEMORY_BYTES = 96 << 20
"""The largest files of the corpus have 16 MB, and are read whole before they are understood."""


def ignore(done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("name", CORPUS)
def test_a_broken_file_is_refused_in_one_line(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    source = CORPUS[name](tmp_path / "m")
    tracemalloc.start()
    try:
        with pytest.raises(ImportFailed) as caught:
            import_checkpoint(source, tmp_path / "bundle", "m", ignore)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.isprintable() and len(message) < 600
    assert str(tmp_path / "m") in message or message.startswith("tensor '")
    assert peak < MAX_MEMORY_BYTES
    assert not (tmp_path / "bundle").exists()


def mutated(data: bytes, edits: list[tuple[float, int, int]]) -> bytes:
    """Each edit overwrites, removes or inserts bytes at a place that is a share of the length."""
    out = bytearray(data)
    for share, kind, value in edits:
        place = int(share * len(out))
        if kind == 0:
            out[place : place + 1] = bytes([value])
        elif kind == 1:
            del out[place : place + 1 + value % 16]
        elif kind == 2:
            out[place:place] = bytes([value]) * (1 + value % 8)
        else:
            out[place : place + 8] = bytes([value]) * 8
    return bytes(out)


EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(0, 255)), min_size=1, max_size=4
)
HEAD_EDITS = st.lists(
    st.tuples(st.floats(0, 0.02), st.integers(0, 3), st.integers(0, 255)), min_size=1, max_size=4
)
FUZZ = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def open_quietly(path: Path) -> None:
    """Opens and reads every tensor; a file may come out whole, or be refused, and nothing else."""
    try:
        checkpoint = open_checkpoint(path)
        for name in ("embed", "layers.0.q", "final_norm"):
            checkpoint.tensor(name)
    except ImportFailed as exc:
        assert "\n" not in str(exc)


def test_the_files_that_are_broken_here_are_whole_to_begin_with(folder: Path) -> None:
    for name in ("m/model.safetensors", "s/model.safetensors", "tiny.gguf"):
        assert open_checkpoint(folder / name).digest
    open_checkpoint(folder / "m" / "model.safetensors.index.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    write_folder(folder / "m")
    write_shards(folder / "m", random_llama())
    write_tiny_llama_gguf(folder / "tiny.gguf")
    write_folder(folder / "s")
    (folder / "s" / "tokenizer.json").unlink()
    (folder / "s" / "tokenizer.model").write_bytes(sentencepiece_bytes())
    return folder


FILES = (
    "m/model.safetensors",
    "m/model.safetensors.index.json",
    "m/config.json",
    "m/tokenizer.json",
    "s/tokenizer.model",
    "tiny.gguf",
)


@pytest.mark.parametrize("name", FILES)
@given(edits=st.one_of(EDITS, HEAD_EDITS))
@FUZZ
def test_mutated_bytes_never_raise_anything_else(
    name: str, folder: Path, edits: list[tuple[float, int, int]]
) -> None:
    path = folder / name
    original = path.read_bytes()
    try:
        path.write_bytes(mutated(original, edits))
        is_text = path.name in ("config.json", "tokenizer.json", "tokenizer.model")
        open_quietly(path.with_name("model.safetensors") if is_text else path)
    finally:
        path.write_bytes(original)


ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 5), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "type"]), st.text(max_size=6)),
)
SCALING_KEYS = (
    "rope_type", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "long_factor", "short_factor", "attention_factor",
    "beta_fast", "mscale", "rope_theta",
)  # fmt: skip
SCALINGS = st.dictionaries(
    st.sampled_from(SCALING_KEYS),
    st.one_of(ODD_VALUES, st.sampled_from(["llama3", "yarn", "linear", "dynamic", "longrope"])),
)
KEYS = (
    *CONFIG, "rope_parameters", "layer_types", "sliding_window", "sliding_window_pattern",
    "head_dim", "attention_bias", "text_config", "quantization_config", "partial_rotary_factor",
    "query_pre_attn_scalar", "final_logit_softcapping", "hidden_activation", "no_rope_layers",
    "max_window_layers", "use_sliding_window", "residual_multiplier", "pad_token_id",
)  # fmt: skip


@given(
    kind=st.sampled_from(sorted(HF_ARCHITECTURES)),
    changes=st.dictionaries(st.sampled_from(KEYS), ODD_VALUES, max_size=3),
    scaling=st.one_of(st.none(), SCALINGS),
    dropped=st.sets(st.sampled_from(sorted(CONFIG)), max_size=2),
)
@FUZZ
def test_odd_settings_never_raise_anything_else(
    folder: Path,
    kind: str,
    changes: dict[str, Any],
    scaling: dict[str, Any] | None,
    dropped: set[str],
) -> None:
    path = folder / "m" / "config.json"
    original = path.read_bytes()
    config = CONFIG | {"model_type": kind, "rope_scaling": scaling} | changes
    try:
        path.write_text(json.dumps({k: v for k, v in config.items() if k not in dropped}))
        open_quietly(path.with_name("model.safetensors"))
    finally:
        path.write_bytes(original)
