"""Many sequences' outputs to one reader: what waits for a slow reader is merged, not queued.

One task per sequence (never one per token) takes its outputs as they come, so that the engine
side never waits on a socket. Outputs of a sequence that nobody took yet are merged into one, so a
reader that stopped reading costs some bytes per token and at most `max_tokens` tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from engine.logprobs import TokenLogprobs
from scheduler.messages import FinishReason, StepOutput


@dataclass(slots=True)
class MergedStep:
    """Consecutive StepOutputs of one sequence as if they were one."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, output: StepOutput) -> None:
        self.token_ids += output.new_token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.num_draft_tokens += output.num_draft_tokens
        self.num_accepted_tokens += output.num_accepted_tokens
        self.finish_reason = output.finish_reason
        self.stop_token_id = output.stop_token_id
        self.error = output.error


class StepMerger:
    """Owned by the event loop's thread. `on_output` is called as each output arrives."""

    def __init__(
        self,
        streams: dict[int, AsyncIterator[StepOutput]],
        on_output: Callable[[int, StepOutput], None],
    ) -> None:
        self._streams = dict(streams)
        self._on_output = on_output
        self._pending: dict[int, MergedStep] = {}
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start(self) -> None:
        for index, stream in self._streams.items():
            self._tasks[index] = asyncio.create_task(self._pump(index, stream))

    def fail(self, failure: BaseException) -> None:
        """Make `take` raise, after what has already arrived was taken."""
        self._failure = self._failure or failure
        self._changed.set()

    async def take(self) -> list[tuple[int, MergedStep]]:
        """What arrived since the last call, at least one; raises what a stream raised."""
        while not self._pending:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        taken, self._pending = list(self._pending.items()), {}
        return taken

    async def close(self, index: int) -> None:
        """End one sequence; it is dropped from the engine if it still runs."""
        self._pending.pop(index, None)
        task = self._tasks.pop(index, None)
        if task is not None:
            task.cancel()
            # The pump's own end is of no interest any more, whatever it was.
            await asyncio.gather(task, return_exceptions=True)
        stream = self._streams.pop(index, None)
        if stream is not None:
            await close_stream(stream)

    async def aclose(self) -> None:
        for index in list(self._streams):
            await self.close(index)

    async def _pump(self, index: int, stream: AsyncIterator[StepOutput]) -> None:
        finished = False
        try:
            async for output in stream:
                self._on_output(index, output)
                self._pending.setdefault(index, MergedStep()).add(output)
                self._changed.set()
                finished = output.finish_reason is not None
            if not finished:
                raise EOFError("the stream ended without a finish reason")
        except Exception as failure:  # Handed to the reader, who knows what to make of it.
            self.fail(failure)


async def close_stream(stream: AsyncIterator[StepOutput]) -> None:
    """Close an iterator that may or may not be a generator."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        with contextlib.suppress(StopAsyncIteration):
            await aclose()
