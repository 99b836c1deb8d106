"""GET /debug/trace: the next steps of an engine, as a file for Perfetto. Off unless asked for."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from engine.version import own_version
from scheduler.messages import TraceResult
from server.app_state import app_state
from server.disconnect import run_until_disconnect
from server.errors import DebugDisabled, InvalidRequest
from server.served_model import ServedModel
from server.trace_json import trace_json

router = APIRouter()

MAX_STEPS = 1000
DEFAULT_STEPS = 50
MAX_TIMEOUT_S = 600.0
DEFAULT_TIMEOUT_S = 30.0


@router.get("/debug/trace", response_model=None, include_in_schema=False)
async def trace(request: Request) -> StreamingResponse:
    """`?steps=N` of `?model=NAME`; after `?timeout=S` seconds the answer has those that there were.

    Raises DebugDisabled, InvalidRequest, UnknownModel, WrongModelKind, TraceBusy or
    EngineUnavailable.
    """
    state = app_state(request)
    if not state.settings.debug:
        raise DebugDisabled
    num_steps, timeout_s = read_steps(request), read_timeout_s(request)
    model = state.models.get(request.query_params.get("model"))
    recording = model.engine.trace(num_steps, timeout_s)
    result = await run_until_disconnect(request, recording)
    facts = await asyncio.to_thread(trace_facts, model, result, num_steps)
    return StreamingResponse(
        trace_json(result.steps, facts),
        media_type="application/json",
        headers={"content-disposition": 'attachment; filename="trace.json"'},
    )


def read_steps(request: Request) -> int:
    """Raises InvalidRequest."""
    given = request.query_params.get("steps", str(DEFAULT_STEPS))
    if not (given.isascii() and given.isdecimal()) or not 1 <= int(given[:9]) <= MAX_STEPS:
        raise InvalidRequest(
            f"'steps' must be a whole number from 1 to {MAX_STEPS:,}, not '{given[:40]}'.",
            param="steps",
        )
    return int(given)


def read_timeout_s(request: Request) -> float:
    """Raises InvalidRequest."""
    given = request.query_params.get("timeout", str(DEFAULT_TIMEOUT_S))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"'timeout' must be a number of seconds above 0 and up to {MAX_TIMEOUT_S:,.0f}, "
            f"not '{given[:40]}'.",
            param="timeout",
        )
    return seconds


def trace_facts(model: ServedModel, result: TraceResult, num_wanted: int) -> dict[str, Any]:
    """What the steps were computed with, and what each of them had to move and compute."""
    info = model.engine.info
    first = result.steps[0].spans[0].start_ns if result.steps else None
    return {
        "hexlm": own_version(),
        "model": model.name,
        "quantization": model.quantization,
        "device": info.device if info else None,
        "num_threads": info.num_threads if info else None,
        "kv_format": info.kv_format if info else None,
        "num_steps": len(result.steps),
        "num_steps_wanted": num_wanted,
        "start_s": first / 1e9 if first else None,
        "cost": _cost(model.folder),
    }


def _cost(folder: Path | None) -> dict[str, Any] | None:
    """See `model_cost.ModelCost`; None where nothing tells."""
    from engine.bundle import Bundle
    from engine.errors import BundleError
    from server.bench.model_cost import find_cost

    try:
        cost = find_cost(Bundle.open(folder)) if folder is not None else None
    except BundleError:
        return None
    return asdict(cost) if cost is not None else None
