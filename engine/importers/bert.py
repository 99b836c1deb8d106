"""A BERT-family embedding model or cross-encoder in Hugging Face's layout: a folder around
`model.safetensors`.

    config.json                  the numbers
    model.safetensors            the weights
    tokenizer.json or vocab.txt  (`bert_tokenizer.py`)
    modules.json, 1_Pooling/     sentence-transformers: what follows the encoder (`pooling.py`)

A classifier of one label is a cross-encoder, which scores a query and a document; one of several
labels is refused. Whatever would change an embedding or a score and is not done here is refused by
name. The weights are not read on opening.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from engine.architectures.encoder import EncoderConfig, encoder_shapes
from engine.errors import ImportFailed
from engine.importers.bert_tokenizer import read_pair_separator, read_tokenizer
from engine.importers.gguf_metadata import Metadata
from engine.importers.json_file import read_settings
from engine.importers.pooling import SentenceSettings, read_sentence_settings
from engine.importers.safetensors_reader import SafetensorsFile, TensorEntry, open_safetensors
from engine.importers.summary import CheckpointSummary

CONFIG_FILE = "config.json"
COMPANION_FILES = (
    CONFIG_FILE, "tokenizer.json", "tokenizer_config.json", "vocab.txt", "modules.json",
    "sentence_bert_config.json", "1_Pooling/config.json",
)  # fmt: skip
"""What may lie around the weights and says how to use them; relative to their folder."""

MAX_SIZE = 1 << 24
ACTIVATIONS = MappingProxyType(
    {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
)
# Rows of the position table that come before the first token's.
POSITION_OFFSETS = MappingProxyType({"bert": 0, "roberta": 2, "xlm-roberta": 2})

_LAYER_TENSORS = MappingProxyType(
    {
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "o": "attention.output.dense",
        "attn_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "mlp_norm": "output.LayerNorm",
    }
)
_TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
_POSITIONS = "embeddings.position_embeddings.weight"
_GLOBAL_TENSORS = MappingProxyType(
    {
        "embed": "embeddings.word_embeddings.weight",
        "embed_norm.weight": "embeddings.LayerNorm.weight",
        "embed_norm.bias": "embeddings.LayerNorm.bias",
    }
)
# The head of a cross-encoder, by the name of what gives the logit.
_HEADS = MappingProxyType(
    {
        "classifier": {"pooler": "pooler.dense", "score": "classifier"},
        "classifier.out_proj": {"pooler": "classifier.dense", "score": "classifier.out_proj"},
    }
)
# Heads for pre-training and buffers: no embedding depends on them.
_UNUSED_PREFIXES = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids")
# Made of other tensors of the file.
_COMPOSED = ("position_embed", "second_type")


def read_bert(path: Path) -> BertCheckpoint:
    """Opens and checks everything but the weights' values. Raises ImportFailed."""
    file = open_safetensors(path)
    folder = path.parent
    settings = read_settings(folder / CONFIG_FILE)
    sentence = read_sentence_settings(folder)
    config = read_config(settings, sentence)
    head = find_head(file)
    tokenizer_json = read_tokenizer(folder, config.vocab_size, sentence.lowercases)
    if head is not None:
        separator = read_pair_separator(folder, tokenizer_json)
        config = replace(config, pooling="cls", pair_separator=separator)
    tensors = match_tensors(file, config, settings, head or {})
    return BertCheckpoint(file, config, tensors, tokenizer_json, str(settings.values["model_type"]))


@dataclass(frozen=True, slots=True)
class EncoderTensors:
    """Canonical name → entry of the file; `position_embed` is made of two tables."""

    entries: dict[str, TensorEntry]
    positions: TensorEntry
    position_offset: int
    token_types: TensorEntry | None


