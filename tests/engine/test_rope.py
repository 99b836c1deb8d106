"""Every scaling scheme as frequencies, against the sentences of its paper."""

from __future__ import annotations

import numpy as np
import pytest

from engine.architectures import rope
from engine.architectures.config import Rope

SIZE, THETA = 64, 10_000.0
BASE = rope.base_frequencies(SIZE, THETA)


def ratios(scaled: Rope) -> np.ndarray:
    """How many times slower each pair turns than without scaling."""
    return np.asarray(BASE / np.array(scaled.frequencies))


def test_plain_frequencies_are_powers_of_the_base() -> None:
    plain = rope.plain_rope(SIZE, THETA)
    assert plain.rotary_size == SIZE and plain.magnitude == 1.0
    assert plain.frequencies[0] == 1.0
    assert plain.frequencies[31] == pytest.approx(THETA ** (-62 / 64), rel=1e-15)


def test_linear_scaling_slows_every_pair() -> None:
    assert np.allclose(ratios(rope.linear_rope(SIZE, THETA, 4.0)), 4.0, rtol=1e-14)


def test_llama3_keeps_short_waves_and_slows_long_ones() -> None:
    scaled = rope.llama3_rope(SIZE, THETA, 8.0, 1.0, 4.0, 8192)
    waves = 2 * np.pi / BASE
    found = ratios(scaled)
    assert np.array_equal(found[waves < 8192 / 4.0], np.ones((waves < 2048).sum()))
    assert np.allclose(found[waves > 8192 / 1.0], 8.0, rtol=1e-12)
    between = found[(waves > 2048) & (waves < 8192)]
    assert len(between) and (between > 1).all() and (between < 8).all()


def test_yarn_ramps_from_kept_to_slowed_pairs() -> None:
    scaled = rope.yarn_rope(SIZE, THETA, 4.0, 4096)
    found, turns = ratios(scaled), 4096 * BASE / (2 * np.pi)
    assert np.allclose(found[turns > 40], 1.0) and np.allclose(found[turns < 0.7], 4.0)
    assert (np.diff(found) >= -1e-12).all()
    assert scaled.magnitude == pytest.approx(0.1 * np.log(4) + 1)
    assert rope.yarn_rope(SIZE, THETA, 4.0, 4096, magnitude=1.5).magnitude == 1.5


def test_dynamic_scaling_has_a_larger_base_for_long_sequences_only() -> None:
    scaled = rope.dynamic_rope(SIZE, THETA, 2.0, 4096)
    assert scaled.frequencies_for(4096) == rope.plain_rope(SIZE, THETA).frequencies
    base = THETA * (2 * 2 - 1) ** (SIZE / (SIZE - 2))
    assert scaled.frequencies_for(4097) == rope.plain_rope(SIZE, base).frequencies


def test_long_rope_chooses_its_divisors_by_the_engines_longest_sequence() -> None:
    short, long = [1.0] * 31 + [2.0], [4.0] * 32
    scaled = rope.long_rope(SIZE, THETA, short, long, 4096, magnitude=1.2)
    assert np.allclose(BASE / np.array(scaled.frequencies_for(4096)), short, rtol=1e-14)
    assert np.allclose(BASE / np.array(scaled.frequencies_for(131_072)), long, rtol=1e-14)
    assert scaled.magnitude == 1.2


def test_long_ropes_magnitude_grows_with_the_root_of_the_logarithm() -> None:
    assert rope.long_rope_magnitude(1.0, 4096) == 1.0
    expected = np.sqrt(1 + np.log(32) / np.log(4096))
    assert rope.long_rope_magnitude(32.0, 4096) == pytest.approx(expected)


def test_divisors_of_a_file_are_applied_to_the_plain_frequencies() -> None:
    divisors = np.linspace(1, 8, 32).tolist()
    assert np.allclose(ratios(rope.divided_rope(SIZE, THETA, divisors)), divisors, rtol=1e-14)
