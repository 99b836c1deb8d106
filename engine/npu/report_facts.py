"""What stands beside the numbers of a report: the machine, the provider, the model."""

from __future__ import annotations

import platform
import sys
from typing import Any

import psutil

from engine.engine_parts import EngineParts
from engine.errors import EngineError

Facts = dict[str, Any]


def machine_facts() -> Facts:
    from engine.npu.reported_chip import reported_chip

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return {
        "chip": reported_chip(),
        "system": platform.platform(),
        "python": f"{platform.python_version()} {platform.machine()}",
        "num_cores": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "is_on_battery": battery is not None and not battery.power_plugged,
        "command": " ".join(sys.argv[1:]),
    }


def provider_facts() -> Facts:
    from engine.npu.qnn_session import backend_library, driver_problem
    from engine.npu.versions import provider_version, qairt_build

    try:
        problem = driver_problem()
    except EngineError as error:
        problem = str(error)
    build = qairt_build(backend_library())
    return {"provider": provider_version(), "qairt": build, "driver_problem": problem}


def model_facts(parts: EngineParts) -> Facts:
    config = parts.bundle.config
    return {
        "name": parts.bundle.name,
        "weight_format": parts.bundle.weight_format,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "weights_bytes": parts.bundle.weights_path.stat().st_size,
        "kv_format": parts.cache.kv_format.name,
        "num_threads": parts.num_threads,
    }
