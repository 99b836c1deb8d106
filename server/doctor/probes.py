"""Reads the machine: every fact of `facts.py`, and nothing is judged here.

Asking the provider loads native code of others' drivers, so a process of its own does that, and
its death is a fact, too. Never raises for what it finds; an answer that cannot be had is None or
"".
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil

from engine.bundle import Bundle
from engine.errors import DeviceUnavailable, EngineError
from engine.kernels import kernel_cache
from engine.manifest import ModelKind
from engine.npu.context_store import CONTEXTS_FOLDER, folder_bytes
from engine.npu.device_config import DeviceConfig, choose_device, packaged_devices
from engine.npu.device_contexts import context_store
from engine.npu.qnn_session import backend_library
from engine.npu.reported_chip import reported_chip
from engine.npu.versions import qairt_build, qairt_version
from engine.version import own_version
from server.bench.kv_use import kv_bytes_per_token
from server.doctor import windows
from server.doctor.facts import (
    CacheFacts,
    ContextFacts,
    Facts,
    MachineFacts,
    ModelFacts,
    PortFacts,
    ProviderFacts,
)
from server.machine import available_memory_bytes
from server.model_store import ModelStore, StoredModel

ASK_PROVIDER = (sys.executable, "-m", "server.doctor.ask_provider")
ASK_TIMEOUT_S = 60.0
DEVICE_NODES = ("/dev/fastrpc-cdsp", "/dev/fastrpc-cdsp-secure")
SAME_FOLDER = (
    "onnxruntime-directml",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
    "onnxruntime-training",
)
_ARCHITECTURES = {"amd64": "x86_64", "aarch64": "arm64"}


def read_facts(store: ModelStore, host: str, port: int) -> Facts:
    return Facts(
        version=own_version(),
        machine=machine_facts(),
        provider=provider_facts(),
        cache=cache_facts(store.root),
        models=tuple(model_facts(model) for model in store.list()),
        port=PortFacts(host, port, port_holder(host, port)),
    )


def machine_facts() -> MachineFacts:
    chip = reported_chip()
    device = device_of(chip)
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    built_for = sysconfig.get_platform().rpartition("-")[2]
    library, glibc = platform.libc_ver()
    return MachineFacts(
        system=platform.system(),
        machine_arch=plain_arch(windows.native_arch() or platform.machine()),
        python_arch=plain_arch(built_for if sys.platform == "win32" else platform.machine()),
        python_version=platform.python_version(),
        chip=chip,
        device=device.name if device else None,
        soc_model=device.soc_model if device else None,
        glibc=glibc if library == "glibc" else "",
        memory_bytes=int(psutil.virtual_memory().total),
        available_bytes=available_memory_bytes(),
        on_battery=None if battery is None else not battery.power_plugged,
    )


def plain_arch(name: str) -> str:
    return _ARCHITECTURES.get(name.lower(), name.lower())


def device_of(chip: str) -> DeviceConfig | None:
    try:
        return choose_device(chip)
    except DeviceUnavailable:
        return None


def provider_facts(ask: Sequence[str] = ASK_PROVIDER) -> ProviderFacts:
    provider = package_version("onnxruntime-qnn")
    answer, crash = ask_provider(ask) if provider else ({}, None)
    driver_name, driver_version = windows.npu_driver() or (None, None)
    node = next((path for path in DEVICE_NODES if os.path.exists(path)), "")
    return ProviderFacts(
        onnxruntime=package_version("onnxruntime"),
        provider=provider,
        qairt=installed_qairt(),
        npu_found=answer.get("npu_found") is True,
        finding=str(answer.get("finding", "")),
        crash=crash,
        driver_name=driver_name,
        driver_version=driver_version,
        driver_problem=None if (problem := answer.get("driver_problem")) is None else str(problem),
        device_node=node,
        device_node_usable=bool(node) and os.access(node, os.R_OK | os.W_OK),
        others=tuple(name for name in SAME_FOLDER if package_version(name)),
    )


def ask_provider(command: Sequence[str]) -> tuple[dict[str, str | bool | None], str | None]:
    """(its answer, how the process ended that should have given it)."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=ASK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"no answer in {ASK_TIMEOUT_S:.0f} s"
    except OSError as error:
        return {}, str(error)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {}, f"exit code {done.returncode}"
    return answer, None


def installed_qairt() -> str | None:
    try:
        return qairt_version(qairt_build(backend_library()))
    except DeviceUnavailable:
        return None


def package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cache_facts(root: Path) -> CacheFacts:
    there = next(path for path in (root, *root.parents) if path.exists())
    kernels = kernel_cache.default_folder()
    return CacheFacts(
        path=str(root),
        exists=root.exists(),
        is_writable=os.access(there, os.W_OK),
        is_private=os.name == "nt" or not there.stat().st_mode & 0o022,
        free_bytes=shutil.disk_usage(there).free,
        has_kernels=kernels.is_dir() and any(kernels.iterdir()),
    )


def model_facts(model: StoredModel) -> ModelFacts:
    bundle = model.bundle
    if bundle is None:
        return ModelFacts(model.name, model.problem or "damaged", False, 0, 0, 0, ())
    writes_text = bundle.kind is ModelKind.GENERATION
    return ModelFacts(
        name=model.name,
        problem=None,
        writes_text=writes_text,
        weight_bytes=bundle.weights_path.stat().st_size,
        kv_bytes_per_token=kv_bytes_per_token(bundle.config)["int8"] if writes_text else 0,
        context_length=bundle.manifest.config.context_length,
        contexts=context_facts(bundle) if writes_text else (),
    )


def context_facts(bundle: Bundle) -> tuple[ContextFacts, ...]:
    """Every folder of contexts, those for today's devices and versions checked to the last byte."""
    root = bundle.path / CONTEXTS_FOLDER
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    known = stores_by_folder(bundle) if folders else {}
    return tuple(known.get(folder.name) or unknown_contexts(folder) for folder in folders)


def stores_by_folder(bundle: Bundle) -> dict[str, ContextFacts]:
    checked = {}
    for device in packaged_devices():
        with contextlib.suppress(EngineError):
            store = context_store(bundle, device)
            if not store.folder.is_dir():
                continue
            checks = store.checks()
            reasons = [f"{check.group.name}: {check.reason}" for check in checks if check.reason]
            checked[store.folder.name] = ContextFacts(
                folder=str(store.folder),
                device=device.name,
                num_bytes=folder_bytes(store.folder),
                counts=dict(Counter(str(check.state) for check in checks)),
                reason=reasons[0] if reasons else "",
            )
    return checked


def unknown_contexts(folder: Path) -> ContextFacts:
    return ContextFacts(str(folder), None, folder_bytes(folder), {}, "")


def port_holder(host: str, port: int) -> str | None:
    """Who listens on the port, by binding it for a moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        if os.name != "nt":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return listener_name(port)
    return None


def listener_name(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            taken = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if taken and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return "another program"