class BertCheckpoint:
    """An encoder as found on disk. Holds the file's mapping for as long as it lives."""

    chat_template = None

    def __init__(
        self,
        file: SafetensorsFile,
        config: EncoderConfig,
        tensors: EncoderTensors,
        tokenizer_json: str,
        model_type: str,
    ) -> None:
        self._file = file
        self._tensors = tensors
        self._model_type = model_type
        self.config = config
        self.tokenizer_json = tokenizer_json

    @cached_property
    def digest(self) -> str:
        """Of the weights, in hex."""
        with self._file.path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    @property
    def summary(self) -> CheckpointSummary:
        return CheckpointSummary(
            title=self._file.path.absolute().parent.name,
            licence="",
            quantization=self._tensors.entries["layers.0.up.weight"].dtype,
            pre_tokenizer=self._model_type,
            num_parameters=sum(prod(s) for s in encoder_shapes(self.config).values()),
            file_name=self._file.path.name,
            num_file_bytes=self._file.path.stat().st_size,
        )

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor of `encoder_shapes`, by its canonical name. Raises ImportFailed for its values.

        `position_embed` has the embedding of token type 0, which all texts have, added to it;
        `second_type` is what type 1 has more.
        """
        if name == "position_embed":
            values = self._positions()
        elif name == "second_type":
            values = self._second_type()
        else:
            values = self._file.read(self._tensors.entries[name])
        if not np.isfinite(values).all():
            raise ImportFailed(
                f"{self._file.path}: tensor {name!r} holds values that are no number"
            )
        return values

    def _positions(self) -> NDArray[np.float32]:
        first = self._tensors.position_offset
        table = self._file.read(self._tensors.positions)[first:][: self.config.context_length]
        types = self._tensors.token_types
        return table if types is None else table + self._file.read(types)[0]

    def _second_type(self) -> NDArray[np.float32]:
        """Models with one type of tokens tell a query and a document apart by their separator."""
        types = self._tensors.token_types
        if types is None or types.shape[0] < 2:
            return np.zeros(self.config.hidden_size, np.float32)
        table = self._file.read(types)
        difference: NDArray[np.float32] = table[1] - table[0]
        return difference


def read_config(settings: Metadata, sentence: SentenceSettings) -> EncoderConfig:
    """Raises ImportFailed for a model that is no encoder of this family."""
    model_type = settings.string("model_type")
    if model_type not in POSITION_OFFSETS:
        raise ImportFailed(
            f"{settings.path}: models of type {model_type!r} cannot be imported from safetensors; "
            f"supported: {', '.join(POSITION_OFFSETS)} (embedding models); give a GGUF file for "
            "a model that writes text"
        )
    _refuse_settings(settings)
    hidden_size = settings.integer("hidden_size", 1, MAX_SIZE)
    num_heads = settings.integer("num_attention_heads", 1, hidden_size)
    if hidden_size % num_heads:
        raise settings.wrong("num_attention_heads", f"a divisor of {hidden_size}")
    places = settings.integer("max_position_embeddings", 1, MAX_SIZE)
    places -= POSITION_OFFSETS[model_type]
    activation = settings.string("hidden_act")
    if activation not in ACTIVATIONS:
        raise settings.wrong("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    return EncoderConfig(
        architecture=model_type,
        num_layers=settings.integer("num_hidden_layers", 1, 1024),
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size", 1, MAX_SIZE),
        num_heads=num_heads,
        vocab_size=settings.integer("vocab_size", 1, MAX_SIZE),
        context_length=min(places, sentence.max_tokens or places),
        layer_norm_eps=settings.positive_float("layer_norm_eps", 1e-12),
        activation=ACTIVATIONS[activation],
        pooling=sentence.pooling,
    )


def _refuse_settings(settings: Metadata) -> None:
    if settings.values.get("position_embedding_type", "absolute") != "absolute":
        raise settings.wrong("position_embedding_type", "'absolute'")
    if settings.values.get("is_decoder", False) is not False:
        raise settings.wrong("is_decoder", "false: only encoders give embeddings")


def find_head(file: SafetensorsFile) -> Mapping[str, str] | None:
    """The names of a cross-encoder's head, `pooler` and `score` → name in the file; None if there
    is none. Raises ImportFailed for a classifier of several labels."""
    for score, names in _HEADS.items():
        entry = file.entries.get(f"{score}.weight")
        if entry is None:
            continue
        if len(entry.shape) != 2 or entry.shape[0] != 1:
            raise ImportFailed(
                f"{file.path} is a classifier ({entry.name!r} has the shape {list(entry.shape)}), "
                "which cannot be imported; give an embedding model, or a cross-encoder, which has "
                "one label"
            )
        return names
    return None


def match_tensors(
    file: SafetensorsFile, config: EncoderConfig, settings: Metadata, head: Mapping[str, str]
) -> EncoderTensors:
    """Finds every tensor and checks its shape; one that has no role is refused, not ignored.

    `head` as `find_head` gives it, or empty.
    """
    by_name = {_without_prefix(name): entry for name, entry in file.entries.items()}
    names = {n: _name_in_file(n, head) for n in encoder_shapes(config) if n not in _COMPOSED}
    _refuse_others(file, by_name, {*names.values(), _TOKEN_TYPES, _POSITIONS}, config)
    entries = {
        name: _find(file, by_name, names[name], shape)
        for name, shape in encoder_shapes(config).items()
        if name in names
    }
    num_places = settings.integer("max_position_embeddings", 1, MAX_SIZE)
    num_types = settings.integer("type_vocab_size", 0, MAX_SIZE, default=2)
    types = None
    if num_types:
        types = _find(file, by_name, _TOKEN_TYPES, (num_types, config.hidden_size))
    return EncoderTensors(
        entries=entries,
        positions=_find(file, by_name, _POSITIONS, (num_places, config.hidden_size)),
        position_offset=POSITION_OFFSETS[config.architecture],
        token_types=types,
    )


def _name_in_file(name: str, head: Mapping[str, str]) -> str:
    """`layers.0.q.weight` → `encoder.layer.0.attention.self.query.weight`."""
    if name in _GLOBAL_TENSORS:
        return _GLOBAL_TENSORS[name]
    part, _, last = name.partition(".")
    if part in head:
        return f"{head[part]}.{last}"
    _, layer, role, kind = name.split(".")
    return f"encoder.layer.{layer}.{_LAYER_TENSORS[role]}.{kind}"


def _without_prefix(name: str) -> str:
    """Models with a head keep the encoder below its own name."""
    for prefix in ("bert.", "roberta."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _refuse_others(
    file: SafetensorsFile,
    by_name: dict[str, TensorEntry],
    known: Set[str],
    config: EncoderConfig,
) -> None:
    for name in by_name.keys() - known:
        if not name.startswith(_UNUSED_PREFIXES):
            raise ImportFailed(
                f"{file.path}: tensor {name!r} has no role in a {config.architecture}"
            )


def _find(
    file: SafetensorsFile, by_name: dict[str, TensorEntry], name: str, shape: tuple[int, ...]
) -> TensorEntry:
    if name not in by_name:
        raise ImportFailed(f"{file.path}: tensor {name!r} is missing; download the model again")
    entry = by_name[name]
    if entry.shape != shape:
        raise ImportFailed(
            f"{file.path}: tensor {name!r} has the shape {list(entry.shape)}, "
            f"{CONFIG_FILE} asks for {list(shape)}"
        )
    return entry
