"""The table of supported decoders: what differs between them, as data.

An architecture says which tensors a layer has, what they are called in each file format, and
which settings of a file would change the computation in a way that we do not do (they are
refused, not ignored). The common shape of all of them is in `tensor_shapes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.architectures.config import ModelConfig

GGUF_GLOBAL_TENSORS: Mapping[str, str] = MappingProxyType(
    {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """`gguf_layer_tensors`: canonical name → name in a GGUF below `blk.{layer}.`.

    `gguf_interleaved`: the tensors whose rows a GGUF keeps in interleaved RoPE order.
    `gguf_neutral_values`: a key below `{architecture}.` → its values that change nothing. Any
    other value is refused; so are tensors that are not in the table.
    """

    name: str
    gguf_layer_tensors: Mapping[str, str]
    gguf_interleaved: frozenset[str]
    gguf_neutral_values: Mapping[str, tuple[object, ...]]


LLAMA = Architecture(
    name="llama",
    gguf_layer_tensors=MappingProxyType(
        {
            "attn_norm": "attn_norm.weight",
            "q": "attn_q.weight",
            "k": "attn_k.weight",
            "v": "attn_v.weight",
            "o": "attn_output.weight",
            "mlp_norm": "ffn_norm.weight",
            "gate": "ffn_gate.weight",
            "up": "ffn_up.weight",
            "down": "ffn_down.weight",
        }
    ),
    gguf_interleaved=frozenset({"q", "k"}),
    gguf_neutral_values=MappingProxyType(
        {
            "expert_count": (0,),
            "rope.scaling.type": ("none",),
            "rope.scaling.factor": (0.0, 1.0),
            "rope.scale_linear": (0.0, 1.0),
            "attention.causal": (True,),
            "attention.sliding_window": (0,),
            "attention.clamp_kqv": (0.0,),
            "attention.max_alibi_bias": (0.0,),
            "attention.scale": (0.0,),
            "logit_scale": (0.0, 1.0),
            "residual_scale": (0.0, 1.0),
            "embedding_scale": (0.0, 1.0),
            "attn_logit_softcapping": (0.0,),
            "final_logit_softcapping": (0.0,),
        }
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({LLAMA.name: LLAMA})


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape [rows = outputs, cols = inputs] of every tensor of the model."""
    hidden = config.hidden_size
    query = config.num_heads * config.head_size
    key_value = config.num_kv_heads * config.head_size
    layer_shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (query, hidden),
        "k": (key_value, hidden),
        "v": (key_value, hidden),
        "o": (hidden, query),
        "mlp_norm": (hidden,),
        "gate": (config.intermediate_size, hidden),
        "up": (config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, hidden),
        "final_norm": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    return shapes
