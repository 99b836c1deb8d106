"""The RoPE settings of a `config.json`, in their old and new spellings, to a `Rope`.

Old: `rope_theta` and `rope_scaling`; new (transformers 5): `rope_parameters`, which may hold one
object for each type of layer. A scheme or a setting that is not known here is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.architectures import rope
from engine.architectures.config import Rope
from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata, shorten

MAX_LENGTH = 1 << 28
_LAYER_TYPES = ("full_attention", "sliding_attention")
_KNOWN = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "finetuned"}
    | {"original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"}
    | {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate"}
    | {"short_factor", "long_factor"}
)


def read_rope(settings: Metadata, head_size: int, layer_type: str) -> Rope:
    """Of the layers of one type. Raises ImportFailed naming the key and its value."""
    found = rope_settings(settings, layer_type)
    share = found.positive_float("partial_rotary_factor", 1.0)
    size = int(head_size * share)
    if share > 1 or size % 2:
        raise ImportFailed(
            f"{settings.path}: partial_rotary_factor = {share} of heads of {head_size} is not "
            "supported (it must give an even number of elements)"
        )
    return _rope(found, size, found.positive_float("rope_theta", 10_000.0))


def rope_settings(settings: Metadata, layer_type: str) -> Metadata:
    """The settings of one type of layer as one flat object, with its kind as `rope_type`."""
    new, old = _object(settings, "rope_parameters"), _object(settings, "rope_scaling")
    is_local = layer_type == "sliding_attention"
    found: dict[str, Any] = {} if is_local else {**old}
    if any(key in new for key in _LAYER_TYPES):
        nested = new.get(layer_type) or {}
        found |= nested if isinstance(nested, dict) else {"rope_type": nested}
    elif not is_local:
        found |= new
    found = {key: value for key, value in found.items() if value is not None}
    for key in found.keys() - _KNOWN:
        raise ImportFailed(f"{settings.path}: RoPE setting {key} = {shorten(found[key])} is not "
                           "supported")  # fmt: skip
    theta = settings.values.get("rope_local_base_freq" if is_local else "rope_theta", 10_000.0)
    found.setdefault("rope_theta", theta)
    if "partial_rotary_factor" in settings:
        found.setdefault("partial_rotary_factor", settings.values["partial_rotary_factor"])
    found["rope_type"] = _kind(settings, found)
    trained = settings.required("max_position_embeddings")
    original = settings.values.get("original_max_position_embeddings")
    if original is not None:  # beside the object, as Phi-3 has it, it counts more than within
        found["original_max_position_embeddings"] = original
    found.setdefault("original_max_position_embeddings", trained)
    found["max_position_embeddings"] = trained
    return Metadata(settings.path, found)


def read_context_length(settings: Metadata, is_scaled: bool) -> int:
    """How many positions the model is meant for, what scaling adds included."""
    trained = settings.integer("max_position_embeddings", 1, MAX_LENGTH)
    found = rope_settings(settings, "full_attention")
    factor = found.positive_float("factor", 1.0)
    match found.string("rope_type"):
        case "linear" | "dynamic" if is_scaled:
            return int(trained * factor)
        case "yarn":
            original = found.integer("original_max_position_embeddings", 1, MAX_LENGTH)
            return max(trained, int(original * factor))
    return trained


def _object(settings: Metadata, key: str) -> Mapping[str, Any]:
    value: Any = settings.values.get(key) or {}
    if not isinstance(value, dict):
        raise settings.wrong(key, "an object")
    return value


def _kind(settings: Metadata, found: Mapping[str, Any]) -> str:
    kind = str(found.get("rope_type", found.get("type", "default")))
    has_factors = "short_factor" in found and "long_factor" in found
    # Phi-3's files once called their scheme `su`, and before that `yarn`.
    return "longrope" if kind == "su" or (kind == "yarn" and has_factors) else kind


def _rope(found: Metadata, size: int, theta: float) -> Rope:
    match found.string("rope_type"):
        case "default" | "none":
            return rope.plain_rope(size, theta)
        case "linear":
            return rope.linear_rope(size, theta, found.positive_float("factor"))
        case "dynamic":
            return _dynamic(found, size, theta)
        case "llama3":
            return _llama3(found, size, theta)
        case "yarn":
            return _yarn(found, size, theta)
        case "longrope":
            return _longrope(found, size, theta)
        case kind:
            raise ImportFailed(f"{found.path}: RoPE scaling {shorten(kind)} is not supported")


def _dynamic(found: Metadata, size: int, theta: float) -> Rope:
    trained = found.integer("max_position_embeddings", 1, MAX_LENGTH)
    if size < 4:
        raise ImportFailed(f"{found.path}: dynamic RoPE scaling needs more than {size} elements")
    return rope.dynamic_rope(size, theta, found.positive_float("factor"), trained)


def _llama3(found: Metadata, size: int, theta: float) -> Rope:
    low, high = found.positive_float("low_freq_factor"), found.positive_float("high_freq_factor")
    if low >= high:
        raise found.wrong("low_freq_factor", f"a number below {high}")
    return rope.llama3_rope(
        size, theta, found.positive_float("factor"), low, high, _original(found)
    )


def _yarn(found: Metadata, size: int, theta: float) -> Rope:
    trained = found.integer("max_position_embeddings", 1, MAX_LENGTH)
    factor = found.positive_float("factor", trained / _original(found))
    return rope.yarn_rope(
        size,
        theta,
        factor,
        _original(found),
        _yarn_magnitude(found, factor),
        found.positive_float("beta_fast", 32.0),
        found.positive_float("beta_slow", 1.0),
        found.boolean("truncate", True),
    )


def _yarn_magnitude(found: Metadata, factor: float) -> float:
    if "attention_factor" in found:
        return found.positive_float("attention_factor")
    weights = [found.values.get(key) for key in ("mscale", "mscale_all_dim")]
    if all(weights):
        one, all_dimensions = (
            rope.yarn_magnitude(factor, found.positive_float(key))
            for key in ("mscale", "mscale_all_dim")
        )
        return one / all_dimensions
    return rope.yarn_magnitude(factor)


def _longrope(found: Metadata, size: int, theta: float) -> Rope:
    trained, original = found.integer("max_position_embeddings", 1, MAX_LENGTH), _original(found)
    factor = found.positive_float("factor", trained / original)
    magnitude = rope.long_rope_magnitude(factor, original)
    return rope.long_rope(
        size,
        theta,
        _divisors(found, "short_factor", size),
        _divisors(found, "long_factor", size),
        original,
        found.positive_float("attention_factor", magnitude),
    )


def _original(found: Metadata) -> int:
    return found.integer("original_max_position_embeddings", 1, MAX_LENGTH)


def _divisors(found: Metadata, key: str, size: int) -> list[float]:
    values: Any = found.required(key)
    expected = f"{size // 2} numbers above 0"
    if not isinstance(values, list) or len(values) != size // 2:
        raise found.wrong(key, expected)
    if not all(isinstance(value, int | float) and 0 < value < 1e9 for value in values):
        raise found.wrong(key, expected)
    return [float(value) for value in values]
