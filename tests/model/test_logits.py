"""The real model's logits, every bit of them: batches, chunks, hits and threads change none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.bundle import Bundle
from tests.batches import Span
from tests.loaded_model import LoadedModel, load_model, spoil

pytestmark = pytest.mark.model
TEXT = Path(__file__).parent.parent / "data" / "night_ferry.txt"
TABLE = list(range(12, -1, -1))


@pytest.fixture(scope="module")
def model(real_bundle: Bundle) -> LoadedModel:
    return load_model(real_bundle, "int8", num_threads=2, max_tokens=200)


@pytest.fixture(scope="module")
def tokens(real_bundle: Bundle) -> list[int]:
    tokenizer = Tokenizer.from_file(str(real_bundle.tokenizer_path))
    ids: list[int] = tokenizer.encode(TEXT.read_text("utf-8")).ids[:200]
    return ids


@pytest.fixture(scope="module")
def whole(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    return model.logits_of(tokens, TABLE)


@pytest.mark.parametrize("chunks", [(50,), (128,), (7, 1, 3, 16, 90), (180, 1)])
def test_a_chunked_prefill_equals_the_whole(
    model: LoadedModel, tokens: list[int], whole: np.ndarray, chunks: tuple[int, ...]
) -> None:
    spoil(model.cache, seed=1)
    assert np.array_equal(model.logits_of(tokens, TABLE, chunks), whole)


def test_a_batch_equals_its_sequences_alone(
    model: LoadedModel, tokens: list[int], whole: np.ndarray
) -> None:
    """A decode, a chunk behind a shared prefix and two fresh prefills in one step."""
    other = tokens[100:140]
    alone = model.logits_of(other, [20, 21, 22])
    model.logits_of(tokens[:160], TABLE)
    prefix = TABLE[:6]  # 96 tokens
    found = model.logits(
        Span(tokens[:1], [23]),
        Span(tokens[160:161], TABLE, 160),
        Span(tokens[96:126], [*prefix, 24, 25], 96),
        Span(other, [26, 27, 28]),
    )
    expected = [whole[:1], whole[160:161], whole[96:126], alone]
    assert np.array_equal(found, np.concatenate(expected))


def test_one_thread_equals_two(real_bundle: Bundle, tokens: list[int], whole: np.ndarray) -> None:
    one = load_model(real_bundle, "int8", num_threads=1, max_tokens=200)
    assert np.array_equal(one.logits_of(tokens, TABLE), whole)
    assert np.array_equal(one.logits_of(tokens, TABLE, (150, 47, 1)), whole)


def test_the_kernel_agrees_with_the_reference(
    real_bundle: Bundle, tokens: list[int], whole: np.ndarray
) -> None:
    """Not to the bit: thirty layers of int8 activations make of any rounding at their start an
    error as large as the noise of int8 itself, which is about 3 %."""
    reference = load_model(real_bundle, "int8", 2, max_tokens=200, is_reference=True)
    expected = reference.logits_of(tokens, TABLE)
    error = float(np.sqrt(np.mean((whole - expected) ** 2) / np.mean(expected**2)))
    assert error < 0.06, f"the relative error is {error:.3f}"
    assert np.mean(whole.argmax(axis=-1) == expected.argmax(axis=-1)) > 0.95
