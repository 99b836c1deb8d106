"""The RoPE settings of a GGUF, in its metadata and in its small tensors, to a `Rope`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engine.architectures import rope
from engine.architectures.config import Rope
from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata, shorten

FACTOR_TENSORS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
_MAX_LENGTH = 1 << 28


def read_gguf_rope(
    metadata: Metadata, prefix: str, size: int, small: Mapping[str, NDArray[np.float32]]
) -> Rope:
    """`size`: the rotated elements of a head. Raises ImportFailed naming the key or the tensor."""
    theta = metadata.positive_float(f"{prefix}.rope.freq_base", 10_000.0)
    for name, factors in small.items():
        if factors.shape != (size // 2,) or not (np.isfinite(factors) & (factors > 0)).all():
            raise ImportFailed(
                f"{metadata.path}: tensor {name!r} must hold {size // 2} numbers above 0; "
                "use another conversion of the model"
            )
    if "rope_factors_long.weight" in small:
        return _longrope(metadata, prefix, size, theta, small)
    _refuse_magnitude(metadata, prefix)
    scaled = _scaled(metadata, prefix, size, theta)
    if "rope_freqs.weight" not in small:
        return scaled
    if scaled.scaling != "default":
        raise ImportFailed(
            f"{metadata.path}: rope_freqs.weight together with {prefix}.rope.scaling.type is not "
            "supported"
        )
    return rope.divided_rope(size, theta, small["rope_freqs.weight"].tolist())


def _scaled(metadata: Metadata, prefix: str, size: int, theta: float) -> Rope:
    kind = metadata.optional_string(f"{prefix}.rope.scaling.type") or "none"
    old_factor = metadata.positive_float(f"{prefix}.rope.scale_linear", 1.0)
    factor = metadata.positive_float(f"{prefix}.rope.scaling.factor", old_factor)
    if kind == "yarn":
        return _yarn(metadata, prefix, size, theta, factor)
    if kind not in ("none", "linear"):
        raise ImportFailed(
            f"{metadata.path}: {prefix}.rope.scaling.type = {shorten(kind)} is not supported yet"
        )
    # llama.cpp applies a factor whatever the type is called, except for `none`.
    is_linear = kind == "linear" or f"{prefix}.rope.scaling.type" not in metadata
    if factor == 1 or not is_linear:
        return rope.plain_rope(size, theta)
    return rope.linear_rope(size, theta, factor)


def _yarn(metadata: Metadata, prefix: str, size: int, theta: float, factor: float) -> Rope:
    key = f"{prefix}.rope.scaling.original_context_length"
    original = metadata.integer(key, 1, _MAX_LENGTH)
    return rope.yarn_rope(
        size,
        theta,
        factor,
        original,
        beta_fast=metadata.positive_float(f"{prefix}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.positive_float(f"{prefix}.rope.scaling.yarn_beta_slow", 1.0),
    )


def _longrope(
    metadata: Metadata,
    prefix: str,
    size: int,
    theta: float,
    small: Mapping[str, NDArray[np.float32]],
) -> Rope:
    if "rope_factors_short.weight" not in small:
        raise ImportFailed(f"{metadata.path}: tensor 'rope_factors_short.weight' is missing")
    key = f"{prefix}.rope.scaling.original_context_length"
    return rope.long_rope(
        size,
        theta,
        small["rope_factors_short.weight"].tolist(),
        small["rope_factors_long.weight"].tolist(),
        metadata.integer(key, 1, _MAX_LENGTH),
        metadata.positive_float(f"{prefix}.rope.scaling.attn_factor", 1.0),
    )


def _refuse_magnitude(metadata: Metadata, prefix: str) -> None:
    """Files disagree on whether this factor already has YaRN's own in it."""
    key = f"{prefix}.rope.scaling.attn_factor"
    if metadata.positive_float(key, 1.0) != 1:
        raise ImportFailed(
            f"{metadata.path}: {key} = {metadata.values[key]} is not supported with this scaling"
        )
