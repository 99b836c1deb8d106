"""Hugging Face's `config.json` to a `ModelConfig`: a table of families and their differences.

What a family's own code in transformers reads, and what it takes when a key is absent, is its
`defaults`; other keys are ignored, as they are there. Settings that would change the computation
in a way that is not done here are refused by name, with their value.
Knows no tensors' values and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.architectures.config import LayerConfig, ModelConfig, Rope
from engine.architectures.hf_rope import read_context_length, read_rope
from engine.architectures.names import HF_GLOBAL_TENSORS, TensorNames
from engine.architectures.rope import NO_ROPE
from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata, shorten

MAX_SIZE = 1 << 24
MAX_LAYERS = 4096
ACTIVATIONS = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"})

_MATRICES = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_BIASES = {f"{part}_bias": name.replace(".weight", ".bias") for part, name in _MATRICES.items()}
_NORMS = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
_SANDWICH_NORMS = _NORMS | {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
_POST_NORMS = {
    "post_attn_norm": "post_attention_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
_FUSED = {
    "q": "self_attn.qkv_proj.weight",
    "k": "self_attn.qkv_proj.weight",
    "v": "self_attn.qkv_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_up_proj.weight",
    "up": "mlp.gate_up_proj.weight",
    "down": "mlp.down_proj.weight",
}
# A tied head that is stored all the same is the embedding once more.
_UNUSED = ("rotary_emb.inv_freq", "lm_head.weight")

# Whether layer i has a sliding window when the file does not list its layers' types.
IsSliding = Callable[[Metadata, int], bool]


def names(
    parts: Mapping[str, str], norm_offset: float = 0.0, prefixes: tuple[str, ...] = ("",)
) -> TensorNames:
    return TensorNames(
        layer_tensors=MappingProxyType(dict(parts)),
        global_tensors=HF_GLOBAL_TENSORS,
        norm_offset=norm_offset,
        prefixes=prefixes,
        unused=_UNUSED,
    )


@dataclass(frozen=True, slots=True)
class HfFamily:
    """`qkv_bias` True: always; None: when `attention_bias` says so, then the output has one too.

    `scales_embedding`: by the root of the hidden size. `is_context_scaled`: the trained length in
    the file does not yet include what linear scaling adds.
    """

    name: str
    tensors: TensorNames
    defaults: Mapping[str, object]
    is_sliding: IsSliding
    qkv_bias: bool | None = None
    norm_placement: str = "pre"
    query_key_norm: str = "none"
    scales_embedding: bool = False
    is_context_scaled: bool = True


def _never(settings: Metadata, layer: int) -> bool:
    return False


def _always(settings: Metadata, layer: int) -> bool:
    return True


def _last_layers(settings: Metadata, layer: int) -> bool:
    return layer >= settings.integer("max_window_layers", 0, MAX_LAYERS)


def _every_second(settings: Metadata, layer: int) -> bool:
    return layer % 2 == 0


def _but_every_nth(settings: Metadata, layer: int) -> bool:
    return (layer + 1) % settings.integer("sliding_window_pattern", 1, MAX_LAYERS) != 0


def _without_rope(settings: Metadata, layer: int) -> bool:
    return not has_rope(settings, layer)


LLAMA_NAMES = names(_MATRICES | _BIASES | _NORMS)
GEMMA_NAMES = names(
    _MATRICES | _BIASES | _SANDWICH_NORMS, norm_offset=1.0, prefixes=("", "language_model.")
)

_COMMON: dict[str, object] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_GEMMA = _COMMON | {
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_QWEN = _COMMON | {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
}

FAMILIES: Mapping[str, HfFamily] = MappingProxyType(
    {
        "llama": HfFamily("llama", LLAMA_NAMES, _COMMON, _never),
        "mistral": HfFamily(
            "mistral",
            LLAMA_NAMES,
            _COMMON | {"sliding_window": 4096, "num_key_value_heads": 8, "attention_bias": None},
            _always,
        ),
        "qwen2": HfFamily("qwen2", LLAMA_NAMES, _QWEN, _last_layers, qkv_bias=True),
        "qwen3": HfFamily(
            "qwen3", LLAMA_NAMES, _QWEN | {"head_dim": 128}, _last_layers, query_key_norm="head"
        ),
        "phi3": HfFamily(
            "phi3",
            names(_FUSED | _NORMS),
            _COMMON
            | {
                "rms_norm_eps": 1e-5,
                "sliding_window": None,
                "original_max_position_embeddings": 4096,
                "attention_bias": None,
            },
            _always,
        ),
        "gemma2": HfFamily(
            "gemma2",
            GEMMA_NAMES,
            _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            _every_second,
            norm_placement="sandwich",
            scales_embedding=True,
        ),
        "gemma3_text": HfFamily(
            "gemma3",
            GEMMA_NAMES,
            _GEMMA
            | {
                "sliding_window_pattern": 6,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
            },
            _but_every_nth,
            norm_placement="sandwich",
            query_key_norm="head",
            scales_embedding=True,
            is_context_scaled=False,
        ),
        "smollm3": HfFamily(
            "smollm3",
            LLAMA_NAMES,
            _COMMON
            | {
                "tie_word_embeddings": True,
                "rope_theta": 2_000_000.0,
                "no_rope_layers": None,
                "no_rope_layer_interval": 4,
                "use_sliding_window": False,
                "sliding_window": None,
            },
            _without_rope,
        ),
        "granite": HfFamily(
            "granite",
            LLAMA_NAMES,
            _COMMON
            | {
                "embedding_multiplier": 1.0,
                "logits_scaling": 1.0,
                "residual_multiplier": 1.0,
                "attention_multiplier": 1.0,
            },
            _never,
        ),
        "olmo2": HfFamily(
            "olmo2",
            names(_MATRICES | _BIASES | _POST_NORMS),
            _COMMON | {"rms_norm_eps": 1e-5},
            _never,
            norm_placement="post",
            query_key_norm="full",
        ),
    }
)
ALIASES: Mapping[str, str] = MappingProxyType({"gemma3": "gemma3_text"})
HF_ARCHITECTURES: Mapping[str, TensorNames] = MappingProxyType(
    {kind: family.tensors for kind, family in FAMILIES.items()}
    | {alias: FAMILIES[kind].tensors for alias, kind in ALIASES.items()}
)
_ALWAYS_READ = frozenset(
    {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
    | {"num_hidden_layers", "vocab_size", "max_position_embeddings", "hidden_activation"}
    | {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types"}
    | {"original_max_position_embeddings", "use_bidirectional_attention"}
)


def read_hf_config(settings: Metadata, document: Mapping[str, Any]) -> ModelConfig:
    """`document` is the object in `config.json`, what is below its `text_config` laid over it.

    `settings` names the file in errors. End tokens and BOS are left empty: they are the
    tokenizer's. Raises ImportFailed naming the key and its value.
    """
    family = find_family(settings.path, document)
    known = _ALWAYS_READ | family.defaults.keys()
    merged = {**family.defaults, **{key: document[key] for key in known & document.keys()}}
    present = {key: value for key, value in merged.items() if value is not None}
    return _config(family, Metadata(settings.path, present))


def find_family(path: Path, document: Mapping[str, Any]) -> HfFamily:
    """By `model_type`. Raises ImportFailed for one that is not in the table.

    A mixture of experts chooses its matrices token by token, which a graph per segment cannot: it
    would compute every expert for every token.
    """
    kind = str(document.get("model_type"))
    counts = [document.get(key) for key in ("num_experts", "num_local_experts")]
    if any(isinstance(count, int) and count > 0 for count in counts) or kind.endswith("_moe"):
        raise ImportFailed(
            f"{path}: {shorten(kind)} is a mixture of experts, which is not supported; "
            "use a dense model"
        )
    kind = ALIASES.get(kind, kind)
    if kind not in FAMILIES:
        raise ImportFailed(
            f"{path}: models of type {shorten(document.get('model_type'))} cannot be imported; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[kind]


def _config(family: HfFamily, settings: Metadata) -> ModelConfig:
    if settings.boolean("use_bidirectional_attention", False):
        raise _unsupported(settings, "use_bidirectional_attention")
    hidden_size = settings.integer("hidden_size", 1, MAX_SIZE)
    num_heads = settings.integer("num_attention_heads", 1, MAX_SIZE)
    head_size = settings.integer("head_dim", 1, MAX_SIZE, max(hidden_size // num_heads, 1))
    num_kv_heads = settings.integer("num_key_value_heads", 1, num_heads, num_heads)
    if num_heads % num_kv_heads:
        raise ImportFailed(
            f"{settings.path}: {num_heads} heads and {num_kv_heads} KV heads do not fit together"
        )
    has_bias = settings.boolean("attention_bias", False)
    layers, ropes = _layers(family, settings, head_size)
    return ModelConfig(
        architecture=family.name,
        hidden_size=hidden_size,
        intermediate_size=settings.integer("intermediate_size", 1, MAX_SIZE),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=settings.integer("vocab_size", 1, MAX_SIZE),
        context_length=read_context_length(settings, family.is_context_scaled),
        rms_norm_eps=settings.positive_float("rms_norm_eps"),
        layers=layers,
        ropes=ropes,
        attention_scale=_attention_scale(settings, head_size),
        tied_embeddings=settings.boolean("tie_word_embeddings", False),
        bos_token_id=None,
        eos_token_ids=(),
        add_bos=False,
        norm_placement=family.norm_placement,
        query_key_norm=family.query_key_norm,
        qkv_bias=has_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=has_bias if family.qkv_bias is None else False,
        mlp_bias=settings.boolean("mlp_bias", False),
        activation=_activation(settings),
        attention_softcap=_optional(settings, "attn_logit_softcapping", 0.0),
        logits_softcap=_optional(settings, "final_logit_softcapping", 0.0),
        logits_scale=1 / _optional(settings, "logits_scaling", 1.0),
        embedding_scale=_embedding_scale(family, settings, hidden_size),
        residual_scale=_optional(settings, "residual_multiplier", 1.0),
    )


def _optional(settings: Metadata, key: str, default: float) -> float:
    return settings.positive_float(key) if key in settings else default


def _attention_scale(settings: Metadata, head_size: int) -> float:
    if "attention_multiplier" in settings:
        return settings.positive_float("attention_multiplier")
    return float(_optional(settings, "query_pre_attn_scalar", float(head_size)) ** -0.5)


def _embedding_scale(family: HfFamily, settings: Metadata, hidden_size: int) -> float:
    if family.scales_embedding:
        return float(hidden_size**0.5)
    return _optional(settings, "embedding_multiplier", 1.0)


def _activation(settings: Metadata) -> str:
    key = "hidden_activation" if "hidden_activation" in settings else "hidden_act"
    if settings.string(key) not in ACTIVATIONS:
        raise _unsupported(settings, key)
    return ACTIVATIONS[settings.string(key)]


def _layers(
    family: HfFamily, settings: Metadata, head_size: int
) -> tuple[tuple[LayerConfig, ...], tuple[Rope, ...]]:
    num_layers = settings.integer("num_hidden_layers", 1, MAX_LAYERS)
    sliding = _sliding_layers(family, settings, num_layers)
    window = settings.integer("sliding_window", 1, MAX_SIZE, 0)
    windows = [window if is_sliding else 0 for is_sliding in sliding]
    first = read_rope(settings, head_size, "full_attention")
    if "rope_local_base_freq" in settings:
        ropes = (first, read_rope(settings, head_size, "sliding_attention"))
        return tuple(LayerConfig(windows[i], int(sliding[i])) for i in range(num_layers)), ropes
    if "no_rope_layer_interval" in settings:
        rotated = [has_rope(settings, i) for i in range(num_layers)]
        ropes = (first, NO_ROPE)
        return tuple(LayerConfig(windows[i], int(not rotated[i])) for i in range(num_layers)), ropes
    return tuple(LayerConfig(each) for each in windows), (first,)


def _sliding_layers(family: HfFamily, settings: Metadata, num_layers: int) -> list[bool]:
    """Which layers have a window, by the list of types or by the family's own rule."""
    default = [family.is_sliding(settings, i) for i in range(num_layers)]
    has_window = "sliding_window" in settings and settings.boolean("use_sliding_window", True)
    if not has_window:
        default = [False] * num_layers
    if "layer_types" not in settings:
        return default
    kinds = settings.values["layer_types"]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(known):
        raise _unsupported(settings, "layer_types")
    listed = [kind == "sliding_attention" for kind in kinds]
    is_fixed = family.is_sliding in (_never, _always)
    if (is_fixed or not has_window) and any(listed) and listed != default:
        raise _unsupported(settings, "layer_types")
    return default if is_fixed else listed


def has_rope(settings: Metadata, layer: int) -> bool:
    """SmolLM3: layers marked 0, or every fourth, have no position encoding."""
    marks = settings.values.get("no_rope_layers")
    if marks is None:
        return (layer + 1) % settings.integer("no_rope_layer_interval", 1, MAX_LAYERS) != 0
    if not isinstance(marks, list) or not all(mark in (0, 1) for mark in marks):
        raise _unsupported(settings, "no_rope_layers")
    if len(marks) != settings.integer("num_hidden_layers", 1, MAX_LAYERS):
        raise _unsupported(settings, "no_rope_layers")
    return bool(marks[layer])


def _unsupported(settings: Metadata, key: str) -> ImportFailed:
    return ImportFailed(
        f"{settings.path}: {key} = {shorten(settings.values[key])} is not supported"
    )
