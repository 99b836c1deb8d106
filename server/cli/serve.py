"""The verb `serve`: configuration, model files, socket, engines, banner; in that order.

The port is taken before anything slow happens, the HTTP side answers while the engines load, and
"ready" is printed only when a request would be accepted. Knows the terminal, not the routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from server.cli.errors import CliError

if TYPE_CHECKING:
    from server.config import ServerConfig
    from server.loadable_embedder import Loadable
    from server.model_registry import Served
    from server.models import ModelManager

logger = logging.getLogger(__name__)


def serve(
    model: Annotated[
        list[str] | None, typer.Option(help="A name, a source or a path; may be repeated.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes any free one.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or npu.")] = None,
    threads: Annotated[str | None, typer.Option(help="Threads of an engine, or auto.")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help='Memory for keys and values such as "2GiB", or auto.')
    ] = None,
    kv_format: Annotated[str | None, typer.Option(help="auto, f32, int8, int8k4v or int4.")] = None,
    max_model_len: Annotated[
        str | None, typer.Option(help="Longest sequence in tokens, or auto.")
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Answer /debug/trace, for hexlm trace.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file; configs/server.toml lists its keys.")
    ] = None,
) -> None:
    """Serve models over an OpenAI-compatible API."""
    from server.config import load_config

    flags = {
        "model": model or None,
        "host": host,
        "port": port,
        "device": device,
        "threads": threads,
        "kv_memory": kv_memory,
        "kv_format": kv_format,
        "max_model_len": max_model_len,
        "debug": debug or None,
    }
    settings = load_config(config, flags)
    configure_logging(settings.server.log_level)
    with interrupted_by_sigterm():
        sock = listen(settings)
        with contextlib.closing(sock):
            models = find_models(settings)
            run_service(settings, models, sock, Console(highlight=False))


def configure_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if level != "debug":
        # Its start and end messages repeat what the banner and the service say.
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Until the service has its own handlers, SIGTERM is like Ctrl-C: fetching cleans up."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def listen(settings: ServerConfig) -> socket.socket:
    from server.listener import ListenError, bind, is_loopback

    try:
        sock = bind(settings.server.host, settings.server.port)
    except ListenError as error:
        raise CliError(str(error)) from error
    if not settings.has_keys and not is_loopback(settings.server.host):
        logger.warning("everybody who reaches %s can use this server", settings.server.host)
    return sock


def find_models(settings: ServerConfig) -> list[Loadable]:
    """Open the models, fetching and importing what is missing, with a progress bar."""
    from server.cli.progress import progress_bars
    from server.loadable_embedder import open_loadable
    from server.model_store import ModelStore

    if not settings.models.model:
        raise CliError("no model is given; name one with --model or models.model")
    store = ModelStore()
    folders = []
    for name in settings.models.model:
        with progress_bars(Console(stderr=True)) as report:
            folders.append(store.resolve(name, report))
    models = [open_loadable(folder, settings) for folder in folders]
    _check_parsers(settings, {model.name for model in models})
    return models


def _check_parsers(settings: ServerConfig, names: set[str]) -> None:
    for key in ("tool_parsers", "reasoning_parsers"):
        if unknown := getattr(settings.models, key).keys() - names:
            raise CliError(
                f"models.{key} names {', '.join(sorted(unknown))}, which is not served; the names "
                f"are {', '.join(sorted(names))}"
            )


def run_service(
    settings: ServerConfig,
    models: Sequence[Loadable],
    sock: socket.socket,
    console: Console,
) -> None:
    """Serve `models` on the bound `sock` until a signal; returns after an orderly end.

    Raises:
        CliError: every model failed to load, or the port was taken meanwhile.
    """
    from server.listener import ListenError
    from server.service import StartFailed

    try:
        asyncio.run(_serve(settings, models, sock, console))
    except (ListenError, StartFailed) as error:
        raise CliError(str(error)) from error


async def _serve(
    settings: ServerConfig,
    models: Sequence[Loadable],
    sock: socket.socket,
    console: Console,
) -> None:
    from server.app import create_app
    from server.metrics import Metrics
    from server.models import ModelManager, client_policy, http_settings
    from server.service import Service

    metrics = Metrics()
    manager = ModelManager(client_policy(settings), metrics)
    url = url_of(settings, sock)

    def start_models() -> None:
        console.print(f"{url} answers; loading {', '.join(m.name for m in models)}", markup=False)
        for model in models:
            manager.load_any(model)

    service = Service(
        create_app(manager, http_settings(settings), metrics=metrics),
        sock,
        manager,
        start_models,
        lambda: print_banner(console, manager, url),
        settings.server.drain_timeout_s,
    )
    await service.run()


def url_of(settings: ServerConfig, sock: socket.socket) -> str:
    from server.listener import base_url

    return base_url(settings.server.host, sock.getsockname()[1])


def print_banner(console: Console, manager: ModelManager, url: str) -> None:
    """What was loaded, on what and why, and how to use it."""
    failures = manager.failures()
    models = manager.everything()
    lines = [_model_line(model, failures.get(model.name)) for model in models]
    working = next(model for model in models if model.name not in failures)
    lines += [f"ready  {url}/v1", f"try    {_example(working, url)}"]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _example(model: Served, url: str) -> str:
    from server.served_model import ServedModel

    path, rest = "embeddings", '"input": "Hello"'
    if not isinstance(model, ServedModel) and model.is_cross_encoder:
        path, rest = "rerank", '"query": "Hello", "documents": ["Good day", "Goodbye"]'
    elif isinstance(model, ServedModel):
        path, rest = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    body = f'{{"model": "{model.name}", {rest}}}'
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'"


def _model_line(model: Served, failure: str | None) -> str:
    from server.machine import format_bytes
    from server.served_embedder import ServedEmbedder

    info = model.engine.info
    if failure is not None or info is None:
        return f"failed {model.name}: {failure or 'it is not loaded'}"
    line = (
        f"model  {model.name} on {info.device} ({info.device_reason}), {info.num_threads} threads"
    )
    if isinstance(model, ServedEmbedder) and model.is_cross_encoder:
        return f"{line}\nrank   pairs of {info.max_model_len} tokens"
    if isinstance(model, ServedEmbedder):
        return f"{line}\nembed  {model.dimensions} dimensions, texts of {info.max_model_len} tokens"
    return (
        f"{line}\nkv     {info.num_blocks:,} blocks = {info.num_blocks * info.block_size:,} tokens "
        f"of {info.kv_format}, {format_bytes(info.kv_bytes)}"
    )
