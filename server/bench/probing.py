"""Finds out what a server is and how it wants to be asked, by asking.

From the most exact way to the least: token ids or text, with or without `ignore_eos`. Knows no
suites.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx

from server.bench.dialect import Dialect, PromptKind
from server.bench.errors import BenchError, RequestFailed
from server.bench.target import Target, TargetInfo, refused
from server.bench.workloads import TokenRange

RANGES = (TokenRange(), TokenRange(300, 3_000), TokenRange(40, 120))
"""Of common ids; the later ones for small vocabularies."""

_WORDS = tuple(range(200, 300))


async def probe(name: str, http: httpx.AsyncClient, model: str | None, **known: Any) -> Target:
    """`known`: further arguments of `Target`. Raises BenchError if the server is of no use."""
    info = await find_info(name, http, model)
    target = Target(name, http, info, Dialect(), **known)
    refusal = "no way was tried"
    for dialect in dialects():
        target.dialect = dialect
        try:
            timing = await target.ask(_probe_prompt(dialect), 2)
        except RequestFailed as error:
            refusal = str(error)
            continue
        if dialect.kind is not PromptKind.TOKEN_IDS and timing.num_prompt_tokens:
            target.dialect = replace(
                dialect, words_per_token=len(_WORDS) / timing.num_prompt_tokens
            )
        return target
    raise BenchError(f"{name} answers none of the requests tried; the last one: {refusal}")


def dialects() -> tuple[Dialect, ...]:
    ids = [Dialect(PromptKind.TOKEN_IDS, eos, ids) for ids in RANGES for eos in (True, False)]
    kinds = (PromptKind.TEXT, PromptKind.CHAT)
    return (*ids, *(Dialect(kind, eos) for kind in kinds for eos in (True, False)))


def _probe_prompt(dialect: Dialect) -> tuple[int, ...]:
    if dialect.kind is PromptKind.TOKEN_IDS:
        return (dialect.tokens.start, dialect.tokens.stop - 1)
    return _WORDS


async def find_info(name: str, http: httpx.AsyncClient, model: str | None) -> TargetInfo:
    """Raises BenchError: nobody answers, or the model is not served."""
    try:
        response = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise BenchError(f"nobody answers at the URL of the {name}; is it up?") from error
    if response.status_code != 200:
        raise BenchError(f"{name}: /v1/models: {refused(response.status_code, response.content)}")
    try:
        models = {each["id"]: each for each in response.json()["data"]}
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{name}: /v1/models is no list of models in OpenAI's format") from error
    if not models or model is not None and model not in models:
        raise BenchError(f"{name} does not serve {model or 'any model'}; it has {sorted(models)}")
    chosen = model or next(iter(models))
    health = await _hexlm_health(http, chosen)
    if health is None:
        meta = models[chosen].get("meta") or {}
        limit = models[chosen].get("max_model_len") or meta.get("n_ctx")
        return TargetInfo(chosen, max_model_len=int(limit) if limit else None)
    return hexlm_info(chosen, health)


async def _hexlm_health(http: httpx.AsyncClient, model: str) -> dict[str, Any] | None:
    """None where it is another server."""
    try:
        root = (await http.get("/")).json()
        if not isinstance(root, dict) or root.get("name") != "hexlm":
            return None
        health: dict[str, Any] = (await http.get("/health")).json()["models"][model]
    except (httpx.HTTPError, json.JSONDecodeError, UnicodeDecodeError, KeyError):
        return None
    return health


def hexlm_info(model: str, health: dict[str, Any]) -> TargetInfo:
    """Raises BenchError if the engine is not ready."""
    engine = health.get("engine")
    if engine is None:
        raise BenchError(f"{model} is not ready: {health.get('state')} {health.get('detail')}")
    shown = ("device", "device_reason", "num_threads", "kv_format", "weight_format", "kv_bytes")
    facts = {name: engine[name] for name in (*shown, "num_blocks") if name in engine}
    limit = engine.get("max_model_len")
    size = int(engine.get("block_size") or 16)
    return TargetInfo(model, "hexlm", limit, size, facts)
