"""A decoder in Hugging Face's layout as a `Checkpoint`: a folder around safetensors.

    config.json                the numbers (`architectures/hf.py` knows what they mean)
    generation_config.json     more end tokens
    model.safetensors or an index with shards (`tensor_store.py`), plain or quantized
    tokenizer.json …           (`hf_tokenizer.py`), chat template (`chat_template.py`)

Every tensor of the files has a role, and every role its tensor; the weights' values are not read
on opening.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path

from engine.architectures.config import ModelConfig
from engine.architectures.hf import HF_ARCHITECTURES, find_family, read_hf_config
from engine.architectures.names import TensorNames
from engine.architectures.table import tensor_shapes
from engine.errors import ImportFailed
from engine.importers.chat_template import find_in_folder
from engine.importers.hf_tokenizer import NamedTokens, read_hf_tokenizer
from engine.importers.json_file import plain_settings, read_object, read_text_file
from engine.importers.quantization import SUPPORTED, Quantization, read_quantization
from engine.importers.quantized_linear import QuantizedLinear, is_quantized
from engine.importers.source_files import files_digest, source_files
from engine.importers.summary import CheckpointSummary
from engine.importers.tensor_store import StoredTensor, TensorStore, open_tensors
from engine.importers.tokenizer_parts import TokenizerParts
from engine.importers.weight_source import NamedSlice, PlainSource, QuantizedSource, WeightSource

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
MAX_TOKEN_ID = 1 << 24
_LICENCE = re.compile(r"^license:\s*([A-Za-z0-9._-]{1,64})\s*$", re.MULTILINE)


def read_hugging_face(path: Path) -> HfCheckpoint:
    """`path` is the safetensors file or the index. Opens and checks everything but the weights'
    values. Raises ImportFailed."""
    folder = path.parent
    document = read_document(folder / CONFIG_FILE)
    names = find_family(folder / CONFIG_FILE, document).tensors
    quantization = read_quantization(folder, document)
    store = open_tensors(path)
    prefix = find_prefix(store, names)
    settings = plain_settings(folder / CONFIG_FILE, document)
    config = read_hf_config(settings, document)
    tokenizer = read_hf_tokenizer(folder, config.vocab_size, named_tokens(folder, document))
    config = dataclasses.replace(
        config,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tokenizer.eos_token_ids,
        add_bos=tokenizer.add_bos,
    )
    tensors = TensorMatch(store, names, prefix, quantization, config).tensors()
    return HfCheckpoint(store, config, tokenizer, tensors, quantization, find_in_folder(folder))


def read_document(path: Path) -> dict[str, object]:
    """config.json; of a model with several parts, the text part over the rest."""
    document: dict[str, object] = read_object(path)
    text = document.get("text_config")
    if isinstance(text, dict):
        # The part's own name decides only where the table knows it.
        known = text.get("model_type") in HF_ARCHITECTURES
        kept = {} if known else {"model_type": document.get("model_type")}
        document = {**document, **text, **kept}
    return document


def find_prefix(store: TensorStore, names: TensorNames) -> str:
    embed = names.global_tensors["embed"]
    for prefix in names.prefixes:
        if prefix + embed in store:
            return prefix
    raise ImportFailed(f"{store.path}: tensor {embed!r} is missing; download the model again")


def named_tokens(folder: Path, document: Mapping[str, object]) -> NamedTokens:
    """generation_config.json first: it is what `generate` goes by."""
    path = folder / GENERATION_FILE
    generation = read_object(path) if path.exists() else {}
    eos = [*_token_ids(path, generation), *_token_ids(folder / CONFIG_FILE, document)]
    bos = generation.get("bos_token_id", document.get("bos_token_id"))
    is_id = isinstance(bos, int) and not isinstance(bos, bool)
    return NamedTokens(bos if is_id else None, tuple(dict.fromkeys(eos)))


def _token_ids(path: Path, document: Mapping[str, object]) -> list[int]:
    value = document.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids = [id for id in values if type(id) is int and 0 <= id < MAX_TOKEN_ID]
    if len(ids) != len(values):
        raise ImportFailed(f"{path}: eos_token_id is neither a token id nor a list of them")
    return ids


class TensorMatch:
    """Finds the tensor of every role. Raises ImportFailed for one that is missing, has another
    shape or storage, or has no role."""

    def __init__(
        self,
        store: TensorStore,
        names: TensorNames,
        prefix: str,
        quantization: Quantization | None,
        config: ModelConfig,
    ) -> None:
        self._store = store
        self._names = names
        self._prefix = prefix
        self._quantization = quantization
        self._config = config
        self._shapes = tensor_shapes(config)
        self._used: set[str] = set()

    def tensors(self) -> dict[str, NamedSlice]:
        """Canonical name → tensor."""
        found = {name: self._find(name) for name in self._shapes}
        self._refuse_unused()
        return found

    def _find(self, name: str) -> NamedSlice:
        file_name = self._file_name(name)
        sharers = [other for other in self._sharers(name) if other in self._shapes]
        first = sum(self._shapes[other][0] for other in sharers[: sharers.index(name)])
        num_rows = sum(self._shapes[other][0] for other in sharers)
        shape = (num_rows, *self._shapes[name][1:])
        source = self._source(file_name, shape)
        is_norm = len(shape) == 1 and name.endswith("norm")
        offset = self._names.norm_offset if is_norm else 0.0
        return NamedSlice(name, self._shapes[name], source, first, offset)

    def _file_name(self, name: str) -> str:
        """`layers.3.q` → `model.layers.3.self_attn.q_proj.weight`."""
        if name in self._names.global_tensors:
            return self._prefix + self._names.global_tensors[name]
        _, layer, part = name.split(".")
        base = self._names.global_tensors["embed"].partition("embed_tokens")[0]
        return f"{self._prefix}{base}layers.{layer}.{self._names.layer_tensors[part]}"

    def _sharers(self, name: str) -> list[str]:
        """All parts that lie in the same tensor of the file, in its order."""
        if name in self._names.global_tensors:
            return [name]
        prefix, _, part = name.rpartition(".")
        wanted = self._names.layer_tensors[part]
        return [f"{prefix}.{p}" for p, file in self._names.layer_tensors.items() if file == wanted]

    def _source(self, file_name: str, shape: tuple[int, ...]) -> WeightSource:
        base = file_name.removesuffix(".weight")
        if self._quantization is not None and is_quantized(self._store, base):
            if len(shape) != 2:
                raise ImportFailed(f"{self._store.path}: {base!r} is quantized but no matrix")
            linear = QuantizedLinear(self._store, base, self._quantization, (shape[0], shape[1]))
            self._used.update(linear.tensor_names)
            return QuantizedSource(linear)
        tensor = self._store.get(file_name)
        self._used.add(file_name)
        check_plain(tensor, shape)
        return PlainSource(tensor)

    def _refuse_unused(self) -> None:
        unused = self._names.unused
        tied = self._prefix + self._names.global_tensors["lm_head"]
        ignored = {tied} if self._config.tied_embeddings else set()
        left = [
            name
            for name in sorted(self._store.tensors.keys() - self._used - ignored)
            if not any(part in name for part in unused) and not self._is_zero_bias(name)
        ]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise ImportFailed(
                f"{self._store.path}: tensors without a role in a {self._config.architecture}: "
                f"{', '.join(left[:3])}{more}; such models are not supported"
            )

    def _is_zero_bias(self, name: str) -> bool:
        """GPTQ tools write a bias for every layer they pack, of zeros where there was none."""
        if not name.endswith(".bias") or not is_quantized(self._store, name.removesuffix(".bias")):
            return False
        return not self._store.get(name).floats().any()


def check_plain(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    path, entry = tensor.file.path, tensor.entry
    if entry.dtype.startswith("F8"):
        raise ImportFailed(
            f"{path}: tensor {entry.name!r} is stored as {entry.dtype} (8-bit floats), which is "
            f"not supported; supported: {SUPPORTED}"
        )
    tensor.file.check_floats(entry)
    if tensor.shape != shape:
        raise ImportFailed(
            f"{path}: tensor {entry.name!r} has the shape {list(tensor.shape)}, "
            f"{CONFIG_FILE} asks for {list(shape)}"
        )


class HfCheckpoint:
    """Implements `Checkpoint`. Holds the files' mappings for as long as it lives."""

    def __init__(
        self,
        store: TensorStore,
        config: ModelConfig,
        tokenizer: TokenizerParts,
        tensors: dict[str, NamedSlice],
        quantization: Quantization | None,
        chat_template: str | None,
    ) -> None:
        self._store = store
        self._tensors = tensors
        self._tokenizer = tokenizer
        self._quantization = quantization
        self.config = config
        self.tokenizer_json = tokenizer.json
        self.chat_template = chat_template

    @cached_property
    def digest(self) -> str:
        """Over all files of the model, their names and contents."""
        return files_digest(source_files(self._store.path))

    @property
    def summary(self) -> CheckpointSummary:
        folder = self._store.path.absolute().parent
        return CheckpointSummary(
            title=folder.name,
            licence=read_licence(folder),
            quantization=str(self._quantization or main_storage(self._tensors)),
            pre_tokenizer=self._tokenizer.kind,
            num_parameters=sum(prod(tensor.shape) for tensor in self._tensors.values()),
            file_name=self._store.path.name,
            num_file_bytes=sum(path.stat().st_size for path in self._store.files),
        )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> NamedSlice:
        if name not in self._tensors:
            raise ImportFailed(f"{self._store.path} has no tensor {name!r}")
        return self._tensors[name]


def main_storage(tensors: Mapping[str, NamedSlice]) -> str:
    """The storage of most of the layers' weights."""
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            sizes[tensor.quant_type] += prod(tensor.shape)
    return sizes.most_common(1)[0][0]


def read_licence(folder: Path) -> str:
    """What the model card's header says; "" if there is none."""
    try:
        card = read_text_file(folder / "README.md", 1 << 20)
    except ImportFailed:
        return ""
    header = card.split("---")[1] if card.startswith("---") and card.count("---") > 1 else ""
    found = _LICENCE.search(header)
    return found[1] if found else ""
