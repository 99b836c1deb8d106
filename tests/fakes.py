"""Stand-ins for the engine, and factories for what the scheduler's tests build again and again.

`ScriptedRunner` has no weights, but it has pages: it stores for every slot which token at which
position behind which prefix was written there, and the next token is computed from what it READS
through the block tables. A wrong slot, a stale block or a missing write changes the output and is
noted in `violations`. Knows no text.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.batch import Batch, Float32Array
from engine.device_board import DeviceBoard, DeviceReport, LaneReport
from engine.errors import StepInterrupted
from engine.grammar import GrammarSource, NoGrammars
from engine.lane_usage import NO_USAGE, Usage
from engine.logprobs import TokenLogprobs
from engine.recorder import Recorder
from engine.sampler import Sampled, SampleRow
from engine.sampling_params import SamplingParams
from engine.speculation.config import NO_SPECULATION, Speculation
from scheduler.messages import FinishReason, GenerationRequest, Priority, StepOutput
from scheduler.policy import SchedulerConfig
from scheduler.scheduler import Scheduler
from scheduler.worker import ModelWorker, Proposer

VOCAB_SIZE = 64

NextToken = Callable[[tuple[int, ...]], int]


def chain(digest: int, token_id: int, position: int) -> int:
    """A number that depends on a whole prefix."""
    return ((digest ^ (token_id * 2_654_435_761 + position)) * 6_364_136_223_846_793_005) % 2**64


def digest_of(token_ids: Sequence[int]) -> int:
    digest = 1
    for position, token_id in enumerate(token_ids):
        digest = chain(digest, token_id, position)
    return digest


def hashed_next_token(token_ids: tuple[int, ...]) -> int:
    """A greedy choice that any change of the prefix changes (with odds of 63 in 64)."""
    return (digest_of(token_ids) >> 32) % VOCAB_SIZE


@dataclass
class ScriptedRunner:
    """`next_token`: the most likely token after a prefix; a pure function.

    Faults, by number of the call to `execute` (the first is 0): `raise_at`, `nan_at` (all rows),
    `stall_at` (seconds); `arrive_at` is called while the call runs. By content: `poison_token` in
    the batch raises, `nan_token` in a prefix makes the rows of that sequence NaN. A call that
    raises leaves garbage in its slots.
    """

    block_size: int = 16
    vocab_size: int = VOCAB_SIZE
    next_token: NextToken = hashed_next_token
    raise_at: dict[int, Exception] = field(default_factory=dict)
    nan_at: set[int] = field(default_factory=set)
    stall_at: dict[int, float] = field(default_factory=dict)
    arrive_at: dict[int, Callable[[], None]] = field(default_factory=dict)
    is_interrupted: bool = False
    poison_token: int | None = None
    nan_token: int | None = None
    num_executed: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    pages: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    usage: Usage = NO_USAGE

    def execute(self, batch: Batch) -> Float32Array:
        number = self.num_executed
        self.num_executed += 1
        self.batch_sizes.append(batch.num_tokens)
        if number in self.arrive_at:
            self.arrive_at[number]()
        time.sleep(self.stall_at.get(number, 0.0))
        self._raise_if_asked(number, batch)
        rows = [self._run_sequence(batch, index) for index in range(batch.num_sequences)]
        per_token = [row for sequence in rows for row in sequence]
        logits = np.empty((len(batch.logits_rows), self.vocab_size), np.float32)
        for index, row in enumerate(batch.logits_rows):
            logits[index] = np.nan if number in self.nan_at else self.logits_of(per_token[row])
        return logits

    def record(self, recorder: Recorder) -> None:
        pass

    def interrupt(self) -> None:
        """As a runner that can: the call that runs now raises at its end."""
        self.is_interrupted = True

    def _raise_if_asked(self, number: int, batch: Batch) -> None:
        error = self.raise_at.get(number)
        if self.is_interrupted:
            self.is_interrupted, error = False, StepInterrupted("something more urgent")
        if self.poison_token is not None and self.poison_token in batch.token_ids:
            error = RuntimeError("poisoned")
        if error is not None:
            for slot in batch.slot_mapping.tolist():
                self.pages[slot] = (-1, -1, -1)
            raise error

    def _run_sequence(self, batch: Batch, index: int) -> list[tuple[int, ...]]:
        """Write its tokens, read its context; the prefix that each of its tokens sees."""
        begin, end = batch.query_starts[index : index + 2].tolist()
        context_len = int(batch.context_lens[index])
        start = context_len - (end - begin)
        slots = [self._slot(batch, index, position) for position in range(context_len)]
        context = self._read(slots[:start])
        digest = digest_of(context)
        for at in range(begin, end):
            token_id, position = int(batch.token_ids[at]), int(batch.positions[at])
            if position != start + at - begin or batch.slot_mapping[at] != slots[position]:
                self.violations.append(f"token {at} of the batch goes to a wrong place")
            digest = chain(digest, token_id, position)
            self.pages[int(batch.slot_mapping[at])] = (token_id, position, digest)
            context.append(token_id)
        return [tuple(context[: position + 1]) for position in range(start, context_len)]

    def _slot(self, batch: Batch, index: int, position: int) -> int:
        block = int(batch.block_tables[index, position // self.block_size])
        return block * self.block_size + position % self.block_size

    def _read(self, slots: list[int]) -> list[int]:
        context, digest = [], 1
        for position, slot in enumerate(slots):
            token_id, written_at, written_digest = self.pages.get(slot, (-1, -1, -1))
            digest = chain(digest, token_id, position)
            if written_at != position or written_digest != digest:
                self.violations.append(f"slot {slot} does not hold position {position}")
            context.append(token_id)
        return context

    def logits_of(self, prefix: tuple[int, ...]) -> Float32Array:
        if self.nan_token is not None and self.nan_token in prefix:
            return np.full(self.vocab_size, np.nan, np.float32)
        noise = (np.arange(self.vocab_size) * 7919 + digest_of(prefix) % 65_537) % 97
        logits = (noise / 97).astype(np.float32)
        logits[self.next_token(prefix)] = 4.0
        return logits


def seeded_shift(params: SamplingParams, position: int) -> int:
    """The fake's randomness: a function of (seed, position), 0 when greedy."""
    return chain(params.seed, 7, position) % 5 if params.temperature >= 1e-5 else 0


