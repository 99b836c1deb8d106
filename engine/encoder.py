"""Texts, as token ids, to embeddings or to scores: one graph over a padded batch.

Stateless: a batch leaves nothing behind, and any batch can be computed again. Knows nothing of
requests or of what is worth putting into one batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.architectures.encoder import EncoderConfig
from engine.batch import Float32Array
from engine.bundle import ENCODER_FILE, Bundle
from engine.errors import DeviceError
from engine.placement import place_on_cpu
from engine.session import CallableSession, open_callable

logger = logging.getLogger(__name__)


class Encoder:
    """Belongs to one thread at a time."""

    def __init__(self, config: EncoderConfig, session: CallableSession) -> None:
        self.config = config
        self._session = session

    def encode(self, sequences: Sequence[Sequence[int]]) -> Float32Array:
        """[B, output_size] of B texts of 1 to `context_length` ids each: embeddings of length 1, or
        of a cross-encoder the logits of pairs.

        Raises DeviceError, also when the device computed what is no number.
        """
        lengths = np.array([len(ids) for ids in sequences])
        assert lengths.min() >= 1 and lengths.max() <= self.config.context_length
        mask = np.arange(lengths.max()) < lengths[:, None]
        token_ids = np.zeros(mask.shape, np.int32)
        token_ids[mask] = np.concatenate([np.asarray(ids, np.int32) for ids in sequences])
        inputs = {
            "token_ids": token_ids,
            "positions": np.arange(lengths.max(), dtype=np.int32),
            "mask": mask.astype(np.float32),
        }
        if self.config.pair_separator is not None:
            inputs["second"] = _is_behind_first(token_ids, self.config.pair_separator)
        results = self._session.run(**inputs)
        if not np.isfinite(results).all():
            raise DeviceError("the encoder computed values that are no numbers")
        return results


def _is_behind_first(token_ids: NDArray[np.int32], separator: int) -> Float32Array:
    """[B, S]: 1 for every token behind the first separator of its row."""
    is_separator = (token_ids == separator).astype(np.int32)
    num_before = np.cumsum(is_separator, axis=1) - is_separator
    is_behind: Float32Array = (num_before > 0).astype(np.float32)
    return is_behind


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What one embedding engine is told. `max_model_len` None: the model's own limit."""

    bundle: Path
    device: str
    num_threads: int
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """What turned out while loading; `max_model_len` in tokens of one text."""

    max_model_len: int
    vocab_size: int
    device: str
    device_reason: str
    num_threads: int
    weight_format: str


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    encoder: Encoder
    facts: EncoderFacts


def load_encoder(settings: EncoderSettings, on_phase: Callable[[str], None]) -> LoadedEncoder:
    """Raises BundleError or DeviceUnavailable, each with a line that says the fix."""
    bundle = Bundle.open(settings.bundle)
    config = bundle.encoder_config
    placement = place_on_cpu(settings.device, "embedding models")
    logger.info("device %s: %s", placement.device, placement.reason)
    on_phase("loading the weights")
    encoder = Encoder(config, open_callable(bundle.path / ENCODER_FILE, settings.num_threads))
    on_phase("warming up")
    encoder.encode([[0, 0], [0]])
    longest = min(config.context_length, settings.max_model_len or config.context_length)
    facts = EncoderFacts(
        max_model_len=longest,
        vocab_size=config.vocab_size,
        device=placement.device,
        device_reason=placement.reason,
        num_threads=settings.num_threads,
        weight_format=bundle.weight_format,
    )
    return LoadedEncoder(encoder, facts)
