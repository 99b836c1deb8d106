"""A corpus of broken model files, each written by a function: damaged, hostile, or merely wrong.

Every entry of `CORPUS` writes into an empty folder and returns the path that a user would give.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.gguf_files import write_tiny_llama_gguf
from tests.engine.hf_folders import (
    LAYERS,
    encode_safetensors,
    linear_names,
    random_llama,
    write_folder,
    write_safetensors,
    write_shards,
)
from tests.engine.quantized_files import awq_gemm, random_layer

Writer = Callable[[Path], Path]
CORPUS: dict[str, Writer] = {}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}


def case(name: str) -> Callable[[Writer], Writer]:
    def register(writer: Writer) -> Writer:
        assert name not in CORPUS, name
        CORPUS[name] = writer
        return writer

    return register


def safetensors_case(name: str, data: bytes) -> None:
    """A folder whose weights are these bytes."""

    def write(folder: Path) -> Path:
        path = write_folder(folder)
        path.write_bytes(data)
        return path

    CORPUS[f"safetensors: {name}"] = write


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def two(first: Any, second: Any) -> bytes:
    return with_header({"a": first, "b": second}, bytes(16))


for _name, _data in {
    "empty": b"",
    "seven bytes": bytes(7),
    "a length that is no header": struct.pack("<Q", 1 << 63) + b"{}",
    "a header that ends behind the file": struct.pack("<Q", 1000) + b"{}",
    "a header of 200 MB that is not there": struct.pack("<Q", 200 << 20) + b"{" * 100,
    "no JSON": with_header(b"{nonsense"),
    "a list": with_header([1, 2]),
    "not UTF-8": with_header(b'{"\xff\xfe": 1}'),
    "nested deep": with_header(b'{"a":' + b"[" * 100_000),
    "a bomb of lists": with_header(b'{"a":[' + b"[]," * (5 << 20) + b"[]]}"),
    "a bomb of numbers": with_header(b'{"a":[' + b"9," * (7 << 20) + b"9]}"),
    "a number of a million digits": with_header(b'{"a":' + b"9" * 1_000_000 + b"}"),
    "the same name twice": with_header(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "a negative offset": with_header({"a": entry(offsets=(-8, 0))}, bytes(8)),
    "an offset backwards": with_header({"a": entry(offsets=(8, 0))}, bytes(8)),
    "overlapping tensors": two(entry(), entry(offsets=(4, 12))),
    "a gap between tensors": two(entry(), entry(offsets=(12, 20))),
    "a tensor behind the end": with_header({"a": entry(offsets=(0, 8))}, bytes(4)),
    "bytes behind the tensors": with_header({"a": entry()}, bytes(12)),
    "an unknown storage": with_header({"a": entry(dtype="F5")}, bytes(8)),
    "a storage that is a number": with_header({"a": entry(dtype=4)}, bytes(8)),
    "a shape that does not fit": with_header({"a": entry(shape=(3,))}, bytes(8)),
    "a shape beyond all numbers": with_header({"a": entry(shape=(1 << 62,) * 4)}, bytes(8)),
    "a negative shape": with_header({"a": entry(shape=(-2, -1))}, bytes(8)),
    "a shape of floats": with_header({"a": entry(shape=(2.0,))}, bytes(8)),
    "a shape of 1000 dimensions": with_header({"a": entry(shape=(1,) * 1000)}, bytes(8)),
    "an entry that is a text": with_header({"a": "F32"}, bytes(8)),
    "a name of a megabyte": with_header({"a" * (1 << 20): entry()}, bytes(8)),
    "another model": encode_safetensors({"weight": np.zeros(3, np.float32)}),
    "half a file": encode_safetensors(random_llama())[:200_000],
    "a zip archive": b"PK\x03\x04" + bytes(100),
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}.items():
    safetensors_case(_name, _data)


def index_case(name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """A sharded model whose index was changed; `change` may return another document."""

    def write(folder: Path) -> Path:
        write_folder(folder).unlink()
        index = write_shards(folder, random_llama())
        document = json.loads(index.read_text())
        changed = change(document)
        index.write_text(json.dumps(document if changed is None else changed))
        return index

    CORPUS[f"index: {name}"] = write


def to_shard(name: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["weight_map"]["model.norm.weight"] = name

    return change


for _name, _change in {
    "a list": lambda document: [document],
    "without a map": lambda document: {"metadata": {}},
    "an empty map": lambda document: {"weight_map": {}},
    "a map that is a list": lambda document: {"weight_map": ["a"]},
    "a shard above the folder": to_shard("../secret.safetensors"),
    "a shard at an absolute path": to_shard("/etc/passwd"),
    "a shard below": to_shard("sub/x.safetensors"),
    "a shard on a drive": to_shard("C:\\x.safetensors"),
    "a shard that is hidden": to_shard(".x.safetensors"),
    "a shard with a NUL": to_shard("x\0.safetensors"),
    "a shard that is the index": to_shard("model.safetensors.index.json"),
    "a shard that is missing": to_shard("missing.safetensors"),
    "a shard that is a number": to_shard(5),  # type: ignore[arg-type]
    "a tensor in another shard": to_shard("model-00001-of-00003.safetensors"),
    "a tensor that is nowhere": lambda document: document["weight_map"].update(
        {"ghost": "model-00001-of-00003.safetensors"}
    ),
    "ten thousand shards": lambda document: {
        "weight_map": {str(n): f"{n}.safetensors" for n in range(10_000)}
    },
}.items():
    index_case(_name, _change)


@case("index: cut off")
def cut_off_index(folder: Path) -> Path:
    index = CORPUS["index: a shard that is missing"](folder)
    index.write_bytes(index.read_bytes()[:-50])
    return index


@case("index: a tensor in two shards")
def twice_in_shards(folder: Path) -> Path:
    write_folder(folder).unlink()
    index = write_shards(folder, random_llama())
    shutil.copy(
        folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors"
    )
    return index


@case("index: a shard that is a folder")
def folder_as_shard(folder: Path) -> Path:
    index = CORPUS["index: a shard that is missing"](folder)
    (folder / "missing.safetensors").mkdir()
    return index


@case("index: a shard that links to itself")
def linked_shard(folder: Path) -> Path:
    index = CORPUS["index: a shard that is missing"](folder)
    os.symlink("missing.safetensors", folder / "missing.safetensors")
    return index


@case("safetensors: a link to nothing")
def dangling(folder: Path) -> Path:
    path = write_folder(folder)
    path.unlink()
    os.symlink("nowhere", path)
    return path


def text_case(file: str, name: str, content: bytes | None) -> None:
    """A whole model but for one text file; None removes it."""

    def write(folder: Path) -> Path:
        path = write_folder(folder)
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(content)
        return path

    CORPUS[f"{file}: {name}"] = write


BAD_JSON: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{nonsense",
    "a list": b"[1]",
    "a text": b'"x"',
    "not UTF-8": b'{"model_type": "\xff"}',
    "nested deep": b'{"a":' + b"[" * 100_000,
    "a bomb of lists": b'{"a":[' + b"[]," * (5 << 20) + b"[]]}",
    "binary": bytes(range(256)),
    "17 MB": b'{"a": "' + b"x" * (17 << 20) + b'"}',
}
for _file in ("config.json", "generation_config.json", "tokenizer_config.json"):
    for _name, _data in BAD_JSON.items():
        text_case(_file, _name, _data)
for _name, _data in (BAD_JSON | {"nested deep": b"[" * 1_000_000}).items():
    if _name not in ("a bomb of lists", "17 MB"):
        text_case("tokenizer.json", _name, _data)
text_case("config.json", "missing", None)
text_case("tokenizer.json", "missing", None)
for _name, _model in {
    "an unknown kind": {"type": "Magic"},
    "merges of no tokens": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]},
    "no vocabulary": {"type": "BPE", "vocab": {}, "merges": []},
    "ids far apart": {"type": "BPE", "vocab": {"a": 0, "b": 4_000_000_000}, "merges": []},
    "a negative id": {"type": "BPE", "vocab": {"a": -1}, "merges": []},
    "an unk that is not there": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 7},
}.items():
    text_case("tokenizer.json", _name, json.dumps({"version": "1.0", "model": _model}).encode())


def config_case(name: str, **values: Any) -> None:
    CORPUS[f"config.json: {name}"] = lambda folder: write_folder(folder, config=values)


config_case("a billion layers", num_hidden_layers=10**9)
config_case("no layers", num_hidden_layers=0)
config_case("a size beyond all numbers", hidden_size=10**30)
config_case("a negative size", intermediate_size=-5)
config_case("a size that is a text", hidden_size="64")
config_case("a size that is true", num_attention_heads=True)
config_case("a vocabulary of 2^60", vocab_size=1 << 60)
config_case("an epsilon that is no number", rms_norm_eps=float("nan"))
config_case("an endless theta", rope_theta=float("inf"))
config_case("scaling that is a list", rope_scaling=[1, 2])
config_case("scaling by nothing", rope_scaling={"rope_type": "linear", "factor": 0})
config_case("an architecture nobody knows", model_type="mystery")
config_case("a quantization nobody knows", quantization_config={"quant_method": "mystery"})
config_case("heads that do not fit", num_attention_heads=3)
config_case("a text part that is a text", text_config="x", model_type="gemma3")


def sentencepiece_case(name: str, data: bytes) -> None:
    def write(folder: Path) -> Path:
        path = write_folder(folder)
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer.model").write_bytes(data)
        return path

    CORPUS[f"tokenizer.model: {name}"] = write


def field(number: int, data: bytes) -> bytes:
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


def sentencepiece_bytes() -> bytes:
    """A sound BPE model of three control pieces, a charsmap of none, and the ASCII letters."""
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("▁", 1)]
    pieces += [(chr(code), 1) for code in range(0x21, 0x7F)]
    messages = [
        field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", -n) + bytes([0x18, kind]))
        for n, (text, kind) in enumerate(pieces)
    ]
    return b"".join(messages) + BPE_TRAINER + field(3, b"\x18\x01\x20\x00")


PIECE = field(1, field(1, b"a") + b"\x15\0\0\0\0")
BPE_TRAINER = field(2, b"\x18\x02")
for _name, _data in {
    "empty": b"",
    "random": bytes(range(255, 0, -1)),
    "tiktoken's format": b"IQ== 0\nIg== 1\nIw== 2\n",
    "a length behind the end": b"\x0a\xff\xff\xff\xff\x0f",
    "a length of 2^63": b"\x0a" + b"\xff" * 9 + b"\x01",
    "a number without end": b"\x08" + b"\xff" * 20,
    "an unknown field type": b"\x0b\x00",
    "a piece that is a number": b"\x08\x01",
    "a piece that is not UTF-8": field(1, field(1, b"\xff\xfe")),
    "a score that is a text": field(1, field(1, b"a") + field(2, b"x")),
    "the same piece twice": BPE_TRAINER + PIECE + PIECE,
    "a kind nobody knows": field(2, b"\x18\x09") + PIECE,
    "a charsmap that is none": BPE_TRAINER + PIECE + field(3, field(2, b"\xff\xff\xff\x7frubbish")),
    "more pieces than the model": BPE_TRAINER
    + b"".join(field(1, field(1, str(n).encode())) for n in range(1000)),
}.items():
    sentencepiece_case(_name, _data)


def awq_case(name: str, change: Callable[[dict[str, Any]], object]) -> None:
    def write(folder: Path) -> Path:
        tensors: dict[str, Any] = dict(random_llama())
        for layer in range(LAYERS):
            for base, (rows, cols) in linear_names(layer).items():
                del tensors[f"{base}.weight"]
                tensors |= awq_gemm(base, random_layer(rows, cols, 32))
        tensors = {key: np.array(value) for key, value in tensors.items()}
        change(tensors)
        return write_folder(folder, tensors, {"quantization_config": AWQ})

    CORPUS[f"AWQ: {name}"] = write


_SCALES = "model.layers.0.mlp.up_proj.scales"
_WORDS = "model.layers.0.mlp.up_proj.qweight"
awq_case("scales that are no numbers", lambda tensors: tensors[_SCALES].fill(np.nan))
awq_case("endless scales", lambda tensors: tensors[_SCALES].fill(np.inf))
awq_case("no zeros", lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.qzeros"))
awq_case("too few words", lambda tensors: tensors.update({_WORDS: tensors[_WORDS][:-1]}))
awq_case("a flat matrix", lambda tensors: tensors.update({_WORDS: tensors[_WORDS].reshape(-1)}))
awq_case(
    "words of 8 bits", lambda tensors: tensors.update({_WORDS: tensors[_WORDS].astype(np.int8)})
)


def weights_case(name: str, tensor: str, value: float) -> None:
    def write(folder: Path) -> Path:
        tensors = random_llama()
        tensors[tensor].reshape(-1)[7] = value
        return write_folder(folder, tensors)

    CORPUS[f"weights: {name}"] = write


weights_case("a value that is no number", "model.layers.1.mlp.down_proj.weight", np.nan)
weights_case("an endless value", "model.embed_tokens.weight", np.inf)
weights_case("a norm that is no number", "model.norm.weight", np.nan)


@case("weights: a bias that is no number")
def bad_bias(folder: Path) -> Path:
    tensors = random_llama()
    for base, (rows, _) in [pair for n in range(LAYERS) for pair in linear_names(n).items()]:
        if "self_attn" in base:
            tensors[f"{base}.bias"] = np.full(rows, np.nan, np.float32)
    return write_folder(folder, tensors, {"attention_bias": True})


def gguf_case(name: str, change: Callable[[bytes], bytes]) -> None:
    def write(folder: Path) -> Path:
        path = write_tiny_llama_gguf(folder / "tiny.gguf")
        path.write_bytes(change(path.read_bytes()))
        return path

    CORPUS[f"GGUF: {name}"] = write


def patched(position: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + new + data[position + len(new) :]


for _name, _edit in {
    "empty": lambda data: b"",
    "the magic alone": lambda data: data[:4],
    "half a header": lambda data: data[:1000],
    "half the weights": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-40],
    "big-endian": lambda data: b"FUGG" + data[4:],
    "big-endian by its version": patched(4, struct.pack(">I", 3)),
    "version 1": patched(4, struct.pack("<I", 1)),
    "version 99": patched(4, struct.pack("<I", 99)),
    "2^64 tensors": patched(8, b"\xff" * 8),
    "2^40 metadata entries": patched(16, struct.pack("<Q", 1 << 40)),
    "a key of 2^63 bytes": patched(24, struct.pack("<Q", 1 << 63)),
    "a key of no bytes": patched(24, struct.pack("<Q", 0)),
    "zeros": lambda data: bytes(len(data)),
    "a page of HTML": lambda data: b"<!DOCTYPE html><html></html>",
}.items():
    gguf_case(_name, _edit)


@case("folder: weights that can run code")
def pickled(folder: Path) -> Path:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    return folder / "pytorch_model.bin"


@case("folder: a device")
def device(folder: Path) -> Path:
    write_folder(folder).unlink()
    os.symlink("/dev/zero", folder / "model.safetensors")
    return folder / "model.safetensors"


@case("safetensors: a hole of a terabyte")
def sparse(folder: Path) -> Path:
    """Takes no room on the disk; whoever believed its header would read for hours."""
    path = write_folder(folder)
    write_safetensors(path, random_llama())
    with path.open("r+b") as stream:
        stream.truncate(1 << 40)
    return path