class FakeSampler:
    """The most likely token, moved by a seeded shift; stop tokens only after `min_tokens`.

    A token mask is obeyed, and then there is no shift.
    """

    def sample(self, logits: Float32Array, rows: list[SampleRow]) -> list[Sampled]:
        return [self._sample_row(logits, row) for row in rows]

    def _sample_row(self, logits: Float32Array, row: SampleRow) -> Sampled:
        assert len(row.token_ids) == row.position, "the row's prefix and position disagree"
        values = logits[row.row].copy()
        if np.isnan(values).any():
            return Sampled(None)
        if row.position - row.num_prompt_tokens < row.params.min_tokens:
            values[list(row.params.stop_token_ids)] = -np.inf
        shift = seeded_shift(row.params, row.position)
        if row.token_mask is not None:
            bits = np.unpackbits(row.token_mask.view(np.uint8), bitorder="little")
            values[bits[: len(values)] == 0] = -np.inf
            shift = 0
        token_id = (int(values.argmax()) + shift) % len(values)
        if row.params.logprobs is None:
            return Sampled(token_id)
        return Sampled(token_id, self.score(logits, row.row, token_id, row.params.logprobs))

    def score(self, logits: Float32Array, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        values = logits[row].astype(np.float64)
        logprobs = values - np.log(np.exp(values).sum())
        best = np.argsort(-logprobs, kind="stable")[:num_top]
        top = tuple((int(i), float(logprobs[i])) for i in best)
        return TokenLogprobs(token_id, float(logprobs[token_id]), top)


@dataclass
class FakeClock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class FakeFacts:
    """What a loaded engine says of itself."""

    max_model_len: int = 64
    num_blocks: int = 32
    block_size: int = 4
    kv_format: str = "f32"
    vocab_size: int = VOCAB_SIZE
    device: str = "fake"
    device_reason: str = "a test asked for it"
    num_threads: int = 1
    batch_invariant: bool = True
    weight_format: str = "none"
    kv_bytes: int = 0
    kv_format_reason: str = ""
    token_buckets: tuple[int, ...] = ()


CPU_ONLY = DeviceReport("fake", "a test asked for it", (LaneReport("cpu", "open"),))


@dataclass
class FakeEngine:
    """A loaded engine, for `scheduler.process.run_engine`."""

    runner: ScriptedRunner
    sampler: FakeSampler = field(default_factory=FakeSampler)
    grammars: NoGrammars = field(default_factory=NoGrammars)
    speculation: Speculation = NO_SPECULATION
    info: FakeFacts = field(default_factory=FakeFacts)
    devices: DeviceBoard = field(default_factory=lambda: DeviceBoard(CPU_ONLY))


SMALL = SchedulerConfig(
    max_model_len=64,
    num_blocks=32,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_prefill_tokens_with_decodes=16,
    max_logits_rows=16,
)


def make_config(**overrides: Any) -> SchedulerConfig:
    """A small configuration in which one can count: blocks of 4 tokens, 4 seats."""
    values = {name: getattr(SMALL, name) for name in SMALL.__slots__}
    return SchedulerConfig(**(values | overrides))


def make_scheduler(clock: FakeClock | None = None, **overrides: Any) -> Scheduler:
    return Scheduler(make_config(**overrides), clock or FakeClock())


def greedy(max_tokens: int = 4, **overrides: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **overrides)


def make_request(
    request_id: str,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 4,
    priority: Priority = Priority.NORMAL,
    sampling: SamplingParams | None = None,
    **overrides: Any,
) -> GenerationRequest:
    params = sampling or greedy(max_tokens)
    return GenerationRequest(request_id, tuple(prompt), params, priority, **overrides)


@dataclass
class Rig:
    """A whole engine in a test, and everything that came out of it so far."""

    scheduler: Scheduler
    runner: ScriptedRunner
    worker: ModelWorker
    clock: FakeClock
    outputs: dict[str, list[StepOutput]] = field(default_factory=lambda: defaultdict(list))
    steps_with_token: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_steps: int = 0

    def step(self) -> tuple[StepOutput, ...]:
        result = self.worker.step()
        self.num_steps += 1
        for output in result.outputs:
            self.outputs[output.request_id].append(output)
            if output.new_token_ids:
                self.steps_with_token[output.request_id].append(self.num_steps)
        violations = self.worker.check_invariants() + self.runner.violations
        assert violations == []
        return result.outputs

    def run(self, max_steps: int = 2000) -> None:
        """Steps until there is nothing left to do."""
        for _ in range(max_steps):
            if not self.worker.has_work:
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token for o in self.outputs[request_id] for token in o.new_token_ids]

    def reason(self, request_id: str) -> FinishReason | None:
        return self.outputs[request_id][-1].finish_reason if self.outputs[request_id] else None


