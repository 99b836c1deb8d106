"""A servable model without weights: a byte tokenizer and whatever launcher a test gives it."""

from __future__ import annotations

from functools import partial

from scheduler.policy import SchedulerConfig
from server.engine_process import EngineLauncher, SpawnLauncher
from server.loadable_model import LoadableModel
from server.prompt import PromptRenderer
from tests.model_configs import make_config
from tests.server.byte_tokenizer import CHATML, IM_END, VOCAB_SIZE, byte_tokenizer
from tests.server.fake_engine import run_fake_engine

CONFIG = make_config(vocab_size=VOCAB_SIZE, context_length=2048, eos_token_ids=(IM_END,))


def loadable(name: str, launcher: EngineLauncher, aliases: tuple[str, ...] = ()) -> LoadableModel:
    tokenizer = byte_tokenizer()
    return LoadableModel(
        name=name,
        launcher=launcher,
        tokenizer=tokenizer,
        renderer=PromptRenderer(CHATML, tokenizer),
        config=CONFIG,
        max_model_len=2048,
        created=1,
        aliases=aliases,
    )


def letter_after(token_ids: tuple[int, ...]) -> int:
    """A letter that depends on the position only: "abc…zabc…"."""
    return 65 + len(token_ids) % 26


def letters_launcher(step_s: float = 0.0, load_s: float = 0.0) -> SpawnLauncher:
    """A real engine process whose model writes letters."""
    entry = partial(
        run_fake_engine,
        step_s=step_s,
        load_s=load_s,
        config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512),
        vocab_size=VOCAB_SIZE,
        next_token=letter_after,
    )
    return SpawnLauncher(entry, "letters")
