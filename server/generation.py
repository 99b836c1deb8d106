"""A request's sequences, from submission to one ordered run of events.

The n choices of all prompts are submitted together or not at all, read through one `StepMerger`,
turned into text by one `ChoiceText` each, and given out as batches of events: a batch is
everything that was there when the reader came back, with a choice's text merged into one delta.

A match of a stop string drops the sequence from the engine and ends the choice with `stop`. The
end of a reader (a client that went away, an error, the last event) drops all that still runs:
call `aclose` in a `finally`.

A deadline that passes is never a normal end: the events raise DeadlineExceeded, which is an HTTP
504 with code `deadline_exceeded` before the headers are sent and the same error as the last event
of a stream afterwards. The engine keeps the deadline; a timer here covers an engine that hangs.

Knows nothing of HTTP or of any dialect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from scheduler.messages import FinishReason, GenerationRequest, StepOutput
from server.choice_text import ChoiceText, TextOptions
from server.engine_state import EngineState
from server.errors import ApiError, DeadlineExceeded, EngineUnavailable, GenerationFailed
from server.events import Event, Finished, PromptScored, PromptTokens, TokenIds, Usage
from server.metrics import Metrics
from server.output_parser import OutputOptions, OutputParser, merged, new_output_parser
from server.served_model import ServedModel
from server.step_merge import MergedStep, StepMerger, close_stream
from server.thinking_budget import BudgetedStream, ThinkingBudget

logger = logging.getLogger(__name__)

_RETRY_S = 5.0
_DEADLINE_GRACE_S = 1.0
"""How much later than the engine this side ends a request whose deadline has passed."""


@dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """One choice to generate. `request` None: nothing is (`max_tokens` 0), only its end is told.

    `drops_output`: the engine must run to score the prompt, but what it samples is not wanted.
    """

    index: int
    prompt_index: int
    prompt_tokens: int
    request: GenerationRequest | None
    drops_output: bool = False


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """All choices of one HTTP request, in index order. `arrival_s` is `time.monotonic()`.

    `returned_prompts`: every prompt's ids, to be told with the ids that are generated; None if
    nobody asked for ids.
    """

    choices: tuple[ChoiceSpec, ...]
    text: TextOptions = field(default_factory=TextOptions)
    arrival_s: float = field(default_factory=time.monotonic)
    returned_prompts: tuple[tuple[int, ...], ...] | None = None
    output: OutputOptions = field(default_factory=OutputOptions)
    thinking_budget: ThinkingBudget | None = None


@dataclass(slots=True)
class _Choice:
    spec: ChoiceSpec
    text: ChoiceText
    output: OutputParser
    last_output_s: float | None = None
    cached_tokens: int | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finished: bool = False


class Generation:
    """One use: `submit`, then iterate `batches`, then `aclose`. Belongs to the event loop.

    `charge` is told of the tokens used: the prompt's when they were submitted, the answer's at the
    end, however it ended.
    """

    def __init__(
        self,
        model: ServedModel,
        spec: GenerationSpec,
        metrics: Metrics,
        charge: Callable[[int], None] | None = None,
    ) -> None:
        self._charge = charge
        self._model = model
        self._spec = spec
        self._metrics = metrics
        self._choices = {
            choice.index: _Choice(
                choice,
                ChoiceText(model.tokenizer, spec.text),
                new_output_parser(choice.index, spec.output),
            )
            for choice in spec.choices
        }
        self._merger = StepMerger({}, self._observe)
        self._timer: asyncio.TimerHandle | None = None
        self.devices: dict[str, None] = {}  # those that did matrix work, in order

    async def submit(self) -> None:
        """Hand every sequence to the engine.

        Raises QueueFull or EngineUnavailable, and then nothing was left in the engine.
        """
        streams: dict[int, AsyncIterator[StepOutput]] = {}
        try:
            for choice in self._spec.choices:
                if choice.request is not None:
                    streams[choice.index] = self._open(choice.request)
        except BaseException:
            for stream in streams.values():
                await close_stream(stream)
            raise
        self._merger = StepMerger(streams, self._observe)
        self._merger.start()
        self._start_timer()
        if self._charge is not None:
            self._charge(self._usage().prompt_tokens)

    def _open(self, request: GenerationRequest) -> AsyncIterator[StepOutput]:
        generate, budget = self._model.engine.generate, self._spec.thinking_budget
        if budget is None:
            return generate(request)
        return BudgetedStream(generate, request, budget, self._model.tokenizer)

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Events in order, the Usage last. Raises an ApiError if the generation fails."""
        if self._spec.returned_prompts is not None:
            yield self._prompt_tokens(self._spec.returned_prompts)
        empty = self._finish_empty_choices()
        if empty:
            yield empty
        while any(not choice.finished for choice in self._choices.values()):
            batch: list[Event] = []
            failure: ApiError | None = None
            for index, step in await self._take():
                failure = failure or await self._advance(self._choices[index], step, batch)
            if failure is None and all(choice.finished for choice in self._choices.values()):
                batch.append(self._usage())
            if batch:
                yield batch
            if failure is not None:
                raise failure
        if empty and all(choice.spec.request is None for choice in self._choices.values()):
            yield [self._usage()]

    async def aclose(self) -> None:
        """Drop what still runs. Safe at any time and more than once."""
        if self._timer is not None:
            self._timer.cancel()
        if self._charge is not None:
            charge, self._charge = self._charge, None
            charge(self._usage().completion_tokens)
        for choice in self._choices.values():
            if not choice.finished and choice.spec.request is not None:
                self._end(choice, FinishReason.ABORT)
        await self._merger.aclose()

    async def _take(self) -> list[tuple[int, MergedStep]]:
        try:
            return await self._merger.take()
        except ApiError:
            raise
        except Exception as error:
            logger.exception("the engine's output stream of %s failed", self._model.name)
            raise GenerationFailed("The engine failed while generating.") from error

    async def _advance(
        self, choice: _Choice, step: MergedStep, batch: list[Event]
    ) -> ApiError | None:
        """Add what `step` brought to `batch`; the error that ends the request, if it does."""
        if choice.finished:
            return None
        index = choice.spec.index
        if choice.cached_tokens is None:
            choice.cached_tokens = step.num_cached_tokens
        choice.draft_tokens += step.num_draft_tokens
        choice.accepted_tokens += step.num_accepted_tokens
        if step.prompt_logprobs is not None:
            batch.append(PromptScored(index, step.prompt_logprobs))
        reason = self._add_text(choice, step, batch)
        if reason is None:
            return None
        self._end(choice, reason)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            is_call = reason is FinishReason.STOP and choice.output.has_calls
            batch.append(Finished(index, "tool_calls" if is_call else reason.value))
            await self._merger.close(index)
            return None
        if reason is FinishReason.ERROR and self._model.engine.state is EngineState.DRAINING:
            return EngineUnavailable(step.error or "The server is shutting down.", _RETRY_S)
        if reason is FinishReason.UNAVAILABLE:
            return EngineUnavailable(_sentence(step.error), _RETRY_S)
        return _failure(reason, step.error)

    def _add_text(
        self, choice: _Choice, step: MergedStep, batch: list[Event]
    ) -> FinishReason | None:
        """Add the text of `step`; why the choice ends with it, or None."""
        if choice.spec.drops_output:
            if step.finish_reason is FinishReason.STOP:
                return FinishReason.LENGTH
            return step.finish_reason
        num_before = choice.text.num_tokens
        events = _push_tokens(choice, step)
        if self._spec.returned_prompts is not None:
            ids = step.token_ids[: choice.text.num_tokens - num_before]
            batch.append(TokenIds(choice.spec.index, tuple(ids)))
        if choice.text.stopped or step.finish_reason is not None:
            rest, logprobs = choice.text.finish()
            events += choice.output.push(rest, logprobs, 0) + choice.output.finish()
        batch += merged(events)
        return FinishReason.STOP if choice.text.stopped else step.finish_reason

    def _prompt_tokens(self, prompts: Sequence[tuple[int, ...]]) -> list[Event]:
        return [
            PromptTokens(choice.index, prompts[choice.prompt_index])
            for choice in self._spec.choices
        ]

    def _finish_empty_choices(self) -> list[Event]:
        events: list[Event] = []
        for choice in self._choices.values():
            if choice.spec.request is None:
                choice.finished = True
                events.append(Finished(choice.spec.index, FinishReason.LENGTH.value))
        return events

    def _end(self, choice: _Choice, reason: FinishReason) -> None:
        choice.finished = True
        elapsed_s = time.monotonic() - self._spec.arrival_s
        self._metrics.observe_finished(self._model.name, reason.value, elapsed_s)

    def _usage(self) -> Usage:
        """A prompt counts once, whatever n is; its cached tokens are those of its first choice,
        since the others find what the first one computed."""
        prompts: dict[int, tuple[int, int]] = {}
        for choice in self._choices.values():
            cached = min(choice.cached_tokens or 0, choice.spec.prompt_tokens)
            prompts.setdefault(choice.spec.prompt_index, (choice.spec.prompt_tokens, cached))
        return Usage(
            prompt_tokens=sum(tokens for tokens, _ in prompts.values()),
            completion_tokens=sum(choice.text.num_tokens for choice in self._choices.values()),
            cached_tokens=sum(cached for _, cached in prompts.values()),
            reasoning_tokens=sum(c.output.num_reasoning_tokens for c in self._choices.values()),
            draft_tokens=sum(choice.draft_tokens for choice in self._choices.values()),
            accepted_tokens=sum(choice.accepted_tokens for choice in self._choices.values()),
        )

    def _observe(self, index: int, output: StepOutput) -> None:
        self.devices.update(dict.fromkeys(output.devices))
        if not output.new_token_ids:
            return
        choice, now_s = self._choices[index], time.monotonic()
        if choice.last_output_s is None:
            elapsed_s = now_s - self._spec.arrival_s
            self._metrics.observe_first_token(self._model.name, elapsed_s)
        else:
            self._metrics.observe_next_token(self._model.name, now_s - choice.last_output_s)
        choice.last_output_s = now_s

    def _start_timer(self) -> None:
        deadlines = [c.request.deadline_s for c in self._spec.choices if c.request is not None]
        times_s = [deadline_s for deadline_s in deadlines if deadline_s is not None]
        if not times_s:
            return
        delay_s = max(0.0, min(times_s) - time.time()) + _DEADLINE_GRACE_S
        failure = _failure(FinishReason.DEADLINE, None)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._merger.fail, failure)


def _push_tokens(choice: _Choice, step: MergedStep) -> list[Event]:
    """What the tokens of `step` show, up to the end of a stop string."""
    events: list[Event] = []
    num_tokens = len(step.token_ids)
    size = 1 if choice.output.by_token else max(1, num_tokens)
    for start in range(0, num_tokens, size):
        end = start + size
        token_ids = step.token_ids[start:end]
        logprobs = step.logprobs[start:end] if step.logprobs else None
        stop_token_id = step.stop_token_id if end >= num_tokens else None
        text, entries = choice.text.push(token_ids, logprobs, stop_token_id)
        events += choice.output.push(text, entries, len(token_ids))
        if choice.text.stopped:
            break
    return events


def _sentence(text: str | None) -> str:
    return f"{(text or 'No device can compute now').rstrip('.')}."


def _failure(reason: FinishReason, error: str | None) -> ApiError:
    if reason is FinishReason.DEADLINE:
        return DeadlineExceeded("The request's time limit passed before the answer was complete.")
    if reason is FinishReason.ABORT:
        return GenerationFailed(error or "The generation was ended by the server.")
    return GenerationFailed(error or "The engine failed while generating.")