def make_rig(
    proposer: Proposer | None = None,
    runner: ScriptedRunner | None = None,
    grammars: GrammarSource | None = None,
    **overrides: Any,
) -> Rig:
    config = make_config(**overrides)
    clock = FakeClock()
    scheduler = Scheduler(config, clock, grammars)
    runner = runner or ScriptedRunner()
    runner.block_size = config.block_size
    sampler = FakeSampler()
    worker = ModelWorker(scheduler, runner, sampler, proposer, interrupt=runner.interrupt)
    return Rig(scheduler, runner, worker, clock)


def expected_tokens(
    request: GenerationRequest, max_model_len: int, next_token: NextToken = hashed_next_token
) -> tuple[list[int], FinishReason]:
    """What the request yields when it is alone: no batches, no blocks, no scheduler."""
    params = request.sampling
    prompt_len = len(request.prompt_token_ids)
    tokens = [*request.prompt_token_ids, *request.resumed_token_ids]
    num_known = len(tokens)
    while len(tokens) - prompt_len < params.max_tokens and len(tokens) < max_model_len:
        best = next_token(tuple(tokens))
        tokens.append((best + seeded_shift(params, len(tokens))) % VOCAB_SIZE)
        num_output = len(tokens) - prompt_len
        if tokens[-1] in params.stop_token_ids and num_output >= params.min_tokens:
            return tokens[num_known:], FinishReason.STOP
    return tokens[num_known:], FinishReason.LENGTH
