"""Sessions: bound arrays in and out, and ONNX Runtime's errors as ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from engine.errors import BundleError, DeviceError
from engine.session import CpuSessions, Session


def write_graph(path: Path) -> Path:
    """y = x + x, for any number of rows of 4."""
    shape: list[str | int | None] = ["T", 4]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "double",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
    )
    opsets = [helper.make_opsetid("", 21)]
    path.write_bytes(
        helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    )
    return path


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return CpuSessions(1).open(write_graph(tmp_path / "double.onnx"))


def test_a_session_reads_and_writes_the_bound_arrays_at_every_run(session: Session) -> None:
    assert_doubles(session)


def assert_doubles(session: Session) -> None:
    x, y = np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32)
    session.bind_input("x", x)
    session.bind_output("y", y)
    session.run()
    assert (y == 2).all()
    x[1] = 5
    session.run()
    assert y[:, 0].tolist() == [2, 10, 2]


def test_a_session_can_be_bound_again_with_another_size(session: Session) -> None:
    x, y = np.ones((9, 4), np.float32), np.zeros((9, 4), np.float32)
    for size in (9, 2, 7):
        y[:] = 0
        session.bind_input("x", x[:size])
        session.bind_output("y", y[:size])
        session.run()
        assert (y[:size] == 2).all() and not y[size:].any()


def test_a_run_that_fails_is_a_device_error_of_one_line(session: Session) -> None:
    session.bind_input("x", np.ones((3, 5), np.float32))
    session.bind_output("y", np.zeros((3, 4), np.float32))
    with pytest.raises(DeviceError, match=r"^double\.onnx failed: .*") as caught:
        session.run()
    assert "\n" not in str(caught.value) and caught.value.__cause__ is not None


def test_a_session_works_again_after_a_failure(session: Session) -> None:
    session.bind_input("x", np.ones((3, 5), np.float32))
    with pytest.raises(DeviceError):
        session.run()
    assert_doubles(session)


@pytest.mark.parametrize("content", [None, b"", b"\x00" * 50])
def test_a_graph_that_cannot_be_loaded_is_a_bundle_error(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "bad.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BundleError, match=r"bad\.onnx cannot be loaded: ") as caught:
        CpuSessions(1).open(path)
    assert "\n" not in str(caught.value)


def test_nothing_is_kept_or_sent_about_the_user(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", "import engine.session"], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []
