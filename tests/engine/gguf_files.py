"""Writes tiny GGUF files for tests: a llama architecture, a byte-level tokenizer, random weights.

`write_gguf` knows the container and nothing of models; `write_tiny_llama_gguf` is a whole model.
Every part can be changed by the caller, so that the tests of damaged files start from a valid one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]
Metadata = dict[str, Value]

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class RawTensor:
    """`shape` is numpy's order (rows first); `data` is the encoded storage."""

    shape: tuple[int, ...]
    quant: str
    data: bytes


@dataclass
class GgufParts:
    """What `write_gguf` puts together; change a part to get an odd or a damaged file."""

    metadata: Metadata
    tensors: dict[str, RawTensor]
    version: int = 3
    alignment: int = 32
    trailing: bytes = field(default=b"")


def encode_tensor(values: NDArray[np.float32], quant: str) -> RawTensor:
    data = quantize(np.ascontiguousarray(values), GGMLQuantizationType[quant])
    return RawTensor(values.shape, quant, data.tobytes())


def encode_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def encode_value(value: Value) -> bytes:
    """The type code and the value. Ints are UINT32, floats FLOAT32, int arrays INT32, float arrays
    FLOAT32."""
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + encode_string(value)
    if value and isinstance(value[0], str):
        items = b"".join(encode_string(str(item)) for item in value)
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + items
    if value and isinstance(value[0], float):
        return struct.pack("<IIQ", ARRAY, FLOAT32, len(value)) + np.array(value, "<f4").tobytes()
    numbers = np.array(value, dtype="<i4").tobytes()
    return struct.pack("<IIQ", ARRAY, INT32, len(value)) + numbers


def encode_header(parts: GgufParts) -> bytes:
    """Everything before the padding that precedes the tensors' data."""
    out = [b"GGUF", struct.pack("<IQQ", parts.version, len(parts.tensors), len(parts.metadata))]
    for key, value in parts.metadata.items():
        out += [encode_string(key), encode_value(value)]
    offset = 0
    for name, tensor in parts.tensors.items():
        dims = tuple(reversed(tensor.shape))
        code = int(GGMLQuantizationType[tensor.quant])
        out.append(encode_string(name))
        out.append(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset))
        offset += len(tensor.data) + (-len(tensor.data) % parts.alignment)
    return b"".join(out)


def encode_gguf(parts: GgufParts) -> bytes:
    header = encode_header(parts)
    out = [header, b"\0" * (-len(header) % parts.alignment)]
    for tensor in parts.tensors.values():
        out += [tensor.data, b"\0" * (-len(tensor.data) % parts.alignment)]
    return b"".join(out) + parts.trailing


def write_gguf(path: Path, parts: GgufParts) -> Path:
    path.write_bytes(encode_gguf(parts))
    return path


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte (Radford et al. 2019), indexed by the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = dict(zip(printable, map(chr, printable), strict=True))
    letters |= {byte: chr(0x100 + index) for index, byte in enumerate(rest)}
    return [letters[byte] for byte in range(256)]


def tiny_merges(count: int) -> list[str]:
    """The first `count` of a fixed list of pairs: a space or a consonant before a vowel, ..."""
    pairs = [f"Ġ {letter}" for letter in "taoiswcbphfmdnrl"]
    pairs += [f"{a} {b}" for a in "hrnstldmc" for b in "eaiou"]
    pairs += ["Ġt he", "Ġa n", "Ġi n", "l l", "Ġh e", "s t"]
    if count > len(pairs):
        raise ValueError(f"at most {len(pairs)} merges exist, {count} were asked for")
    return pairs[:count]


def tiny_tokenizer_metadata(vocab_size: int) -> Metadata:
    """3 control tokens, 256 bytes, and one merged token for each of the remaining ids."""
    merges = tiny_merges(vocab_size - 256 - len(SPECIAL_TOKENS))
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*SPECIAL_TOKENS, *byte_alphabet(), *merged]
    types = [3] * len(SPECIAL_TOKENS) + [1] * (vocab_size - len(SPECIAL_TOKENS))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": IM_START,
        "tokenizer.ggml.eos_token_id": IM_END,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], seed: int, quant: str
) -> dict[str, RawTensor]:
    """Norms near one in F32, the embedding in Q8_0 (unless floats were asked for), the rest as
    `quant`. Matrices are scaled by 1 / sqrt(inputs), so that activations stay of order one."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            tensors[name] = encode_tensor(np.float32(1) + values / np.float32(8), "F32")
            continue
        is_float_embed = name == "token_embd.weight" and quant.startswith("Q")
        scaled = values / np.float32(np.sqrt(shape[1]))
        tensors[name] = encode_tensor(scaled, "Q8_0" if is_float_embed else quant)
    return tensors


class TinyLlama(TypedDict, total=False):
    """Sizes in elements; every matrix's input size must be a multiple of the quant's block (32)."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    tied_embeddings: bool
    seed: int
    quant: str


DEFAULTS: TinyLlama = {
    "num_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_size": 32,
    "vocab_size": 320,
    "context_length": 512,
    "rope_theta": 10_000.0,
    "tied_embeddings": True,
    "seed": 0,
    "quant": "Q4_1",
}


def tiny_llama_metadata(model: TinyLlama) -> Metadata:
    return {
        "general.architecture": "llama",
        "general.name": "tiny llama",
        "llama.block_count": model["num_layers"],
        "llama.context_length": model["context_length"],
        "llama.embedding_length": model["hidden_size"],
        "llama.feed_forward_length": model["intermediate_size"],
        "llama.attention.head_count": model["num_heads"],
        "llama.attention.head_count_kv": model["num_kv_heads"],
        "llama.attention.key_length": model["head_size"],
        "llama.attention.value_length": model["head_size"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": model["rope_theta"],
        "llama.rope.dimension_count": model["head_size"],
        "llama.vocab_size": model["vocab_size"],
    }


def tiny_llama_shapes(model: TinyLlama) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    query = model["num_heads"] * model["head_size"]
    key_value = model["num_kv_heads"] * model["head_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
    }
    if not model["tied_embeddings"]:
        shapes["output.weight"] = (vocab, hidden)
    for layer in range(model["num_layers"]):
        block = f"blk.{layer}."
        shapes |= {
            block + "attn_norm.weight": (hidden,),
            block + "attn_q.weight": (query, hidden),
            block + "attn_k.weight": (key_value, hidden),
            block + "attn_v.weight": (key_value, hidden),
            block + "attn_output.weight": (hidden, query),
            block + "ffn_norm.weight": (hidden,),
            block + "ffn_gate.weight": (inner, hidden),
            block + "ffn_up.weight": (inner, hidden),
            block + "ffn_down.weight": (hidden, inner),
        }
    return shapes


def tiny_llama_parts(**changes: Unpack[TinyLlama]) -> GgufParts:
    """The parts of a valid model: `DEFAULTS` with `changes`."""
    model: TinyLlama = {**DEFAULTS, **changes}
    metadata = tiny_llama_metadata(model) | tiny_tokenizer_metadata(model["vocab_size"])
    tensors = random_tensors(tiny_llama_shapes(model), model["seed"], model["quant"])
    return GgufParts(metadata, tensors)


def write_tiny_llama_gguf(path: Path, **changes: Unpack[TinyLlama]) -> Path:
    """A valid, loadable model of about 80 kB. The same arguments give the same bytes."""
    return write_gguf(path, tiny_llama_parts(**changes))
