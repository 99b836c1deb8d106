"""What `hexlm doctor` knows of a machine, as plain values that can be recorded and replayed.

No rule is here (`findings.py`) and no effect (`probes.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Architectures are `arm64`, `x86_64` or as the system says. `chip` "" when it is not told.

    `device` is the NPU device of `configs/devices` that the chip's name fits, and `soc_model` its
    number. `on_battery` None: there is no battery.
    """

    system: str
    machine_arch: str
    python_arch: str
    python_version: str
    chip: str
    device: str | None
    soc_model: int | None
    glibc: str
    memory_bytes: int
    available_bytes: int
    on_battery: bool | None


@dataclass(frozen=True, slots=True)
class ProviderFacts:
    """Versions None: not installed. `finding` is the provider's own sentence about the NPU.

    `crash` says how the process ended that asked the provider, if it did not answer.
    `others` are packages that write into onnxruntime's folder, too. `device_node` is Linux's way
    to the NPU, "" elsewhere.
    """

    onnxruntime: str | None
    provider: str | None
    qairt: str | None
    npu_found: bool
    finding: str
    crash: str | None
    driver_name: str | None
    driver_version: str | None
    driver_problem: str | None
    device_node: str
    device_node_usable: bool
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ContextFacts:
    """One folder of contexts. `device` None: of a version or a chip that is not of today.

    `counts` has the number of groups per state; `reason` is that of the first that is not valid.
    """

    folder: str
    device: str | None
    num_bytes: int
    counts: dict[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`problem`: why it cannot be used; the numbers are then 0. KV cache in int8."""

    name: str
    problem: str | None
    writes_text: bool
    weight_bytes: int
    kv_bytes_per_token: int
    context_length: int
    contexts: tuple[ContextFacts, ...]


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """`is_private`: nobody else may write into it. `has_kernels`: the CPU's are compiled."""

    path: str
    exists: bool
    is_writable: bool
    is_private: bool
    free_bytes: int
    has_kernels: bool


@dataclass(frozen=True, slots=True)
class PortFacts:
    """`holder` is who listens there already, as far as the system tells; None: nobody."""

    host: str
    port: int
    holder: str | None


@dataclass(frozen=True, slots=True)
class Facts:
    version: str
    machine: MachineFacts
    provider: ProviderFacts
    cache: CacheFacts
    models: tuple[ModelFacts, ...]
    port: PortFacts
