"""Runs every compiled form once, so that no request waits for a compiler."""

from __future__ import annotations

import numpy as np

from engine.architectures.config import ModelConfig
from engine.batch import Batch
from engine.sampler import Sampler, SampleRow
from engine.sampling_params import SamplingParams
from engine.speculation.match_model import MatchModel, MatchStatistics
from engine.step_form import StepForm

_SAMPLED = SamplingParams(
    max_tokens=1, temperature=0.5, top_p=0.5, presence_penalty=0.5, seed=1, logprobs=1
)
_DRAWN = SamplingParams(max_tokens=1, seed=1)


def warm_up(runner: StepForm, sampler: Sampler, config: ModelConfig) -> None:
    """A prefill of two tokens, a decode of one, and draws. Leaves garbage in block 0 only."""
    runner.execute(_batch(num_tokens=2, context_len=2))
    logits = runner.execute(_batch(num_tokens=1, context_len=3))
    all_allowed = np.full(-(-config.vocab_size // 32), -1, np.int32)
    adjusted = SampleRow(0, 3, _SAMPLED, [0, 0, 0], 3, all_allowed)
    sampler.sample(logits, [adjusted, SampleRow(0, 3, _DRAWN, [0, 0, 0], 3)])
    MatchModel(8, MatchStatistics()).warm_up()


def _batch(num_tokens: int, context_len: int) -> Batch:
    def array(values: object) -> np.ndarray:
        return np.array(values, np.int32)

    positions = array(range(context_len - num_tokens, context_len))
    return Batch(
        token_ids=np.zeros_like(positions),
        positions=positions,
        slot_mapping=positions,
        query_starts=array([0, num_tokens]),
        context_lens=array([context_len]),
        block_tables=array([[0]]),
        logits_rows=array([num_tokens - 1]),
    )
