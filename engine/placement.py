"""Which device runs a model, and why. A pure decision over what was asked and what was found."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import DeviceUnavailable

DEVICES = ("auto", "npu", "cpu")


@dataclass(frozen=True, slots=True)
class Placement:
    """`reason` is shown once in the log and on `/health`."""

    device: str
    reason: str


def place(requested: str, npu_found: bool, npu_finding: str) -> Placement:
    """Raises DeviceUnavailable for `npu`: this version computes on the CPU only."""
    if requested == "cpu":
        return Placement("cpu", "asked for with --device cpu")
    if requested == "npu":
        raise DeviceUnavailable(
            f"--device npu: {npu_finding}; and this version of hexlm has no NPU lane yet: "
            "use --device auto or cpu"
        )
    if requested == "auto":
        why = "an NPU is there but this version has no lane for it" if npu_found else npu_finding
        return Placement("cpu", f"chosen automatically: {why}")
    raise DeviceUnavailable(f"unknown device {requested!r}: use one of {', '.join(DEVICES)}")
