"""A tiny random BERT in Hugging Face's layout, written by hand: weights, config, vocabulary."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORDS = ("the", "cat", "sat", "on", "mat", "dog", "##s", "!", "a", "b", "c")
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
CLS, SEP = 2, 3
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
    "vocab_size": len(VOCABULARY),
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "absolute",
    "torch_dtype": None,
}
Arrays = dict[str, NDArray[Any]]


def random_tensors(config: dict[str, Any] = CONFIG, prefix: str = "") -> Arrays:
    """Every tensor of a BertModel, under its published name."""
    random = np.random.default_rng(7)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
        "pooler.dense.weight": (hidden, hidden),
    }
    dense = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "attention.output.LayerNorm": (hidden,),
        "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
        "output.LayerNorm": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in dense.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
    return {
        prefix + name: random.normal(0.2, 0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def cross_encoder_tensors(config: dict[str, Any] = CONFIG) -> Arrays:
    """Every tensor of a Bert- or RobertaForSequenceClassification of one label."""
    hidden = config["hidden_size"]
    tensors = random_tensors(config, "bert." if config["model_type"] == "bert" else "roberta.")
    random = np.random.default_rng(8)
    head = ("bert.pooler.dense", "classifier")
    if "roberta" in config["model_type"]:
        del tensors["roberta.pooler.dense.weight"]
        head = ("classifier.dense", "classifier.out_proj")
    for name, rows in zip(head, (hidden, 1), strict=True):
        tensors[f"{name}.weight"] = random.normal(0, 0.4, (rows, hidden)).astype(np.float32)
        tensors[f"{name}.bias"] = random.normal(0, 0.4, (rows,)).astype(np.float32)
    return tensors


def safetensors_bytes(tensors: Arrays, dtypes: dict[str, str] | None = None) -> bytes:
    """The file format. `dtypes` overrides what the header calls a tensor's storage."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    names = {"float32": "F32", "float16": "F16", "float64": "F64", "int64": "I64", "uint16": "BF16"}
    for name, array in tensors.items():
        begin = len(data)
        data += array.tobytes()
        dtype = (dtypes or {}).get(name, names[array.dtype.name])
        offsets = [begin, len(data)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def write_bert(
    folder: Path,
    tensors: Arrays | None = None,
    pooling: str | None = "mean_tokens",
    max_tokens: int | None = None,
    **config: Any,
) -> Path:
    """The path of the weights. `pooling` None: no modules.json, as of a plain encoder."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = CONFIG | config
    tensors = random_tensors(merged) if tensors is None else tensors
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    write_json(folder / "config.json", merged)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", "utf-8")
    if max_tokens is not None:
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens})
    if pooling is not None:
        write_modules(folder, "Transformer", "Pooling", "Normalize")
        modes = {f"pooling_mode_{pooling}": True, "pooling_mode_max_tokens": False}
        write_json(folder / "1_Pooling" / "config.json", modes)
    return folder / "model.safetensors"


def write_modules(folder: Path, *kinds: str) -> None:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {"idx": i, "path": paths.get(kind, "x"), "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value), "utf-8")
