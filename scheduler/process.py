"""The engine process: load the engine, tell how it goes, run the step loop, never be an orphan.

`engine_process_main` is the target of `multiprocessing.Process` (spawn). `run_engine` is the same
without what concerns the process as a whole, so it can also run in a thread. What is loaded, and
how, is the caller's business: a picklable callable.

Lifetime. The connection is the life line: when the other end closes it, by will or by death, the
receiver thread notices, also while the engine is loading or computing. The loop then ends after
the step it is in; a process that is not gone after a grace period ends itself hard. Ctrl-C goes
to the whole process group and is ignored here: the server decides how to drain.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

from engine.device_board import DeviceBoard, DeviceReport
from engine.grammar import GrammarSource
from engine.lane_usage import Usage
from engine.recorder import Recorder
from engine.speculation.config import Speculation
from engine.speculation.step_costs import StepCosts, guess_for
from scheduler.loop import StepLoop
from scheduler.messages import (
    EngineFailed,
    EngineInfo,
    EngineLoading,
    EngineReady,
    FromEngine,
    Shutdown,
    ToEngine,
)
from scheduler.policy import SchedulerConfig
from scheduler.proposers import make_proposer
from scheduler.scheduler import Scheduler
from scheduler.worker import ModelWorker, Runner, TokenSampler

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")

GRACE_S = 5.0


class Connection(Protocol):
    """One end of a `multiprocessing.Pipe`."""

    def send(self, obj: FromEngine, /) -> None: ...

    def recv(self) -> ToEngine: ...


class EngineFactsLike(Protocol):
    """What a loaded engine says of itself. The meanings are those of `EngineInfo`."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def kv_format(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def device_reason(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def batch_invariant(self) -> bool: ...
    @property
    def weight_format(self) -> str: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def kv_format_reason(self) -> str: ...
    @property
    def token_buckets(self) -> tuple[int, ...]: ...


class EngineRunner(Runner, Protocol):
    @property
    def usage(self) -> Usage: ...

    def interrupt(self) -> None: ...

    def record(self, recorder: Recorder) -> None: ...


class LoadedEngineLike(Protocol):
    """`devices` tells, in any thread, how the engine's devices are."""

    @property
    def runner(self) -> EngineRunner: ...
    @property
    def devices(self) -> DeviceBoard: ...
    @property
    def sampler(self) -> TokenSampler: ...
    @property
    def grammars(self) -> GrammarSource: ...
    @property
    def speculation(self) -> Speculation: ...
    @property
    def info(self) -> EngineFactsLike: ...


EngineLoader = Callable[[Callable[[str], None]], LoadedEngineLike]


def engine_process_main(
    connection: Connection, load: EngineLoader, config: SchedulerConfig
) -> None:
    """The whole life of an engine process. `config`: see `run_engine`."""
    prepare_process()
    run_engine(connection, load, config, on_closed=end_process_after_grace)


def prepare_process() -> None:
    """What concerns an engine's process as a whole: whom it listens to, and its thread's name."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGBREAK"):  # Windows: Ctrl-Break, also sent to the whole group
        signal.signal(signal.SIGBREAK, signal.SIG_IGN)
    threading.current_thread().name = "engine-loop"


def run_engine(
    connection: Connection,
    load: EngineLoader,
    config: SchedulerConfig,
    on_closed: Callable[[], None] = lambda: None,
) -> None:
    """Load, report, and run the loop until `Shutdown` or the end of the connection.

    `max_model_len`, `num_blocks`, `block_size` and `token_buckets` of `config` are replaced by the
    engine's.
    `on_closed` is called in the receiver thread when no more messages can come.
    """
    connection = _SharedConnection(connection)
    watch = _ArrivalWatch()
    inbox = start_receiver(connection, on_closed, watch.arrived)
    try:
        worker = load_and_report(connection, partial(_load_worker, load, config, connection))
        if worker is not None:
            watch.on_arrival = worker.arrived
            StepLoop(worker, inbox, connection.send).run()
    except OSError as exc:
        logger.info("the server is gone, the engine ends: %s", exc)


def _ignore(message: ToEngine) -> None:
    """Nobody wants to know before it is taken from the inbox."""


class _ArrivalWatch:
    """Tells somebody who comes later of every message, in the receiver's thread."""

    def __init__(self) -> None:
        self.on_arrival: Callable[[ToEngine], None] = _ignore

    def arrived(self, message: ToEngine) -> None:
        self.on_arrival(message)


