"""Opening bundles: what a good one gives, and how damaged and foreign ones are refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.architectures.config import ModelConfig
from engine.bundle import Bundle, read_manifest
from engine.errors import BundleError
from engine.export.exporter import import_checkpoint
from engine.importers.summary import CheckpointSummary
from engine.manifest import BundleFile, BundleSource, Manifest, decode_manifest, encode_manifest
from tests.engine.gguf_files import CHAT_TEMPLATE, write_tiny_llama_gguf
from tests.model_configs import make_config

CONFIG = make_config(num_layers=2, eos_token_ids=(0, 2))
MANIFEST = Manifest(
    name="tiny",
    converter="1.2.3",
    weight_format="int8",
    config=CONFIG,
    source=BundleSource("/a/b.gguf", 10, 20, "0" * 64),
    summary=CheckpointSummary("Tiny", "apache-2.0", "Q4_1", "smollm", 100, "b.gguf", 10),
    files=(BundleFile("weights.bin", 3, None), BundleFile("tokenizer.json", 2, "a" * 64)),
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    source = write_tiny_llama_gguf(folder / "tiny.gguf")
    return import_checkpoint(source, folder / "tiny", "tiny", lambda done, total: None).path


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "tiny"))


def refusal(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{folder} is not a usable bundle: ")
    assert message.endswith("; run `hexlm pull tiny --force`")
    return message


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.json"
    document = json.loads(path.read_text("utf-8"))
    change(document)
    path.write_text(json.dumps(document), "utf-8")


def test_an_open_bundle_gives_what_the_import_wrote(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert (bundle.name, bundle.weight_format) == ("tiny", "int4")
    assert (bundle.config.num_layers, bundle.config.eos_token_ids) == (2, (2, 0))
    assert bundle.chat_template == CHAT_TEMPLATE
    assert bundle.tokenizer_path.is_file()
    assert bundle.weights_path.is_file()
    listed = sum(file.stat().st_size for file in folder.iterdir() if file.name != "model.json")
    assert bundle.num_bytes == listed
    bundle.verify()


def test_a_manifest_survives_writing_and_reading() -> None:
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST


def test_every_field_of_the_config_is_written_and_read() -> None:
    document = json.loads(encode_manifest(MANIFEST))
    assert list(document["config"]) == [field.name for field in dataclasses.fields(ModelConfig)]
    for name in document["config"]:
        changed = json.loads(encode_manifest(MANIFEST))
        changed["config"][name] = {"not": "a number"}
        with pytest.raises(ValueError, match=f"for '{name}'"):
            decode_manifest(json.dumps(changed))


def test_a_bundle_without_a_template_has_none(folder: Path) -> None:
    def forget_template(document: dict[str, Any]) -> None:
        document["files"] = [f for f in document["files"] if f["name"] != "chat_template.jinja"]

    edit(folder, forget_template)
    assert Bundle.open(folder).chat_template is None


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert "it has no readable model.json" in refusal(tmp_path / "tiny")
    assert "it has no readable model.json" in refusal(tmp_path / "nowhere" / ".." / "tiny")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "model.json is not valid JSON"),
        ("[" * 100_000, "model.json is not valid JSON"),
        ("[]", "model.json is not one of ours"),
        ('{"model_type": "llama"}', "model.json is not one of ours"),
        ('{"format": 999}', "it has the format 999, this version of hexlm reads 2"),
        ('{"format": 2}', "has the wrong value None for 'name'"),
    ],
)
def test_foreign_descriptions_are_refused(folder: Path, text: str, said: str) -> None:
    (folder / "model.json").write_text(text, "utf-8")
    assert said in refusal(folder)


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "C:\\x", "\\\\host\\x", "a/b", ".hidden", "a\0b", ""]
)
def test_file_names_that_leave_the_folder_are_refused(folder: Path, name: str) -> None:
    edit(folder, lambda document: document["files"][0].update(name=name))
    assert "lists the file name" in refusal(folder)


def test_a_missing_and_a_cut_file_are_named(folder: Path) -> None:
    weights = folder / "weights.bin"
    num_bytes = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"weights.bin has {num_bytes - 1} bytes instead of {num_bytes}" in refusal(folder)
    weights.unlink()
    assert "weights.bin is missing" in refusal(folder)


def test_a_description_without_the_weights_is_refused(folder: Path) -> None:
    edit(folder, lambda document: document.update(files=[]))
    assert "model.json does not list tokenizer.json" in refusal(folder)


def test_verify_finds_a_change_that_keeps_the_size(folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:-1] + b" ")
    bundle = Bundle.open(folder)
    with pytest.raises(BundleError, match="tokenizer.json has changed since the import"):
        bundle.verify()


def test_the_description_alone_can_be_read_from_a_damaged_bundle(folder: Path) -> None:
    (folder / "weights.bin").unlink()
    assert read_manifest(folder).source.path.endswith("tiny.gguf")
