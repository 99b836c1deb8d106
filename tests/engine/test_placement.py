"""The choice of a device is explained, and what is not there is refused."""

from __future__ import annotations

import pytest

from engine.errors import DeviceUnavailable
from engine.placement import Placement, place

NOT_FOUND = "the package onnxruntime-qnn is not installed"


def test_cpu_is_given_to_who_asks_for_it() -> None:
    assert place("cpu", True, "") == Placement("cpu", "asked for with --device cpu")


def test_auto_says_why_it_is_the_cpu() -> None:
    assert place("auto", False, NOT_FOUND) == Placement(
        "cpu", "chosen automatically: the package onnxruntime-qnn is not installed"
    )
    found = place("auto", True, "the QNN provider lists a Hexagon NPU")
    assert found.device == "cpu" and "an NPU is there but" in found.reason


def test_npu_is_refused_with_what_was_found() -> None:
    with pytest.raises(DeviceUnavailable, match=f"--device npu: {NOT_FOUND}; .* use --device auto"):
        place("npu", False, NOT_FOUND)


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DeviceUnavailable, match="unknown device 'gpu': use one of auto, npu, cpu"):
        place("gpu", False, NOT_FOUND)
