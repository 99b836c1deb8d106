"""Stands in for the compiling process: `python fake_compiler.py MODE`, and what it leaves behind.

`good` writes contexts that pass for real ones; `refuse` gives a reason; `lie` does nothing and
says nothing; `die` ends by a signal at the second graph, `die-once` only the first time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import onnx
from onnx import helper

from engine.bundle import Bundle
from engine.npu.compile_task import CompileTask, decode_task
from engine.npu.context_store import ContextStore, context_file
from engine.npu.recipe import ContextGroup


def write_contexts(
    folder: Path, group: ContextGroup, qairt: str = "2.51.0", op_type: str = "EPContext"
) -> None:
    """One binary for all graphs of the group, named after the first."""
    binary = f"{group.graphs[0].name}_ctx_qnn.bin"
    (folder / binary).write_bytes(group.name.encode() * 100)
    for graph in group.graphs:
        node = helper.make_node(
            op_type,
            ["x"],
            ["y"],
            domain="com.microsoft",
            ep_cache_context=binary,
            ep_sdk_version=f"v{qairt}.260929181845",
        )
        value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
        model = helper.make_model(helper.make_graph([node], graph.name, value[:1], value[1:]))
        (folder / context_file(graph)).write_bytes(model.SerializeToString())


def tell(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def compile_all(task: CompileTask, mode: str) -> None:
    store = ContextStore(Bundle.open(task.bundle), task.recipe, task.groups)
    for group in task.groups:
        folder = store.partial_folder(group)
        for number, graph in enumerate(group.graphs):
            tell(event="graph", graph=graph.name)
            if number == 1 and may_die(store.folder, mode):
                sys.stderr.write("terminate called after throwing an instance of 'fake'\n")
                sys.stderr.flush()
                os.abort()
            tell(event="compiled", graph=graph.name, seconds=0.5)
        write_contexts(folder, group, task.recipe.qairt)
        tell(event="group", group=group.name, num_bytes=store.publish(group, folder))


def may_die(folder: Path, mode: str) -> bool:
    mark = folder / "died"
    if mode == "die-once" and not mark.exists():
        mark.touch()
        return True
    return mode == "die"


def main() -> None:
    mode, task = sys.argv[1], decode_task(sys.stdin.readline())
    match mode:
        case "lie":
            pass
        case "refuse":
            tell(event="failed", message="segment_000_t1: the provider refuses MatMulNBits")
        case _:
            compile_all(task, mode)


if __name__ == "__main__":
    main()
