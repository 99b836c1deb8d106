"""Angles of rotary position embeddings: every scaling scheme, as frequencies.

A scheme only ever changes how far each pair of elements turns per position, and the length of the
turned vector; so all of them end as the numbers of a `Rope` (config.py), computed once, at import.
Formulas: RoPE (Su et al. 2021), position interpolation (Chen et al. 2023), NTK-aware and dynamic
scaling, YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024), Llama 3.1's wave-length bands.
Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import LayerConfig, Rope

Float64Array = NDArray[np.float64]

NO_ROPE = Rope(frequencies=(), scaling="none")


def base_frequencies(rotary_size: int, theta: float) -> Float64Array:
    """[rotary_size / 2], radians per position."""
    return np.asarray(theta ** (-np.arange(0, rotary_size, 2, dtype=np.float64) / rotary_size))


def plain_rope(rotary_size: int, theta: float) -> Rope:
    return Rope(as_tuple(base_frequencies(rotary_size, theta)))


def linear_rope(rotary_size: int, theta: float, factor: float) -> Rope:
    return Rope(as_tuple(base_frequencies(rotary_size, theta) / factor), scaling="linear")


def dynamic_rope(rotary_size: int, theta: float, factor: float, trained_length: int) -> Rope:
    """The base grows with the length. Ours is fixed at `factor` times the trained length, as in
    vLLM, for every engine whose sequences may be longer than the trained length."""
    growth = (factor * factor - (factor - 1)) ** (rotary_size / (rotary_size - 2))
    return Rope(
        as_tuple(base_frequencies(rotary_size, theta)),
        long_frequencies=as_tuple(base_frequencies(rotary_size, theta * growth)),
        original_length=trained_length,
        scaling="dynamic",
    )


def llama3_rope(
    rotary_size: int,
    theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_length: int,
) -> Rope:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    frequencies = base_frequencies(rotary_size, theta)
    turns = original_length * frequencies / (2 * np.pi)  # within the trained length
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    blended = frequencies * (kept + (1 - kept) / factor)
    return Rope(as_tuple(blended), scaling="llama3")


def divided_rope(rotary_size: int, theta: float, divisors: Sequence[float]) -> Rope:
    """`divisors` [rotary_size / 2]: how a GGUF keeps Llama 3.1's scaling (`rope_freqs`)."""
    frequencies = base_frequencies(rotary_size, theta) / np.asarray(divisors, np.float64)
    return Rope(as_tuple(frequencies), scaling="llama3")


def yarn_rope(
    rotary_size: int,
    theta: float,
    factor: float,
    original_length: int,
    magnitude: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    is_truncated: bool = True,
) -> Rope:
    """Pairs that turn more than `beta_fast` times within the original length keep their frequency,
    those below `beta_slow` are slowed by `factor`, with a linear ramp over the pairs between."""

    def pair_that_turns(num_turns: float) -> float:
        ratio = original_length / (num_turns * 2 * np.pi)
        return float(rotary_size * np.log(ratio) / (2 * np.log(theta)))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if is_truncated:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0.0), min(high, rotary_size - 1.0)
    width = high - low or 0.001
    slowed = np.clip((np.arange(rotary_size // 2) - low) / width, 0, 1)
    frequencies = base_frequencies(rotary_size, theta)
    mixed = frequencies * (1 - slowed) + frequencies / factor * slowed
    if magnitude is None:
        magnitude = yarn_magnitude(factor)
    return Rope(as_tuple(mixed), magnitude=magnitude, scaling="yarn")


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else float(0.1 * weight * np.log(factor) + 1.0)


def long_rope(
    rotary_size: int,
    theta: float,
    short_divisors: Sequence[float],
    long_divisors: Sequence[float],
    original_length: int,
    magnitude: float,
) -> Rope:
    frequencies = base_frequencies(rotary_size, theta)
    return Rope(
        as_tuple(frequencies / np.asarray(short_divisors, np.float64)),
        long_frequencies=as_tuple(frequencies / np.asarray(long_divisors, np.float64)),
        original_length=original_length,
        magnitude=magnitude,
        scaling="longrope",
    )


def long_rope_magnitude(factor: float, original_length: int) -> float:
    if factor <= 1:
        return 1.0
    return float(np.sqrt(1 + np.log(factor) / np.log(original_length)))


def same_layers(num_layers: int) -> tuple[LayerConfig, ...]:
    """Layers that all attend to everything, with the first rope."""
    return (LayerConfig(),) * num_layers


def as_tuple(values: Float64Array) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
