"""OpenVINO GenAI's continuous batching as a `Library`. Runs in that package's environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from tests.bench.peers.completions_http import serve

WHOLE_PROMPT = 1 << 20
"""Tokens of a step: more than any prompt has."""


class OpenVinoLibrary:
    model = "openvino-genai"

    def __init__(self, gguf: str, num_threads: int, num_slots: int, context: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = num_slots
        if num_slots == 1:
            scheduler.max_num_batched_tokens = WHOLE_PROMPT
        properties = {"INFERENCE_NUM_THREADS": num_threads}
        self.max_length = context
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            gguf, scheduler, "CPU", properties
        )
        self._handles: dict[int, Any] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())

    def begin(self, number: int, prompt: Sequence[int], num_new: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_new, True, False
        ids = openvino.Tensor(np.array([prompt], np.int64))
        self._handles[number] = self._pipeline.add_request(number, ids, config)

    def step(self) -> Iterator[tuple[int, Sequence[int]]]:
        self._pipeline.step()
        for number, handle in self._handles.items():
            tokens: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            yield number, tokens

    def leave(self, number: int) -> None:
        self._handles.pop(number).cancel()


if __name__ == "__main__":
    gguf, port, *numbers = sys.argv[1:]
    serve(OpenVinoLibrary(gguf, *map(int, numbers)), int(port))
