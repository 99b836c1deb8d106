"""onnxruntime-genai's engine as a `Library`. Runs in that package's environment.

On a CPU its batches are static: a request waits until the batch that runs has ended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime_genai

from tests.bench.peers.completions_http import serve

NUM_EVENTS = 256


class GenaiLibrary:
    model = "onnxruntime-genai"

    def __init__(self, folder: str, num_threads: int, num_slots: int, context: int) -> None:
        config = onnxruntime_genai.Config(folder)
        config.clear_providers()
        session = {"intra_op_num_threads": num_threads}
        engine = {"static_batching": {"max_batch_size": num_slots}}
        model = {"decoder": {"session_options": session}}
        config.overlay(json.dumps({"engine": engine, "model": model}))
        with open(f"{folder}/genai_config.json", encoding="utf-8") as file:
            limit = int(json.load(file)["model"]["context_length"])
        self.max_length = min(context, limit)
        self._engine = onnxruntime_genai.Engine(onnxruntime_genai.Model(config))
        self._events = self._engine.create_event_buffer(NUM_EVENTS)
        self._requests: dict[int, tuple[Any, int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._engine.has_pending_requests())

    def begin(self, number: int, prompt: Sequence[int], num_new: int) -> None:
        options = onnxruntime_genai.RequestOptions()
        options.set_max_session_tokens(len(prompt) + num_new)
        request = self._engine.create_request(options=options)
        turn = onnxruntime_genai.TurnOptions(request)
        turn.set_max_generated_tokens(num_new)
        turn.set_min_generated_tokens(num_new)
        turn.set_do_sample(False)
        turn_id = request.begin_turn(np.array(prompt, np.int32), turn)
        self._requests[number] = (request, turn_id)

    def step(self) -> Iterator[tuple[int, Sequence[int]]]:
        numbers = {request: number for number, (request, _) in self._requests.items()}
        flag = onnxruntime_genai.EngineEventFlags.TOKEN.value
        for event in self._engine.run(self._events) or self._events:
            if event.flags.value & flag:
                yield numbers[event.request], (int(event.token),)

    def leave(self, number: int) -> None:
        request, turn_id = self._requests.pop(number)
        request.cancel_turn(turn_id)
        request.close()


if __name__ == "__main__":
    folder, port, *numbers = sys.argv[1:]
    serve(GenaiLibrary(folder, *map(int, numbers)), int(port))
