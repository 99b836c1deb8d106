"""An engine process without weights: the real step loop over the scripted runner.

Its entry is picklable, so it runs in a spawned process as a real engine does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from engine.batch import Batch, Float32Array
from scheduler.policy import SchedulerConfig
from scheduler.process import engine_process_main
from tests import fakes


class SlowRunner(fakes.ScriptedRunner):
    """A scripted runner whose steps take `step_s` seconds."""

    step_s: float = 0.0

    def execute(self, batch: Batch) -> Float32Array:
        time.sleep(self.step_s)
        return super().execute(batch)


def run_fake_engine(
    connection: Any,
    step_s: float = 0.0,
    load_s: float = 0.0,
    config: SchedulerConfig = fakes.SMALL,
    vocab_size: int = fakes.VOCAB_SIZE,
    next_token: fakes.NextToken = fakes.hashed_next_token,
) -> None:
    """The entry of the process: loads for `load_s`, then serves until the connection ends."""

    def load(report: Callable[[str], None]) -> fakes.FakeEngine:
        report("reading the script")
        time.sleep(load_s)
        facts = fakes.FakeFacts(
            max_model_len=2048, num_blocks=512, block_size=16, vocab_size=vocab_size
        )
        runner = SlowRunner(vocab_size=vocab_size, next_token=next_token)
        runner.step_s = step_s
        return fakes.FakeEngine(runner, info=facts)

    engine_process_main(connection, load, config)
