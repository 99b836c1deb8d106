"""The smallest graph there is, to find out what a call costs that computes nothing."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

SHAPE = (1, 1, 64)
INPUT, OUTPUT = "probe_in", "probe_out"

_OPSET, _IR_VERSION = 17, 10


def probe_graph(shape: tuple[int, ...] = SHAPE) -> bytes:
    """`probe_out` = 2 x `probe_in`, both float32 of this shape."""
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in (INPUT, OUTPUT)
    ]
    node = helper.make_node("Add", [INPUT, INPUT], [OUTPUT], name="probe")
    graph = helper.make_graph([node], "probe", values[:1], values[1:])
    opset = helper.make_opsetid("", _OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION)
    serialized: bytes = model.SerializeToString()
    onnx.checker.check_model(model)
    return serialized
