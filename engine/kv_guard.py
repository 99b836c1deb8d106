"""Which KV format a model gets when nobody says: int8, unless its keys do not bear it.

Every bundle carries the noise that each format's keys would put into attention scores
(`key_noise.py`), told from its weights when it is imported (`export/kv_noise.py`).
Knows that file of a bundle; neither weights nor memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KV_NOISE_FILE = "kv_noise.json"
AUTO = "auto"
DEFAULT_FORMAT = "int8"
EXACT_FORMAT = "f32"
MAX_NOISE = 0.25
"""Nats, root mean square over the heads of the layer that suffers most. Of the models measured,
those below it lose less than the rounding of their weights does (docs/models.md)."""


@dataclass(frozen=True, slots=True)
class KVChoice:
    """`reason` is a sentence for people; `is_risky`: the format was asked for and is too noisy."""

    kv_format: str
    reason: str
    is_risky: bool


def choose_kv_format(asked: str, noise: Mapping[str, float]) -> KVChoice:
    """`asked` is `AUTO` or a format's name. A format that `noise` does not know is taken."""
    wanted = DEFAULT_FORMAT if asked == AUTO else asked
    predicted = noise.get(wanted)
    if predicted is None:
        return KVChoice(wanted, "this bundle does not say what its keys bear", False)
    is_noisy = predicted > MAX_NOISE
    found = f"{wanted} keys put {predicted:.2g} nats of noise into this model's attention scores"
    if asked != AUTO:
        return KVChoice(asked, f"asked for; {found} (limit {MAX_NOISE})", is_noisy)
    if is_noisy:
        return KVChoice(EXACT_FORMAT, f"{found}, more than {MAX_NOISE}", False)
    return KVChoice(wanted, f"{found}, at most {MAX_NOISE}", False)


def read_kv_noise(folder: Path) -> dict[str, float]:
    """Of a bundle; empty for one that does not say or says it wrongly."""
    try:
        document = json.loads((folder / KV_NOISE_FILE).read_text("utf-8"))
        return {str(name): float(value) for name, value in document.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
