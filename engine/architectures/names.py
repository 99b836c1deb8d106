"""What the tensors of a checkpoint are called in its file: data for the readers of each format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

HF_GLOBAL_TENSORS: Mapping[str, str] = MappingProxyType(
    {
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "lm_head": "lm_head.weight",
    }
)
GGUF_GLOBAL_TENSORS: Mapping[str, str] = MappingProxyType(
    {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """`layer_tensors`: canonical part → name below `model.layers.{i}.` or `blk.{i}.`.

    Parts that share a name are its row ranges, in the order in which they stand here. Which of the
    parts a model has is told by `table.tensor_shapes`. `interleaved`: the parts whose rows the file
    keeps in interleaved RoPE order. `norm_offset` is to be added to every norm weight (Gemma keeps
    them around zero). `prefixes`: what may stand before all names. `unused`: a tensor whose name
    contains one of these changes nothing.
    """

    layer_tensors: Mapping[str, str]
    global_tensors: Mapping[str, str]
    interleaved: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    prefixes: tuple[str, ...] = ("",)
    unused: tuple[str, ...] = ()
