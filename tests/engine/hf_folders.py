"""Writes tiny models in Hugging Face's layout for tests: a llama, a byte-level tokenizer.

`write_safetensors` knows the container and nothing of models. Every part can be changed by the
caller, so that the tests of damaged files start from a valid one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.engine.gguf_files import SPECIAL_TOKENS, byte_alphabet, tiny_merges

DTYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "int8": "I8"}
Arrays = Mapping[str, NDArray[Any]]
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 128, 4, 2, 2, 320
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves, rounded to nearest even: what `write_safetensors` stores as BF16."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16)


def encode_safetensors(tensors: Arrays) -> bytes:
    """uint16 arrays are written as BF16."""
    header: dict[str, Any] = {}
    chunks, position = [], 0
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        dtype = "BF16" if array.dtype == np.uint16 else DTYPES[array.dtype.name]
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [position, position + len(data)],
        }
        chunks.append(data)
        position += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(chunks)


def write_safetensors(path: Path, tensors: Arrays) -> Path:
    path.write_bytes(encode_safetensors(tensors))
    return path


def linear_names(layer: int) -> dict[str, tuple[int, int]]:
    """Name without suffix → [outputs, inputs] of a layer's matrices."""
    prefix, head = f"model.layers.{layer}.", HIDDEN // HEADS
    return {
        f"{prefix}self_attn.q_proj": (HIDDEN, HIDDEN),
        f"{prefix}self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        f"{prefix}self_attn.v_proj": (KV_HEADS * head, HIDDEN),
        f"{prefix}self_attn.o_proj": (HIDDEN, HIDDEN),
        f"{prefix}mlp.gate_proj": (INNER, HIDDEN),
        f"{prefix}mlp.up_proj": (INNER, HIDDEN),
        f"{prefix}mlp.down_proj": (HIDDEN, INNER),
    }


def random_llama(seed: int = 0, is_tied: bool = False) -> dict[str, NDArray[np.float32]]:
    """Norms near one, matrices scaled so that activations stay of order one."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float32]] = {}

    def matrix(name: str, rows: int, cols: int) -> None:
        values = rng.standard_normal((rows, cols), np.float32)
        tensors[f"{name}.weight"] = values / np.float32(cols**0.5)

    def norm(name: str) -> None:
        values = rng.standard_normal(HIDDEN, np.float32)
        tensors[f"{name}.weight"] = 1 + values * np.float32(0.1)

    matrix("model.embed_tokens", VOCAB, HIDDEN)
    for layer in range(LAYERS):
        norm(f"model.layers.{layer}.input_layernorm")
        norm(f"model.layers.{layer}.post_attention_layernorm")
        for name, shape in linear_names(layer).items():
            matrix(name, *shape)
    norm("model.norm")
    if not is_tied:
        matrix("lm_head", VOCAB, HIDDEN)
    return tensors


def byte_level_tokenizer(vocab_size: int = VOCAB) -> Tokenizer:
    """3 control tokens, 256 bytes and merges; puts `<|im_start|>` before a text."""
    merges = tiny_merges(vocab_size - 256 - len(SPECIAL_TOKENS))
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*SPECIAL_TOKENS, *byte_alphabet(), *merged]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(folder: Path, vocab_size: int = VOCAB) -> None:
    (folder / "tokenizer.json").write_text(byte_level_tokenizer(vocab_size).to_str(), "utf-8")


def write_folder(
    folder: Path, tensors: Arrays | None = None, config: Mapping[str, Any] | None = None
) -> Path:
    """A whole model in one file; `config` is laid over `CONFIG`. Returns the weights' path."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = CONFIG | dict(config or {})
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    write_tokenizer(folder)
    weights = random_llama() if tensors is None else tensors
    return write_safetensors(folder / "model.safetensors", weights)


def write_shards(folder: Path, tensors: Arrays, count: int = 3) -> Path:
    """The same weights in `count` files. Returns the path of the index."""
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(count):
        shard = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in names[number::count]}
        write_safetensors(folder / shard, part)
        weight_map |= dict.fromkeys(part, shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), "utf-8")
    return index
