"""Token ids to vectors for a request: its time limit, its client, its metrics and its key's limit.

The same for every endpoint that needs vectors. Does not know what becomes of them.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from starlette.requests import Request

from scheduler.messages import EmbedRequest
from server.app_state import app_state, charge_tokens
from server.disconnect import ClientDisconnected, run_until_disconnect
from server.errors import ApiError, DeadlineExceeded
from server.served_embedder import Float32Array, ServedEmbedder


async def embed(
    request: Request, model: ServedEmbedder, inputs: tuple[tuple[int, ...], ...]
) -> Float32Array:
    """Vectors [inputs, dimensions] of length 1.

    Raises:
        ClientDisconnected: nobody waits any more; the engine has been told.
        DeadlineExceeded: the request's time is over.
        QueueFull, EngineUnavailable, GenerationFailed: as `EmbeddingEngine.embed`.
    """
    state = app_state(request)
    context = state.context(request)
    wanted = EmbedRequest(f"embd-{secrets.token_hex(12)}", inputs)
    reason = "error"
    try:
        async with asyncio.timeout(_remaining_s(context.timeout_s, context.arrival_s)):
            vectors = await run_until_disconnect(request, model.engine.embed(wanted))
        reason = "stop"
    except TimeoutError as error:
        reason = "deadline"
        raise DeadlineExceeded(
            f"The request took longer than its limit of {context.timeout_s:g} s."
        ) from error
    except ClientDisconnected:
        reason = "abort"
        raise
    except ApiError as error:
        reason = "error" if error.status >= 500 else "refused"
        raise
    finally:
        if reason != "refused":
            elapsed_s = time.monotonic() - context.arrival_s
            state.metrics.observe_finished(model.name, reason, elapsed_s)
    charge_tokens(request, sum(map(len, inputs)))
    return vectors


def device_header(model: ServedEmbedder) -> dict[str, str]:
    """Which device computed the vectors."""
    info = model.engine.info
    return {"x-hexlm-device": info.device} if info else {}


def _remaining_s(timeout_s: float | None, arrival_s: float) -> float | None:
    return None if timeout_s is None else max(0.0, arrival_s + timeout_s - time.monotonic())
