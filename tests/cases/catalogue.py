"""The case catalogue: other servers' faults as inputs and right answers, read from `cases.json`.

An entry has an id, an area, what is asked (`request`), what is right in words, and often
`variants`: changes of the request with the status (and the `param` of the error) that each must
get. Macros stand for what a file cannot hold: `$MODEL` and `$EMBED_MODEL`, `$NEST(n)` (brackets
in brackets), `{"$repeat": …}` (a text many times; `ctx` times passes the context),
`{"$repeat_list": …}` and `{"$numbered": …}` (an object with that many numbered keys).
Knows no server.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "cases.json"
_NEST = re.compile(r"\$NEST\((\d+)\)")


@dataclass(frozen=True, slots=True)
class Case:
    """`basis`: `contract` (OpenAI's behaviour), `correctness`, or `choice` (a rule of ours)."""

    id: str
    area: str
    title: str
    basis: str
    status: int | str
    request: Mapping[str, Any]
    right: tuple[str, ...]
    variants: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Names:
    """What the macros stand for."""

    model: str
    embedding_model: str = "embedding-model"
    context_length: int = 512


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, and what must come back: the status, and the `param` of an error."""

    method: str
    path: str
    content: bytes
    status: int
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@cache
def catalogue() -> Mapping[str, Case]:
    """Every case by its id, in the order of the file."""
    entries = json.loads(_FILE.read_text("utf-8"))
    cases = [
        Case(
            **entry | {"right": tuple(entry["right"]), "variants": tuple(entry.get("variants", ()))}
        )
        for entry in entries
    ]
    return {case.id: case for case in cases}


def body_of(case_id: str, names: Names, **changes: Any) -> dict[str, Any]:
    """The body of a case's request, its macros expanded."""
    body = expand(catalogue()[case_id].request["body"], names)
    assert isinstance(body, dict)
    return body | changes


def exchange(case: Case, index: int, names: Names) -> Exchange:
    """The variant of that number as bytes to send."""
    variant = case.variants[index]
    return Exchange(
        method=case.request["method"],
        path=variant.get("path", case.request["path"]),
        content=_content(case.request, variant, names),
        status=variant["status"],
        param=variant.get("param"),
        headers=variant.get("headers", {}),
    )


def _content(request: Mapping[str, Any], variant: Mapping[str, Any], names: Names) -> bytes:
    if "set" in variant:
        same_route = "path" not in variant
        body = dict(request.get("body") or {}) if same_route else {"model": "$MODEL"}
        return json.dumps(expand(body | variant["set"], names)).encode()
    encoded = variant.get("raw_b64") or (None if "raw" in variant else request.get("raw_body_b64"))
    if encoded is not None:
        return base64.b64decode(encoded)
    text = _text(variant["raw"], names)
    return _NEST.sub(lambda match: "[" * int(match[1]) + "0" + "]" * int(match[1]), text).encode()


def expand(value: Any, names: Names) -> Any:
    if isinstance(value, str):
        return _text(value, names)
    if isinstance(value, list):
        return [expand(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$repeat"}:
        repeat = value["$repeat"]
        return repeat["text"] * _times(repeat["times"], names)
    if value.keys() == {"$repeat_list"}:
        return [value["$repeat_list"]["item"]] * value["$repeat_list"]["times"]
    if value.keys() == {"$numbered"}:
        return {str(i): value["$numbered"]["value"] for i in range(value["$numbered"]["times"])}
    return {key: expand(item, names) for key, item in value.items()}


def _times(times: int | str, names: Names) -> int:
    if isinstance(times, int):
        return times
    return names.context_length - 1 if times == "ctx-1" else names.context_length


def _text(text: str, names: Names) -> str:
    return text.replace("$EMBED_MODEL", names.embedding_model).replace("$MODEL", names.model)


def forced_text(body: dict[str, Any]) -> str | None:
    """Takes a `response_format` that allows one text only out of `body` and returns that text.

    A scripted engine says it by itself; a real one is made to by the schema.
    """
    response_format = body.get("response_format") or {}
    if response_format.get("json_schema", {}).get("name") != "forced":
        return None
    del body["response_format"]
    text: str = response_format["json_schema"]["schema"]["properties"]["t"]["enum"][0]
    return json.dumps({"t": text}, ensure_ascii=False)
