"""A GGUF's metadata to a `ModelConfig`: a table of architectures and their differences.

The keys are llama.cpp's. Where its code knows a number that the file does not hold (Gemma's
softcaps, which layers have a window), the table has it. Keys that would change the computation in
a way that is not done here are refused by name, with their value.
Knows no weights but the few small tensors that hold RoPE factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import LayerConfig, ModelConfig, Rope
from engine.architectures.gguf_rope import read_gguf_rope
from engine.architectures.names import GGUF_GLOBAL_TENSORS, TensorNames
from engine.architectures.rope import NO_ROPE, plain_rope
from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata, shorten

MAX_SIZE = 1 << 24
MAX_LAYERS = 4096

_MATRICES = {
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_FUSED = _MATRICES | {
    "q": "attn_qkv.weight",
    "k": "attn_qkv.weight",
    "v": "attn_qkv.weight",
    "gate": "ffn_up.weight",
    "up": "ffn_up.weight",
}
_NORMS = {
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
}
_ROTATED = frozenset({"q", "k", "q_bias", "k_bias"})


def names(matrices: Mapping[str, str], interleaved: frozenset[str] = frozenset()) -> TensorNames:
    biases = {f"{part}_bias": name.replace(".weight", ".bias") for part, name in matrices.items()}
    return TensorNames(
        layer_tensors=MappingProxyType({**matrices, **biases, **_NORMS}),
        global_tensors=GGUF_GLOBAL_TENSORS,
        interleaved=interleaved,
    )


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """`window_pattern`: of how many layers the last one has no window; 1: every layer has it.

    `defaults` of keys that a file may leave out. `no_rope_step`: every so many layers there is no
    position encoding. `scaled_by_width`: the numbers of layers of the sizes whose scale comes from
    the hidden size per head and not from the head. `local_theta`: the base of windowed layers.
    """

    name: str
    tensors: TensorNames
    norm_placement: str = "pre"
    query_key_norm: str = "none"
    activation: str = "silu"
    scales_embedding: bool = False
    window_pattern: int = 1
    defaults: Mapping[str, float] = field(default_factory=dict)
    no_rope_step: int = 0
    scaled_by_width: int = 0
    local_theta: float | None = None


_SEPARATE = names(_MATRICES)
_INTERLEAVED = names(_MATRICES, _ROTATED)

ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        each.name: each
        for each in (
            GgufArchitecture("llama", _INTERLEAVED),
            GgufArchitecture("qwen2", _SEPARATE),
            GgufArchitecture("qwen3", _SEPARATE, query_key_norm="head"),
            GgufArchitecture("phi3", names(_FUSED)),
            GgufArchitecture(
                "gemma2",
                _SEPARATE,
                norm_placement="sandwich",
                activation="gelu_tanh",
                scales_embedding=True,
                window_pattern=2,
                defaults=MappingProxyType(
                    {
                        "attention.sliding_window": 4096,
                        "attn_logit_softcapping": 50.0,
                        "final_logit_softcapping": 30.0,
                    }
                ),
                scaled_by_width=46,
            ),
            GgufArchitecture(
                "gemma3",
                _SEPARATE,
                norm_placement="sandwich",
                query_key_norm="head",
                activation="gelu_tanh",
                scales_embedding=True,
                window_pattern=6,
                scaled_by_width=62,
                local_theta=10_000.0,
            ),
            GgufArchitecture("granite", _INTERLEAVED),
            GgufArchitecture("olmo2", _SEPARATE, norm_placement="post", query_key_norm="full"),
            GgufArchitecture("smollm3", _INTERLEAVED, no_rope_step=4),
        )
    }
)
GGUF_ARCHITECTURES: Mapping[str, TensorNames] = MappingProxyType(
    {name: architecture.tensors for name, architecture in ARCHITECTURES.items()}
)

# A key below `{architecture}.` → its values that change nothing; any other value is refused.
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "expert_count": (0,),
        "attention.causal": (True,),
        "attention.clamp_kqv": (0.0,),
        "attention.max_alibi_bias": (0.0,),
        "attention.temperature_scale": (0.0,),
        "attention.shared_kv_layers": (0,),
        "attention.key_length_swa": (),
        "attention.value_length_swa": (),
        "rope.dimension_count_swa": (),
        "rope.scaling.yarn_ext_factor": (1.0, -1.0),
        "rope.scaling.yarn_attn_factor": (1.0,),
        "rope.scaling.yarn_log_multiplier": (0.0,),
        "rope.scaling.alpha": (0.0, 1.0),
    }
)


def read_gguf_config(
    metadata: Metadata,
    vocab_size: int,
    tensor_names: frozenset[str],
    small: Mapping[str, NDArray[np.float32]],
) -> ModelConfig:
    """`tensor_names`: all that the file has; `small`: those that hold RoPE factors, by name.

    End tokens and BOS are left empty: they are the tokenizer's. Raises ImportFailed.
    """
    name = check_architecture(metadata)
    _refuse_settings(metadata, name)
    return _config(
        ARCHITECTURES[name], _own_settings(metadata, name), vocab_size, tensor_names, small
    )


def check_architecture(metadata: Metadata) -> str:
    """The architecture's name. Raises ImportFailed for one that is not in the table."""
    name = metadata.string("general.architecture")
    if name not in ARCHITECTURES:
        raise ImportFailed(
            f"{metadata.path}: unsupported architecture {shorten(name)}; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    return name


def _refuse_settings(metadata: Metadata, name: str) -> None:
    for suffix, neutral in _NEUTRAL.items():
        key = f"{name}.{suffix}"
        if key in metadata and not _is_neutral(metadata.values[key], neutral):
            value = shorten(metadata.values[key])
            raise ImportFailed(f"{metadata.path}: {key} = {value} is not supported yet")


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    return not isinstance(value, np.ndarray) and any(value == allowed for allowed in neutral)


def _own_settings(metadata: Metadata, name: str) -> Metadata:
    """The architecture's keys alone, their full names kept for errors; zeros count as absent
    where a zero means that a setting is off."""
    is_off = {f"{name}.{key}" for key in _OFF_WHEN_ZERO}
    kept = {
        key: value
        for key, value in metadata.values.items()
        if key.startswith(f"{name}.")
        and not (key in is_off and not isinstance(value, np.ndarray | list) and value == 0)
    }
    kept |= {
        f"{name}.{key}": value
        for key, value in ARCHITECTURES[name].defaults.items()
        if f"{name}.{key}" not in metadata
    }
    return Metadata(metadata.path, kept)


_OFF_WHEN_ZERO = frozenset(
    {"attention.sliding_window", "attention.scale", "attn_logit_softcapping", "logit_scale"}
    | {"final_logit_softcapping", "residual_scale", "embedding_scale", "rope.scaling.factor"}
    | {"rope.scale_linear"}
)


def _config(
    architecture: GgufArchitecture,
    metadata: Metadata,
    vocab_size: int,
    tensor_names: frozenset[str],
    small: Mapping[str, NDArray[np.float32]],
) -> ModelConfig:
    prefix = architecture.name

    def size(key: str, default: int | None = None, high: int = MAX_SIZE) -> int:
        return metadata.integer(f"{prefix}.{key}", 1, high, default)

    def number(key: str, default: float) -> float:
        return metadata.positive_float(f"{prefix}.{key}", default)

    hidden_size = size("embedding_length")
    num_heads = size("attention.head_count", high=hidden_size)
    head_size = size("attention.key_length", default=max(hidden_size // num_heads, 1))
    num_layers = size("block_count", high=min(max(len(tensor_names), 1), MAX_LAYERS))
    num_kv_heads = size("attention.head_count_kv", default=num_heads, high=num_heads)
    rotary_size = _rotary_size(architecture, metadata, num_heads, num_kv_heads, head_size)
    rope = read_gguf_rope(metadata, prefix, rotary_size, small)
    layers, ropes = _layers(architecture, metadata, num_layers, rope)
    is_wide = num_layers == architecture.scaled_by_width
    scaled_size = hidden_size / num_heads if is_wide else head_size
    embedding_scale = hidden_size**0.5 if architecture.scales_embedding else 1.0
    return ModelConfig(
        architecture=architecture.name,
        hidden_size=hidden_size,
        intermediate_size=size("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=vocab_size,
        context_length=size("context_length", high=1 << 28),
        rms_norm_eps=metadata.positive_float(f"{prefix}.attention.layer_norm_rms_epsilon"),
        layers=layers,
        ropes=ropes,
        attention_scale=number("attention.scale", scaled_size**-0.5),
        tied_embeddings=GGUF_GLOBAL_TENSORS["lm_head"] not in tensor_names,
        bos_token_id=None,
        eos_token_ids=(),
        add_bos=False,
        norm_placement=architecture.norm_placement,
        query_key_norm=architecture.query_key_norm,
        qkv_bias=_has_bias(architecture, tensor_names, "q"),
        output_bias=_has_bias(architecture, tensor_names, "o"),
        mlp_bias=_has_bias(architecture, tensor_names, "up"),
        activation=architecture.activation,
        attention_softcap=_optional(metadata, f"{prefix}.attn_logit_softcapping"),
        logits_softcap=_optional(metadata, f"{prefix}.final_logit_softcapping"),
        logits_scale=1 / number("logit_scale", 1.0),
        embedding_scale=number("embedding_scale", embedding_scale),
        residual_scale=number("residual_scale", 1.0),
    )


def _optional(metadata: Metadata, key: str) -> float:
    return metadata.positive_float(key) if key in metadata else 0.0


def _has_bias(architecture: GgufArchitecture, names: frozenset[str], part: str) -> bool:
    return f"blk.0.{architecture.tensors.layer_tensors[f'{part}_bias']}" in names


def _rotary_size(
    architecture: GgufArchitecture,
    metadata: Metadata,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
) -> int:
    """How many elements of a head are rotated. Raises ImportFailed for sizes that do not fit."""
    prefix = architecture.name
    key = f"{prefix}.attention.value_length"
    if metadata.integer(key, 0, MAX_SIZE, head_size) != head_size:
        raise ImportFailed(
            f"{metadata.path}: {key} = {metadata.values[key]} with "
            f"heads of {head_size} is not supported yet (both must be equal)"
        )
    key = f"{prefix}.rope.dimension_count"
    size = metadata.integer(key, 0, MAX_SIZE, head_size)
    if size > head_size or (architecture.tensors.interleaved and size != head_size):
        raise ImportFailed(
            f"{metadata.path}: {key} = {size} with "
            f"heads of {head_size} is not supported yet (both must be equal)"
        )
    if size % 2 or num_heads % num_kv_heads:
        raise ImportFailed(
            f"{metadata.path}: {num_heads} heads and {num_kv_heads} KV heads of "
            f"{head_size} do not fit together; use another conversion of the model"
        )
    return size


def _layers(
    architecture: GgufArchitecture, metadata: Metadata, num_layers: int, rope: Rope
) -> tuple[tuple[LayerConfig, ...], tuple[Rope, ...]]:
    prefix = architecture.name
    window = metadata.integer(f"{prefix}.attention.sliding_window", 1, 1 << 28, 0)
    windowed = _windowed_layers(architecture, metadata, num_layers)
    windows = [window if each else 0 for each in windowed]
    if architecture.local_theta is not None and window:
        theta = metadata.positive_float(f"{prefix}.rope.freq_base_swa", architecture.local_theta)
        layers = [LayerConfig(windows[i], int(windowed[i])) for i in range(num_layers)]
        return tuple(layers), (rope, plain_rope(rope.rotary_size, theta))
    if architecture.no_rope_step:
        ropeless = [(i + 1) % architecture.no_rope_step == 0 for i in range(num_layers)]
        layers = [LayerConfig(windows[i], int(ropeless[i])) for i in range(num_layers)]
        return tuple(layers), (rope, NO_ROPE)
    return tuple(LayerConfig(each) for each in windows), (rope,)


def _windowed_layers(
    architecture: GgufArchitecture, metadata: Metadata, num_layers: int
) -> list[bool]:
    """By the file's list of layers or its period, or by the architecture's own period."""
    key = f"{architecture.name}.attention.sliding_window_pattern"
    value = metadata.values.get(key)
    if isinstance(value, np.ndarray | list):
        marks = np.asarray(value)
        if marks.shape != (num_layers,) or marks.dtype.kind not in "biu":
            raise metadata.wrong(key, f"{num_layers} truth values")
        return [bool(mark) for mark in marks]
    period = metadata.integer(key, 1, MAX_LAYERS, architecture.window_pattern)
    return [period == 1 or (i + 1) % period != 0 for i in range(num_layers)]
