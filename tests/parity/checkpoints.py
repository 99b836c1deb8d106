"""Tiny checkpoints made by transformers, imported, and both sides' logits.

The weights are random and large enough that every setting matters: attention that is far from
uniform, norms and biases far from their neutral values, logits of magnitude one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.bundle import Bundle
from engine.export.exporter import import_checkpoint
from tests.batches import Span
from tests.engine.hf_folders import write_tokenizer
from tests.loaded_model import LoadedModel, load_model
from tests.parity.families import VOCAB_SIZE, Family

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk, and the logits of a text by transformers [T, V]."""

    folder: Path
    family: Family
    tokens: list[int]
    expected: Logits


def save(family: Family, folder: Path) -> Saved:
    model = make_model(family)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB_SIZE)
    return Saved(folder, family, *text_and_logits(model, family))


def text_and_logits(model: PreTrainedModel, family: Family) -> tuple[list[int], Logits]:
    """A random text and what transformers makes of it."""
    tokens = np.random.default_rng(1).integers(3, VOCAB_SIZE, family.num_tokens).tolist()
    with torch.inference_mode():
        logits: Logits = model(torch.tensor([tokens])).logits[0].float().numpy()
    return tokens, logits


def make_model(family: Family) -> PreTrainedModel:
    config = CONFIG_MAPPING[family.model_type](**family.settings)
    config._attn_implementation = "eager"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values * spread(name, parameter) + centre(name, family))
    return model


def spread(name: str, parameter: torch.Tensor) -> float:
    if parameter.dim() == 1:
        return 0.3
    gain = 1.5 if "q_proj" in name or "k_proj" in name or "qkv_proj" in name else 1.0
    return float(gain * parameter.shape[1] ** -0.5)


def centre(name: str, family: Family) -> float:
    """Norm weights lie around one, which Gemma writes as zero."""
    is_norm = "norm" in name
    return 1.0 if is_norm and not family.model_type.startswith("gemma") else 0.0


def change_settings(folder: Path, target: Path, changes: Mapping[str, Any]) -> Path:
    """The same checkpoint in `target`, its config.json changed."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    document = json.loads((folder / "config.json").read_text("utf-8"))
    (target / "config.json").write_text(json.dumps(document | dict(changes)), "utf-8")
    return target


def import_folder(folder: Path, destination: Path) -> Bundle:
    """With float32 weights."""
    return import_file(folder / "model.safetensors", destination)


def import_file(source: Path, destination: Path) -> Bundle:
    return import_checkpoint(source, destination, "tiny", lambda *_: None, weight_format="f32")


def load(bundle: Bundle, max_model_len: int, kv_format: str = "f32") -> LoadedModel:
    return load_model(bundle, kv_format, max_model_len=max_model_len)


def prefill(model: LoadedModel, tokens: Sequence[int]) -> Logits:
    return model.logits_of(tokens, range(32))


def chunked(model: LoadedModel, tokens: Sequence[int]) -> Logits:
    return model.logits_of(tokens, [31 - 2 * i for i in range(16)], (7, 30, 1, 16, 50, 3))


def decoded(model: LoadedModel, tokens: Sequence[int]) -> Logits:
    """A prefill of 20 tokens, and one step for each of the others."""
    return model.logits_of(tokens, [3 * i % 31 for i in range(31)], (20, 1))


def batched(model: LoadedModel, tokens: Sequence[int]) -> Logits:
    """In the company of another text that is 9 tokens ahead, 25 tokens of each a step."""
    other = list(reversed(tokens))
    model.logits(Span(other[:9], range(16, 32)))
    parts = []
    for start in range(0, len(tokens), 25):
        mine = Span(tokens[start : start + 25], range(16), start)
        theirs = Span(other[start + 9 : start + 34], range(16, 32), start + 9)
        spans = (theirs, mine) if len(theirs.token_ids) else (mine,)
        parts.append(model.logits(*spans)[-len(mine.token_ids) :])
    return np.concatenate(parts)


PATHS = {"prefill": prefill, "chunked": chunked, "decode": decoded, "batched": batched}


def difference(found: Logits, expected: Logits) -> float:
    """The largest absolute difference of any logit of any token."""
    return float(np.abs(found - expected).max())
