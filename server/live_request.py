"""A request between its admission and its end, and the stream of its outputs.

Remembers what was received, so that the request can be resumed by another engine process, and
wakes its one consumer. Belongs to the event loop's thread. Knows no process and no state.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from scheduler.messages import FinishReason, GenerationRequest, StepOutput


class LiveRequest:
    """`num_deaths` counts the engine deaths that this request was part of."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.num_deaths = 0
        self.is_finished = False
        self._received: list[int] = []
        self._num_cached_tokens: int | None = None
        self._outputs: deque[StepOutput] = deque()
        self._wakeup = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def push(self, output: StepOutput) -> None:
        """Take one output; the consumer wakes once per loop iteration, not once per token."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        elif output.num_cached_tokens != self._num_cached_tokens:
            # After a resume the engine counts anew; the client was promised the first number.
            output = replace(output, num_cached_tokens=self._num_cached_tokens)
        self._received.extend(output.new_token_ids)
        self._outputs.append(output)
        self.is_finished = output.finish_reason is not None
        self._wakeup.set()

    def fail(self, error: str) -> None:
        """End the stream with an error event; what was received before is still delivered."""
        self.push(
            StepOutput(
                self.request_id,
                finish_reason=FinishReason.ERROR,
                num_cached_tokens=self._num_cached_tokens or 0,
                error=error,
            )
        )

    def expire(self) -> None:
        """End the stream because its deadline passed while no engine could notice."""
        self.push(
            StepOutput(
                self.request_id,
                finish_reason=FinishReason.DEADLINE,
                num_cached_tokens=self._num_cached_tokens or 0,
            )
        )

    def resumption(self) -> GenerationRequest:
        """The request that makes a fresh engine continue exactly where the dead one ended.

        Prompt logprobs travel with the first token: once that is here, they are too.
        """
        if not self._received:
            return self.request
        resumed = (*self.request.resumed_token_ids, *self._received)
        return replace(self.request, resumed_token_ids=resumed, prompt_logprobs=None)

    def discard(self) -> None:
        """Nobody reads any more: drop what is buffered and end the stream."""
        self.is_finished = True
        self._outputs.clear()
        self._wakeup.set()

    async def next_output(self) -> StepOutput | None:
        """The next output, or None after the last one."""
        while not self._outputs:
            if self.is_finished:
                return None
            self._wakeup.clear()
            await self._wakeup.wait()
        return self._outputs.popleft()


class OutputStream(AsyncIterator[StepOutput]):
    """The outputs of one request; leaving it early calls `abandon` once.

    A class and not an async generator, because `aclose()` of a generator that was never started
    runs none of its code, and then the sequence would run on for nobody.
    """

    def __init__(self, live: LiveRequest, abandon: Callable[[LiveRequest], None]) -> None:
        self._live = live
        self._abandon = abandon

    async def __anext__(self) -> StepOutput:
        try:
            output = await self._live.next_output()
        except asyncio.CancelledError:
            self._leave()
            raise
        if output is None:
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        self._leave()

    def _leave(self) -> None:
        was_finished = self._live.is_finished
        self._live.discard()
        if not was_finished:
            self._abandon(self._live)
