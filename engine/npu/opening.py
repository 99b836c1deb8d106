"""Opens a model on the NPU: compiles what is missing, loads the contexts, makes the lanes.

The one place that brings together the device's configuration, the compiled contexts and the
provider's sessions. Knows nothing of when the NPU is used, or what is done when it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from engine.bundle import Bundle
from engine.embedding import Embedding
from engine.errors import ContextRejected, DeviceUnavailable
from engine.kv_cache import PagedKVCache
from engine.npu.calls import HostMemory, PlainMemory
from engine.npu.compiler import compile_missing
from engine.npu.context_store import ContextStore
from engine.npu.device_config import DeviceConfig, NpuSettings, chosen_device
from engine.npu.device_contexts import context_store
from engine.npu.fused_graphs import fused_parts
from engine.npu.fused_lane import FusedGraphs, FusedLane
from engine.npu.graphs import HEAD, part_names
from engine.npu.lane import LaneGraphs, NpuLane
from engine.npu.qnn_profile import open_profile
from engine.npu.qnn_session import (
    SHARED_MEMORY_OPTION,
    QnnOptions,
    QnnSession,
    find_shared_memory,
    open_context,
)
from engine.npu.recipe import GraphId, compile_options
from engine.npu.reported_chip import reported_chip
from engine.step_form import NpuForms

EMULATED = "npu-emulated"

OnPhase = Callable[[str], None]
Lease = AbstractContextManager[None]

logger = logging.getLogger(__name__)


def token_buckets(device: str, settings: NpuSettings) -> tuple[int, ...]:
    """The sizes of a step that need no padding there; none if the chip is not known, of which
    opening it will tell more."""
    try:
        reported = None if device == EMULATED else reported_chip()
        return chosen_device(settings, reported).token_buckets
    except DeviceUnavailable:
        return ()


def open_npu(
    bundle: Bundle,
    device: str,
    max_tokens: int,
    max_rows: int,
    embedding: Embedding,
    cache: PagedKVCache,
    max_model_len: int,
    on_phase: OnPhase,
    lease: Lease,
    settings: NpuSettings,
) -> NpuForms:
    """`device` is `npu` or `npu-emulated`. Blocks for as long as compiling takes.

    `lease` is held while a context is loaded. Raises DeviceUnavailable, DeviceError, CompileFailed,
    BundleError or OSError.
    """
    config = device_config(device, settings)
    profile, options = open_profile(settings.profiling)
    contexts = _Contexts(bundle, config, settings.fused, on_phase, lease, options)
    on_phase("loading onto the NPU")
    graphs = LaneGraphs(contexts.segments(), contexts.heads())
    memory = _host_memory(contexts.options)
    with lease:  # shared memory is handed to the device here
        lane = NpuLane(bundle.config, graphs, device, max_tokens, max_rows, memory)
    whole: tuple[FusedLane, ...] = ()
    if settings.fused and config.fused.layers_per_graph:
        fused = FusedGraphs(contexts.fused(), graphs.heads)
        with lease:
            whole = (
                FusedLane(
                    bundle.config,
                    fused,
                    f"{device}-fused",
                    embedding,
                    cache,
                    max_model_len,
                    max_rows,
                    memory,
                ),
            )
    return NpuForms(lane, whole, profile)


def device_config(device: str, settings: NpuSettings) -> DeviceConfig:
    """Raises DeviceUnavailable for a wrong setting or a chip that is not known."""
    return chosen_device(settings, None if device == EMULATED else reported_chip())


def session_options(config: DeviceConfig) -> QnnOptions:
    """Without a chip there are no clocks, no driver and no memory that it shares.

    The provider fails to open anything when it is to share memory and cannot, so it is told to
    only where it lists such memory. Raises DeviceUnavailable.
    """
    options = config.provider_options
    if config.is_emulated:
        return QnnOptions(config.soc_model, True, dict(compile_options(options)))
    wanted = QnnOptions(config.soc_model, False, options, config.run_options)
    if find_shared_memory(wanted) is not None:
        return wanted
    return replace(wanted, provider_options=options | {SHARED_MEMORY_OPTION: "0"})


def _host_memory(options: QnnOptions) -> HostMemory:
    shared = find_shared_memory(options)
    if shared is None:
        logger.info("the provider offers no shared memory here: it copies inputs and outputs")
        return PlainMemory()
    return shared


@dataclass
class _Contexts:
    """Compiled contexts as sessions. What is missing is compiled first.

    `extra_options` of the provider are for opening only, and change nothing that is compiled.
    """

    bundle: Bundle
    config: DeviceConfig
    with_fused: bool
    on_phase: OnPhase
    lease: Lease
    extra_options: Mapping[str, str]

    def __post_init__(self) -> None:
        options = session_options(self.config)
        self.options = replace(
            options, provider_options={**options.provider_options, **self.extra_options}
        )
        self._store = context_store(self.bundle, self.config, self.with_fused)
        self._has_rebuilt = False
        self._compile()

    def segments(self) -> dict[int, list[QnnSession]]:
        """All buckets of a segment before the next one: they share a binary, and what is not opened
        of it stays in the provider, so that the binary could not be opened again."""
        opened: dict[int, list[QnnSession]] = {bucket: [] for bucket in self.config.token_buckets}
        for name in part_names(self.bundle.config.num_layers)[:-1]:
            for bucket, sessions in opened.items():
                sessions.append(self._open(GraphId(name, bucket)))
        return opened

    def heads(self) -> dict[int, QnnSession]:
        return {bucket: self._open(GraphId(HEAD, bucket)) for bucket in self.config.head_buckets}

    def fused(self) -> tuple[tuple[range, dict[tuple[int, int], QnnSession]], ...]:
        form = self.config.fused
        return tuple(
            (
                part.layers,
                {
                    (tokens, window): self._open(GraphId(part.name, tokens, window))
                    for tokens in form.token_buckets
                    for window in form.window_buckets
                },
            )
            for part in fused_parts(self.bundle.config.num_layers, form.layers_per_graph)
        )

    def _compile(self, again: bool = False) -> None:
        compile_missing(self._store, self._report, again=again, background=True)

    def _report(self, done: int, total: int, what: str) -> None:
        self.on_phase(f"compiling {done} of {total}")

    def _open(self, graph: GraphId) -> QnnSession:
        """A context that is whole and yet refused is made anew, once."""
        try:
            return self._load(graph)
        except ContextRejected as error:
            if self._has_rebuilt:
                raise
            logger.warning("%s; compiling all contexts of this device again", error)
            self._has_rebuilt = True
            self._compile(again=True)
            return self._load(graph)

    def _load(self, graph: GraphId) -> QnnSession:
        store: ContextStore = self._store
        with self.lease:
            return open_context(store.path(graph), self.options, store.recipe.shared)
