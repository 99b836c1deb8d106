"""A scripted engine client: says given token ids, and can stall, refuse or fail at will."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from engine.device_board import DeviceReport
from engine.logprobs import TokenLogprobs
from engine.span import TracedStep
from scheduler.messages import (
    EngineInfo,
    FinishReason,
    GenerationRequest,
    StepOutput,
    StepStats,
    TraceResult,
)
from server.engine_state import EngineState
from server.errors import ApiError, UnknownModel
from server.output_format import OutputFormat
from server.prompt import PromptRenderer
from server.served_embedder import ServedEmbedder
from server.served_model import ServedModel
from server.tokenizer import Tokenizer
from tests.model_configs import make_config
from tests.server.byte_tokenizer import CHATML, IM_END, VOCAB_SIZE, byte_tokenizer

INFO = EngineInfo(
    max_model_len=512,
    num_blocks=64,
    block_size=16,
    kv_format="int8",
    vocab_size=VOCAB_SIZE,
    device="cpu",
    device_reason="a test",
    num_threads=1,
    batch_invariant=True,
    weight_format="f32",
    kv_bytes=1,
    max_num_seqs=8,
)
CONFIG = make_config(vocab_size=VOCAB_SIZE + 5, context_length=512, eos_token_ids=(IM_END,))

Script = Callable[[GenerationRequest], Sequence[int]]


class FakeEngine:
    """Says `script(request)`, then an end token; with `ignore_eos` it starts over instead.

    `gate`: every step waits until it is set. `fail_after`: the step of that number raises
    `failure`, or ends the sequence with an engine error if there is none.
    """

    def __init__(self, script: Script, *, tokens_per_step: int = 1, cached_tokens: int = 0) -> None:
        self.script = script
        self.tokens_per_step = tokens_per_step
        self.cached_tokens = cached_tokens
        self.info: EngineInfo | None = INFO
        self.devices: DeviceReport | None = None
        self.used_devices: tuple[str, ...] = ()
        self.state = EngineState.READY
        self.state_detail = ""
        self.stats = StepStats(num_blocks=64, num_free_blocks=60)
        self.refusal: ApiError | None = None
        self.refuses_after = 0
        self.gate: asyncio.Event | None = None
        self.fail_after: int | None = None
        self.failure: Exception | None = None
        self.step_s = 0.0
        self.ends_early: FinishReason | None = None
        self.requests: list[GenerationRequest] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.num_steps = 0
        self.traced: tuple[TracedStep, ...] = ()
        self.trace_s = 0.0

    def generate(self, request: GenerationRequest) -> AsyncIterator[StepOutput]:
        if self.refusal is not None and len(self.requests) >= self.refuses_after:
            raise self.refusal
        self.requests.append(request)
        self.running.add(request.request_id)
        return FakeStream(self, request, self._tokens(request))

    async def trace(self, num_steps: int, timeout_s: float) -> TraceResult:
        await asyncio.sleep(self.trace_s)
        return TraceResult(self.traced[:num_steps])

    def _tokens(self, request: GenerationRequest) -> list[int]:
        said = list(self.script(request))
        sampling = request.sampling
        if IM_END not in sampling.stop_token_ids:
            said = (said * (sampling.max_tokens // max(1, len(said)) + 1))[: sampling.max_tokens]
        return [*said, IM_END][: sampling.max_tokens - len(request.resumed_token_ids)]


class FakeStream:
    def __init__(self, engine: FakeEngine, request: GenerationRequest, tokens: list[int]) -> None:
        self._engine = engine
        self._request = request
        self._tokens = tokens
        self._position = 0
        self._num_steps = 0
        self._done = False

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> StepOutput:
        if self._done:
            raise StopAsyncIteration
        engine = self._engine
        if engine.gate is not None:
            await engine.gate.wait()
        await asyncio.sleep(engine.step_s)
        if self._num_steps == engine.fail_after:
            return self._fail()
        self._num_steps += 1
        engine.num_steps += 1
        return self._step()

    async def aclose(self) -> None:
        if not self._done:
            self._engine.aborted.append(self._request.request_id)
        self._finish()

    def _fail(self) -> StepOutput:
        self._finish()
        if self._engine.failure is not None:
            raise self._engine.failure
        return StepOutput(
            self._request.request_id,
            finish_reason=self._engine.ends_early or FinishReason.ERROR,
            error="the scripted error",
        )

    def _step(self) -> StepOutput:
        request = self._request
        start, self._position = self._position, self._position + self._engine.tokens_per_step
        new = tuple(self._tokens[start : self._position])
        stop = next((t for t in new if t in request.sampling.stop_token_ids), None)
        if stop is not None:
            new = new[: new.index(stop) + 1]
        finish = FinishReason.STOP if stop is not None else None
        if finish is None and self._position >= len(self._tokens):
            finish = FinishReason.LENGTH
        if finish is not None:
            self._finish()
        return StepOutput(
            request.request_id,
            new,
            finish,
            stop,
            self._logprobs(new),
            self._prompt_logprobs() if start == 0 else None,
            self._engine.cached_tokens,
            devices=self._engine.used_devices,
        )

    def _finish(self) -> None:
        self._done = True
        self._engine.running.discard(self._request.request_id)

    def _logprobs(self, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...] | None:
        k = self._request.sampling.logprobs
        return None if k is None else tuple(scored(token_id, k) for token_id in token_ids)

    def _prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        k = self._request.prompt_logprobs
        if k is None:
            return None
        return (None, *(scored(i, k) for i in self._request.prompt_token_ids[1:]))


def scored(token_id: int, k: int) -> TokenLogprobs:
    """The token is the likeliest; then come the ids from 0xF0 up, bytes that begin an emoji."""
    rivals = [(0xF0 + i, -2.0 - i) for i in range(k - 1)]
    return TokenLogprobs(token_id, -0.5, ((token_id, -0.5), *rivals)[:k])


def scored_all(token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(scored(token_id, 1) for token_id in token_ids)


class FakeRegistry:
    def __init__(self, *models: ServedModel) -> None:
        self._models = models

    def get(self, name: str | None) -> ServedModel:
        for model in self._models:
            if name is None or name == model.name or name in model.aliases:
                return model
        raise UnknownModel(str(name), [model.name for model in self._models])

    def list(self) -> Sequence[ServedModel]:
        return self._models

    def get_embedder(self, name: str | None) -> ServedEmbedder:
        raise UnknownModel(str(name), [model.name for model in self._models])

    def get_reranker(self, name: str | None) -> ServedEmbedder:
        return self.get_embedder(name)

    def embedders(self) -> Sequence[ServedEmbedder]:
        return ()


def saying(text: str) -> Script:
    return lambda request: list(text.encode())


def served(
    engine: FakeEngine,
    *,
    name: str = "fake/model",
    template: str = CHATML,
    tokenizer: Tokenizer | None = None,
    max_model_len: int = 512,
    output_format: OutputFormat | None = None,
    schema_in_prompt: bool = True,
) -> ServedModel:
    tokenizer = tokenizer or byte_tokenizer()
    return ServedModel(
        name=name,
        engine=engine,
        tokenizer=tokenizer,
        renderer=PromptRenderer(template, tokenizer),
        config=CONFIG,
        max_model_len=max_model_len,
        created=1_700_000_000,
        quantization="q4",
        aliases=("gpt-4o",),
        output_format=output_format or OutputFormat(),
        schema_in_prompt=schema_in_prompt,
    )
