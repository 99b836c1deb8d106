"""What a model's weights, keys and values take: exact numbers from a bundle, and as it is shown."""

from __future__ import annotations

import re
from pathlib import Path

import platformdirs
import pytest

from engine.bundle import Bundle
from engine.export.panels import PANELS_FILE
from server.bench.kv_use import contexts_up_to, kv_uses
from server.bench.model_cost import find_cost, model_cost
from server.cli.main import run
from server.cli.show import memory_lines
from server.machine import Detected
from server.model_store import ModelStore
from tests.engine.gguf_files import write_tiny_llama_gguf
from tests.model_configs import make_config


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    return ModelStore().pull(str(write_tiny_llama_gguf(tmp_path / "tiny.gguf")))


def test_the_cost_counts_every_matrix_of_a_step_once(bundle: Bundle) -> None:
    config, cost = bundle.config, model_cost(bundle)
    layer = config.hidden_size * (config.qkv_size + config.num_heads * config.head_size)
    layer += 3 * config.hidden_size * config.intermediate_size
    assert cost.layer_operations == 2 * config.num_layers * layer
    assert cost.head_operations == 2 * config.vocab_size * config.hidden_size
    assert cost.attention_operations == 4 * config.num_layers * config.num_heads * config.head_size
    assert cost.disk_bytes == bundle.num_bytes
    files = {file.name: file.num_bytes for file in bundle.manifest.files}
    if PANELS_FILE in files:
        assert cost.weight_bytes <= files[PANELS_FILE]
    assert cost.weight_bytes * 8 >= cost.weight_bits * (layer * config.num_layers)


def test_sequences_take_whole_blocks_and_do_not_share_them() -> None:
    config = make_config(num_layers=30, num_heads=9, num_kv_heads=3, head_size=64)
    per_token = {"f32": 46_800, "int8": 12_240, "int8k4v": 9_720, "int4": 7_200}
    budget = 100 * 16 * per_token["int8"] + 5
    uses = {(use.kv_format, use.num_tokens): use for use in kv_uses(config, (17, 320), budget)}
    assert uses["int8", 17].sequence_bytes == 32 * per_token["int8"]
    assert uses["int8", 17].num_fitting == 50
    assert uses["int8", 320].num_fitting == 5
    assert {name: uses[name, 320].sequence_bytes for name in per_token} == {
        name: 320 * size for name, size in per_token.items()
    }
    assert uses["int4", 320].num_fitting == budget // (7_200 * 16) // 20
    assert uses["f32", 320].num_fitting == 1


def test_contexts_are_powers_of_two_and_the_limit() -> None:
    assert contexts_up_to(8192) == (1024, 2048, 4096, 8192)
    assert contexts_up_to(3000) == (1024, 2048, 3000)
    assert contexts_up_to(512) == (512,)


def test_the_formula_is_shown_with_the_models_numbers(bundle: Bundle) -> None:
    cost = model_cost(bundle)
    lines = memory_lines(bundle.config, cost, Detected(2**30, "it was said so"))
    assert "  int8: 2 layers x 1 heads x (36 of keys + 36 of values) = 144 bytes" in lines
    assert "  f32: 2 layers x 1 heads x (132 of keys + 132 of values) = 528 bytes" in lines
    assert lines[-1] == (
        "in blocks of 16 tokens; a server would have 1.0 GiB for them (it was said so)"
    )


def test_show_has_a_table_of_contexts_and_formats(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["show", "tiny", "--memory"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = [row[:2] for row in rows if row and re.fullmatch(r"[\d,]+", row[0])]
    assert table == [["512", name] for name in ("f32", "int8", "int8k4v", "int4")]


def test_damaged_files_have_no_cost(bundle: Bundle) -> None:
    (bundle.path / "panels.json").write_text("[]")
    assert find_cost(bundle) is None
