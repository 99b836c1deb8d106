"""The compiled contexts of one bundle for one chip: where they lie and whether they can be used.

    <bundle>/npu/88-2.51.0/segment_000/context.json               recipe, graphs, sizes, digests
                                       segment_000_t1_ctx.onnx    a model of one EPContext node
                                       segment_000_t1_ctx_qnn.bin the binary, shared or not

A group is written into a folder of another name, checked and renamed, so it is whole or not there.
Contexts of another recipe, and files that are not as they were written, are never used. Knows
nothing of how contexts are made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.bundle import WEIGHTS_FILE, Bundle, file_sha256
from engine.export.model import INDEX_FILE
from engine.npu.compiled_model import check_model
from engine.npu.recipe import UNSHARED, ContextGroup, ContextRecipe, GraphId, differing

CONTEXTS_FOLDER = "npu"
GROUP_FILE = "context.json"
_FORMAT = 1


class GroupState(StrEnum):
    VALID = "valid"
    MISSING = "missing"
    OUTDATED = "outdated"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """`reason` says what is wrong with a group that is not valid."""

    group: ContextGroup
    state: GroupState
    reason: str = ""


class ContextStore:
    """Keeps no state of its own: several processes may look at the same store."""

    def __init__(
        self, bundle: Bundle, recipe: ContextRecipe, groups: Sequence[ContextGroup]
    ) -> None:
        self.bundle = bundle
        self.recipe = recipe
        self.groups = tuple(groups)
        self.folder = bundle.path / CONTEXTS_FOLDER / recipe.folder_name

    @property
    def num_graphs(self) -> int:
        return sum(len(group.graphs) for group in self.groups)

    def path(self, graph: GraphId) -> Path:
        """The model to open, if its group is valid."""
        return self.folder / graph.part / context_file(graph)

    def checks(self) -> tuple[GroupCheck, ...]:
        """All groups, every byte of them compared with its digest."""
        return tuple(self.check(group) for group in self.groups)

    def invalid(self) -> tuple[ContextGroup, ...]:
        """The groups that have to be compiled."""
        return tuple(c.group for c in self.checks() if c.state is not GroupState.VALID)

    def num_present(self) -> int:
        """Graphs that are there by the look of it; cheap, for the progress of another process."""
        return sum(
            len(group.graphs)
            for group in self.groups
            if (self.folder / group.name / GROUP_FILE).is_file()
        )

    def check(self, group: ContextGroup) -> GroupCheck:
        folder = self.folder / group.name
        try:
            record = json.loads((folder / GROUP_FILE).read_bytes())
        except FileNotFoundError:
            return GroupCheck(group, GroupState.MISSING, "not compiled yet")
        except (OSError, ValueError) as error:
            return GroupCheck(group, GroupState.DAMAGED, f"{GROUP_FILE}: {error}")
        try:
            if reason := self._outdated(group, record):
                return GroupCheck(group, GroupState.OUTDATED, reason)
            reason = _damage(folder, record["files"])
        except (KeyError, TypeError, AttributeError, OSError) as error:
            return GroupCheck(group, GroupState.DAMAGED, f"{GROUP_FILE}: {error!r}")
        return GroupCheck(group, GroupState.DAMAGED if reason else GroupState.VALID, reason or "")

    def publish(self, group: ContextGroup, folder: Path) -> int:
        """Takes over what was compiled into `folder`, if it is what it should be.

        Returns the number of bytes. Raises CompileFailed or OSError.
        """
        for graph in group.graphs:
            check_model(folder / context_file(graph), self.recipe.qairt)
        paths = sorted(folder.iterdir())
        sizes = [path.stat().st_size for path in paths]
        files = [
            {"name": path.name, "num_bytes": size, "sha256": file_sha256(path)}
            for path, size in zip(paths, sizes, strict=True)
        ]
        record = {
            "format": _FORMAT,
            "recipe": asdict(self.recipe),
            "graphs": [graph.name for graph in group.graphs],
            "files": files,
        }
        (folder / GROUP_FILE).write_text(json.dumps(record, indent=1), "utf-8")
        target = self.folder / group.name
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
        return sum(sizes)

    def partial_folder(self, group: ContextGroup) -> Path:
        """Empty, to compile into. Whatever an earlier attempt left there is gone."""
        folder = self.folder / f".partial-{group.name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def clear(self) -> None:
        """Every group, also half-made ones; the lock of who compiles now stays."""
        for folder in self.folder.glob("*/"):
            shutil.rmtree(folder, ignore_errors=True)

    def _outdated(self, group: ContextGroup, record: dict[str, Any]) -> str | None:
        if record["format"] != _FORMAT:
            return f"made in the format {record['format']}"
        # Also more graphs than these: the provider keeps what nobody opens and trips over it later.
        if record["graphs"] != [graph.name for graph in group.graphs]:
            return f"made for {', '.join(map(str, record['graphs']))}"
        return differing(self.recipe, record["recipe"])


def context_file(graph: GraphId) -> str:
    return f"{graph.name}_ctx.onnx"


def bundle_digest(bundle: Bundle) -> str:
    """Of what the graphs and their weights follow from: the same for imports of one source by one
    version on two machines, so that contexts can be made on one for the other."""
    manifest = bundle.manifest
    weights = [file for file in manifest.files if file.name in (WEIGHTS_FILE, INDEX_FILE)]
    document = {
        "source": manifest.source.sha256,
        "converter": manifest.converter,
        "config": asdict(bundle.config),
        "weights": [asdict(file) for file in weights],
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def other_folders(bundle: Bundle, recipe: ContextRecipe) -> tuple[Path, ...]:
    """Contexts in the bundle for the same chip that another QAIRT version made."""
    folder = bundle.path / CONTEXTS_FOLDER
    prefix, unshared = f"{recipe.soc_model}-", recipe.folder_name.endswith(UNSHARED)
    found = folder.iterdir() if folder.is_dir() else ()
    return tuple(
        path
        for path in sorted(found)
        if path.name.startswith(prefix)
        and path.name.endswith(UNSHARED) == unshared
        and path.name != recipe.folder_name
    )


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _damage(folder: Path, files: list[dict[str, Any]]) -> str | None:
    """What the first file is that is not as it was written."""
    for file in files:
        path = folder / Path(file["name"]).name
        if not path.is_file():
            return f"{path.name} is missing"
        if path.stat().st_size != file["num_bytes"]:
            return f"{path.name} has {path.stat().st_size} bytes instead of {file['num_bytes']}"
        if file_sha256(path) != file["sha256"]:
            return f"{path.name} has changed"
    return None
