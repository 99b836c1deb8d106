"""Ends a model's thought after so many tokens, in the only honest way: it is put in its mouth.

The sequence is taken from the engine and handed back with the end tag behind what was thought, as
tokens that it has generated itself; from there the model goes on. The blocks of the thought are
found again in the prefix cache. What the engine sends beyond the budget in the meantime is dropped,
so the answer does not depend on timing.

The second sequence goes on with an answer that was let in, so no full queue refuses it, and it
keeps the arrival time of the first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from engine.logprobs import TokenLogprobs
from scheduler.messages import FinishReason, GenerationRequest, StepOutput
from server.reasoning import END, START
from server.step_merge import close_stream
from server.tokenizer import Tokenizer

_START, _END = START.encode(), END.encode()
CLOSING = f"\n{END}\n\n"

Generate = Callable[[GenerationRequest], AsyncIterator[StepOutput]]


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Most tokens of a thought. `starts_inside`: the prompt has begun it."""

    max_tokens: int
    starts_inside: bool


class BudgetedStream:
    """The outputs of `request`, with its thought cut to the budget. Close it with `aclose`."""

    def __init__(
        self,
        generate: Generate,
        request: GenerationRequest,
        budget: ThinkingBudget,
        tokenizer: Tokenizer,
    ) -> None:
        self._generate = generate
        self._request = request
        self._max_tokens = budget.max_tokens
        self._tokenizer = tokenizer
        self._generated: list[int] = []
        self._text = b""
        self._is_inside = budget.starts_inside
        self._num_thought = 0
        self._is_watching = True
        self._num_cached_tokens: int | None = None
        self._stream = generate(request)

    def __aiter__(self) -> BudgetedStream:
        return self

    async def __anext__(self) -> StepOutput:
        output = await anext(self._stream)
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if not self._is_watching:
            # The second sequence finds the first one's blocks: that is not what the client asks.
            return replace(
                output,
                request_id=self._request.request_id,
                num_cached_tokens=self._num_cached_tokens,
            )
        for i, token_id in enumerate(output.new_token_ids):
            self._see(token_id)
            is_thinking = self._is_watching and self._is_inside
            if is_thinking and self._num_thought >= self._max_tokens:
                if output.finish_reason is not None and i + 1 == len(output.new_token_ids):
                    break
                return await self._cut(output, i + 1)
        return output

    async def aclose(self) -> None:
        await close_stream(self._stream)

    def _see(self, token_id: int) -> None:
        self._generated.append(token_id)
        if not self._is_watching:
            return
        self._text += self._tokenizer.token_bytes(token_id)
        if self._is_inside:
            self._num_thought += 1
            self._is_watching = _END not in self._text
            self._text = self._text[-len(_END) :]
        else:
            text = self._text.lstrip()
            self._is_inside = text.startswith(_START)
            self._is_watching = self._is_inside or _START.startswith(text)

    async def _cut(self, output: StepOutput, num_kept: int) -> StepOutput:
        """End the thought behind `num_kept` of the output's tokens."""
        self._is_watching = False
        first = self._stream
        room = self._request.sampling.max_tokens - len(self._generated)
        closing = tuple(self._tokenizer.encode_parsed(CLOSING, add_bos=False))[: max(0, room)]
        kept = output.new_token_ids[:num_kept]
        logprobs = output.logprobs
        if logprobs is not None:
            logprobs = (*logprobs[:num_kept], *(TokenLogprobs(i, 0.0, ()) for i in closing))
        is_full = len(closing) >= room
        if not is_full:
            resumed = (*self._generated, *closing)
            self._stream = self._generate(
                replace(
                    self._request,
                    request_id=f"{self._request.request_id}-answer",
                    resumed_token_ids=(*self._request.resumed_token_ids, *resumed),
                    prompt_logprobs=None,
                )
            )
        # Only now, so that a server that shuts down never finds nothing left to wait for.
        await close_stream(first)
        return replace(
            output,
            new_token_ids=(*kept, *closing),
            finish_reason=FinishReason.LENGTH if is_full else None,
            stop_token_id=None,
            logprobs=logprobs,
        )
