"""A generation to an HTTP response, streamed or whole. The same for every dialect.

The sequences are submitted before the response begins: what the engine refuses is an HTTP error
for streams too. Headers follow at once; comments keep the connection until the first token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.adapters.reply import json_bytes
from server.app_state import app_state, charge_tokens
from server.disconnect import run_until_disconnect
from server.events import Event
from server.generation import Generation, GenerationSpec
from server.served_model import ServedModel
from server.sse import EventStream

Batches = AsyncIterator[list[Event]]


async def answer(
    request: Request,
    model: ServedModel,
    spec: GenerationSpec,
    *,
    stream: Callable[[Batches], AsyncIterator[bytes]] | None,
    collect: Callable[[Batches], Awaitable[dict[str, Any]]],
) -> Response:
    """`stream` None: the whole answer in one body. Raises QueueFull or EngineUnavailable."""
    state = app_state(request)
    generation = await submitted(request, model, spec)
    headers = device_header(model)
    if stream is not None:
        return EventStream(
            stream(generation.batches()),
            generation.aclose,
            keep_alive_interval_s=state.settings.keep_alive_interval_s,
            headers=headers,
        )
    try:
        body = await run_until_disconnect(request, _collect(generation, collect))
    finally:
        await generation.aclose()
    return Response(
        json_bytes(body),
        media_type="application/json",
        headers=device_header(model, tuple(generation.devices)),
    )


async def submitted(request: Request, model: ServedModel, spec: GenerationSpec) -> Generation:
    """A generation that runs; call `aclose` in a `finally`. Raises QueueFull or EngineUnavailable.

    Its tokens count against the limit of the request's API key.
    """
    charge = partial(charge_tokens, request)
    generation = Generation(model, spec, app_state(request).metrics, charge)
    await generation.submit()
    return generation


def device_header(model: ServedModel, devices: tuple[str, ...] = ()) -> dict[str, str]:
    """Which devices ran the request; of a stream, which begins before that, those that would now.

    Several are joined by commas, in the order in which they came to it.
    """
    engine = model.engine
    if not devices and engine.devices is not None:
        is_open = any(
            lane.name == engine.devices.device and lane.state == "open"
            for lane in engine.devices.lanes
        )
        devices = (engine.devices.device if is_open else "cpu",)
    if not devices and engine.info is not None:
        devices = (engine.info.device,)
    return {"x-hexlm-device": ",".join(devices)} if devices else {}


async def _collect(
    generation: Generation, collect: Callable[[Batches], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    return await collect(generation.batches())
