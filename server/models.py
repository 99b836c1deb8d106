"""The models of one server: name → engine process and text side. Load, unload, look up, end.

The composition root of everything behind the routes: this is where a `LoadableModel` becomes an
`EngineClient` and a `ServedModel`. Belongs to the event loop's thread. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from server.config import ConfigError, ServerConfig, read_api_keys, read_key_policies
from server.embedding_client import EmbeddingClient
from server.engine_client import ClientPolicy, EngineClient
from server.engine_state import EngineState
from server.http_settings import HttpSettings
from server.listener import LOOPBACK_NAMES, is_loopback
from server.loadable_embedder import Loadable, LoadableEmbedder
from server.loadable_model import LoadableModel
from server.metrics import Metrics
from server.model_registry import Served, ServedModels
from server.served_embedder import ServedEmbedder
from server.served_model import ServedModel
from server.supervisor import SupervisionPolicy

logger = logging.getLogger(__name__)


class ModelManager:
    """The registry that `create_app` is given. The first model of a kind is its default one."""

    def __init__(self, policy: ClientPolicy, metrics: Metrics) -> None:
        self._policy = policy
        self._metrics = metrics
        self._served = ServedModels()
        self._clients: dict[str, EngineClient | EmbeddingClient] = {}

    def get(self, name: str | None) -> ServedModel:
        """By name or alias; None is the default model. Raises UnknownModel or WrongModelKind."""
        return self._served.get(name)

    def list(self) -> Sequence[ServedModel]:
        return self._served.list()

    def get_embedder(self, name: str | None) -> ServedEmbedder:
        """By name or alias; None is the default one. Raises UnknownModel or WrongModelKind."""
        return self._served.get_embedder(name)

    def get_reranker(self, name: str | None) -> ServedEmbedder:
        """By name or alias; None is the default one. Raises UnknownModel or WrongModelKind."""
        return self._served.get_reranker(name)

    def embedders(self) -> Sequence[ServedEmbedder]:
        return self._served.embedders()

    def everything(self) -> Sequence[Served]:
        """The models of all kinds, in the order of loading."""
        return self._served.everything()

    def load_any(self, loadable: Loadable) -> Served:
        """`load` or `load_embedder`, whichever it is for."""
        if isinstance(loadable, LoadableEmbedder):
            return self.load_embedder(loadable)
        return self.load(loadable)

    def load_embedder(self, loadable: LoadableEmbedder) -> ServedEmbedder:
        """Start the engine process of an embedding model and serve it, as `load` does."""
        self._check_names(loadable)
        client = EmbeddingClient(
            loadable.name,
            loadable.launcher,
            self._policy,
            loadable.config.output_size,
            partial(self._metrics.observe_step, loadable.name),
        )
        served = ServedEmbedder(
            name=loadable.name,
            engine=client,
            tokenizer=loadable.tokenizer,
            config=loadable.config,
            max_model_len=loadable.max_model_len,
            created=loadable.created,
            quantization=loadable.quantization,
            aliases=loadable.aliases,
        )
        self._begin(served, client)
        return served

    def load(self, loadable: LoadableModel) -> ServedModel:
        """Start the engine process of a model and serve it; returns while it is still loading.

        Raises:
            ConfigError: a served model already has its name or one of its aliases.
        """
        self._check_names(loadable)
        client = EngineClient(
            loadable.name,
            loadable.launcher,
            self._policy,
            partial(self._metrics.observe_step, loadable.name),
        )
        served = ServedModel(
            name=loadable.name,
            engine=client,
            tokenizer=loadable.tokenizer,
            renderer=loadable.renderer,
            config=loadable.config,
            max_model_len=loadable.max_model_len,
            created=loadable.created,
            quantization=loadable.quantization,
            aliases=loadable.aliases,
            output_format=loadable.output_format,
            schema_in_prompt=loadable.schema_in_prompt,
            folder=loadable.folder,
        )
        self._begin(served, client)
        return served

    async def unload(self, name: str) -> None:
        """Stop serving a model; its requests end with an error and all its memory goes back.

        Raises:
            UnknownModel: nothing of that name is served.
        """
        await self._clients.pop(self._served.remove(name).name).stop()

    async def wait_settled(self) -> None:
        """Wait until the first load of every model has ended, well or badly."""
        await asyncio.gather(*(client.wait_settled() for client in self._clients.values()))

    def failures(self) -> dict[str, str]:
        """Name → reason of the models that failed for good."""
        return {
            client.name: client.state_detail
            for client in self._clients.values()
            if client.state is EngineState.FAILED
        }

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests everywhere; live ones have `timeout_s`, then end with an error."""
        await asyncio.gather(*(client.drain(timeout_s) for client in self._clients.values()))

    async def stop(self) -> None:
        """End all engine processes. Idempotent and bounded in time."""
        await asyncio.gather(*(client.stop() for client in self._clients.values()))

    def kill(self) -> None:
        """End all engine processes at once, also from a signal handler."""
        for client in self._clients.values():
            client.kill()

    def _begin(self, served: Served, client: EngineClient | EmbeddingClient) -> None:
        client.start()
        self._clients[served.name] = client
        self._served.add(served)

    def _check_names(self, loadable: Loadable) -> None:
        taken = {name for m in self._served.everything() for name in (m.name, *m.aliases)}
        if clash := taken & {loadable.name, *loadable.aliases}:
            raise ConfigError(
                f"{loadable.name} cannot be served: another model is already called "
                f"{min(clash)!r}; change models.aliases or serve only one of them"
            )


def client_policy(config: ServerConfig) -> ClientPolicy:
    engine, scheduler = config.engine, config.scheduler
    return ClientPolicy(
        max_num_seqs=scheduler.max_num_seqs,
        max_queue=scheduler.max_queue,
        max_resumes_per_request=engine.max_resumes_per_request,
        supervision=SupervisionPolicy(
            stall_timeout_s=engine.stall_timeout_s,
            max_restarts=engine.max_restarts,
            restart_window_s=engine.restart_window_s,
        ),
    )


def http_settings(config: ServerConfig) -> HttpSettings:
    """What `create_app` is told.

    Raises:
        ConfigError: the file of API keys cannot be used.
    """
    server = config.server
    try:
        return HttpSettings(
            keep_alive_interval_s=server.keep_alive_interval_s,
            max_body_bytes=server.max_body_bytes,
            api_keys=read_api_keys(server),
            cors_origins=server.cors_origins,
            # A page of another origin can point its own name at 127.0.0.1 (DNS rebinding).
            trusted_hosts=(*LOOPBACK_NAMES, server.host) if is_loopback(server.host) else (),
            default_timeout_s=config.scheduler.default_deadline_s or None,
            key_policies=read_key_policies(config),
            max_stored_responses=server.max_stored_responses,
            max_stored_response_bytes=server.stored_responses_memory,
            max_background_responses=server.max_background_responses,
            debug=server.debug,
        )
    except ValueError as error:
        raise ConfigError(f"server.api_keys: {error}") from error
