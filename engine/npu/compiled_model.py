"""Whether a model that the provider wrote is a compiled context and nothing else."""

from __future__ import annotations

from pathlib import Path

import onnx

from engine.errors import CompileFailed
from engine.npu.versions import qairt_version


def check_model(path: Path, qairt: str) -> None:
    """Raises CompileFailed unless the file is a model of one EPContext node of this QAIRT version.

    The provider leaves such a file behind when it refuses a graph, too: with other nodes in it.
    """
    try:
        nodes = onnx.load(path, load_external_data=False).graph.node
    except Exception as error:  # protobuf's own, an OSError: whatever it is, the file is no model
        raise CompileFailed(f"{path.name} was not written: {type(error).__name__}") from error
    others = [node.op_type for node in nodes if node.op_type != "EPContext"]
    if others or len(nodes) != 1:
        left = ", ".join(others) or f"{len(nodes)} nodes"
        raise CompileFailed(f"{path.name} holds more than one compiled node: {left}")
    attributes = {attribute.name: attribute.s.decode() for attribute in nodes[0].attribute}
    build = attributes.get("ep_sdk_version", "")
    if qairt_version(build) != qairt:
        raise CompileFailed(
            f"{path.name} was compiled by QAIRT {build!r}, not {qairt}; reinstall onnxruntime-qnn"
        )
    binary = attributes.get("ep_cache_context", "")
    if Path(binary).name != binary or not (path.parent / binary).is_file():
        raise CompileFailed(f"{path.name} names the binary {binary!r}, which is not beside it")
