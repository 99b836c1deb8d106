"""Which tensors a decoder has, and of what shapes: the same for every file format."""

from __future__ import annotations

from engine.architectures.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Canonical name → shape [rows = outputs, cols = inputs] of every tensor of the model."""
    hidden = config.hidden_size
    shapes: Shapes = {"embed": (config.vocab_size, hidden), "final_norm": (hidden,)}
    if not config.tied_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    layer_shapes = _matrices(config) | _biases(config) | _norms(config)
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    return shapes


def _matrices(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_size
    key_value = config.num_kv_heads * config.head_size
    return {
        "q": (query, hidden),
        "k": (key_value, hidden),
        "v": (key_value, hidden),
        "o": (hidden, query),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }


def _biases(config: ModelConfig) -> Shapes:
    biased = [
        *(("q", "k", "v") if config.qkv_bias else ()),
        *(("o",) if config.output_bias else ()),
        *(("gate", "up", "down") if config.mlp_bias else ()),
    ]
    matrices = _matrices(config)
    return {f"{name}_bias": (matrices[name][0],) for name in biased}


def _norms(config: ModelConfig) -> Shapes:
    before, after = ("attn_norm", "mlp_norm"), ("post_attn_norm", "post_mlp_norm")
    placed = {"pre": before, "sandwich": before + after, "post": after}
    shapes: Shapes = {name: (config.hidden_size,) for name in placed[config.norm_placement]}
    if config.query_key_norm == "head":
        return shapes | {"q_norm": (config.head_size,), "k_norm": (config.head_size,)}
    if config.query_key_norm == "full":
        query = config.num_heads * config.head_size
        key_value = config.num_kv_heads * config.head_size
        return shapes | {"q_norm": (query,), "k_norm": (key_value,)}
    return shapes