def start_receiver(
    connection: Connection,
    on_closed: Callable[[], None],
    on_arrival: Callable[[ToEngine], None] = _ignore,
) -> SimpleQueue[ToEngine]:
    """The inbox, filled by a thread of its own from now on."""
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    arguments = (connection, inbox, on_closed, on_arrival)
    threading.Thread(target=receive, args=arguments, name="engine-receiver", daemon=True).start()
    return inbox


def receive(
    connection: Connection,
    inbox: SimpleQueue[ToEngine],
    on_closed: Callable[[], None],
    on_arrival: Callable[[ToEngine], None] = _ignore,
) -> None:
    """Move messages into the inbox until the connection ends; its end is a `Shutdown`.

    `on_arrival` is told of each message once it is in the inbox.
    """
    try:
        while True:
            message = connection.recv()
            inbox.put(message)
            on_arrival(message)
            if isinstance(message, Shutdown):
                break
    except (EOFError, OSError):
        logger.info("the connection to the server has ended")
    finally:
        inbox.put(Shutdown())
        on_closed()


def load_and_report(
    connection: Connection, load: Callable[[PhaseSender], tuple[Loaded, EngineInfo]]
) -> Loaded | None:
    """None, and the reason sent, if it cannot be loaded. OSError: the server is gone."""
    try:
        loaded, info = load(PhaseSender(connection))
    except ServerGone:
        raise
    except Exception as exc:  # any reason not to start is reported, not only those foreseen
        logger.exception("the engine could not be loaded")
        connection.send(EngineFailed(one_line(exc)))
        return None
    connection.send(EngineReady(info))
    return loaded


def _load_worker(
    load: EngineLoader,
    config: SchedulerConfig,
    connection: Connection,
    on_phase: Callable[[str], None],
) -> tuple[ModelWorker, EngineInfo]:
    engine = load(on_phase)
    info, config = _settle(engine.info, config)
    scheduler = Scheduler(config, grammars=engine.grammars)
    runner = engine.runner
    costs = StepCosts(guess_for(config.token_buckets))
    proposer = make_proposer(engine.speculation, config, scheduler.kv, costs)
    worker = ModelWorker(
        scheduler,
        runner,
        engine.sampler,
        proposer,
        costs,
        usage=lambda: runner.usage,
        record=runner.record,
        interrupt=runner.interrupt,
    )
    if len(engine.devices.report.lanes) > 1:  # the CPU alone has nothing to report
        engine.devices.subscribe(partial(_send_report, connection))
    return worker, info


class _SharedConnection:
    """A connection into which several threads send: the loop, and those that open devices."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: FromEngine, /) -> None:
        with self._sending:
            self._connection.send(message)

    def recv(self) -> ToEngine:
        return self._connection.recv()


def _send_report(connection: Connection, report: DeviceReport) -> None:
    try:
        connection.send(report)
    except OSError as exc:
        logger.info("the server is gone and hears no report: %s", exc)


class ServerGone(OSError):
    """Nobody listens any more; not to be mistaken for an OSError of loading a file."""


class PhaseSender:
    """Reports the phases of loading. Raises ServerGone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, phase: str) -> None:
        try:
            self._connection.send(EngineLoading(phase))
        except OSError as exc:
            raise ServerGone(str(exc)) from exc


def _settle(facts: EngineFactsLike, config: SchedulerConfig) -> tuple[EngineInfo, SchedulerConfig]:
    config = dataclasses.replace(
        config,
        max_model_len=facts.max_model_len,
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        token_buckets=facts.token_buckets,
    )
    info = EngineInfo(
        max_model_len=facts.max_model_len,
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        kv_format=facts.kv_format,
        vocab_size=facts.vocab_size,
        device=facts.device,
        device_reason=facts.device_reason,
        num_threads=facts.num_threads,
        batch_invariant=facts.batch_invariant,
        weight_format=facts.weight_format,
        kv_bytes=facts.kv_bytes,
        kv_format_reason=facts.kv_format_reason,
        max_num_seqs=config.max_num_seqs,
    )
    return info, config


def one_line(exc: Exception) -> str:
    text = " ".join(str(exc).split())
    return text or type(exc).__name__


def end_process_after_grace() -> None:
    """Called in a daemon thread: does nothing if the process ends by itself in time."""
    time.sleep(GRACE_S)
    logger.error("the engine did not end within %.0f s, ending it", GRACE_S)
    os._exit(1)
