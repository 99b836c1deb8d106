"""What a compiling process is told, as one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.npu.recipe import ContextGroup, ContextRecipe, GraphId


@dataclass(frozen=True, slots=True)
class CompileTask:
    """`background`: at a lower priority than what else this machine does."""

    bundle: Path
    recipe: ContextRecipe
    groups: tuple[ContextGroup, ...]
    background: bool = False


def encode_task(task: CompileTask) -> str:
    return json.dumps(asdict(task) | {"bundle": str(task.bundle)}) + "\n"


def decode_task(line: str) -> CompileTask:
    document = json.loads(line)
    recipe = document["recipe"]
    options = tuple((key, value) for key, value in recipe.pop("options"))
    groups = tuple(
        ContextGroup(group["name"], tuple(GraphId(**graph) for graph in group["graphs"]))
        for group in document["groups"]
    )
    return CompileTask(
        Path(document["bundle"]),
        ContextRecipe(**recipe, options=options),
        groups,
        document["background"],
    )
