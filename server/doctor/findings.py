"""From facts to findings: what is well, what is not, and how to mend it. Pure functions.

A PROBLEM keeps hexlm, or the NPU of a machine that has one, from working. A WARNING does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from server.doctor.facts import CacheFacts, ContextFacts, Facts, MachineFacts, ModelFacts
from server.machine import KV_MEMORY_SHARE, MIN_KV_MEMORY_BYTES, format_bytes

OLDEST_ONNXRUNTIME = (1, 32)
OLDEST_PROVIDER = (2, 7)
OLDEST_GLIBC = (2, 35)
LOW_DISK_BYTES = 2 * 1024**3
LONGEST_WINDOWS_PATH = 259
PATH_BELOW_CACHE = len(
    "/models//npu/88-2.51.0-unshared/.partial-segment_000/segment_000_t128_ctx_qnn.bin"
)
INSTALL_PROVIDER = "pip install --upgrade 'hexlm[npu]'"

KNOWN_BAD_PROVIDERS: dict[tuple[int, ...], str] = {
    (2, 6): "its contexts run 1.5 to 2.5 times slower on an X2 Elite (onnxruntime-qnn issue 858)",
    (2, 5): "large models fail to load with error 1002 (onnxruntime-qnn pull request 789)",
}


class Level(StrEnum):
    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """`fix` is "" where there is nothing to mend."""

    level: Level
    topic: str
    message: str
    fix: str = ""


Rule = Callable[[Facts], Iterator[Finding]]


def examine(facts: Facts) -> tuple[Finding, ...]:
    """All findings, in the order in which things depend on each other."""
    return tuple(finding for rule in RULES for finding in rule(facts))


def has_problem(findings: tuple[Finding, ...]) -> bool:
    return any(finding.level is Level.PROBLEM for finding in findings)


def chip(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    if machine.device is not None:
        text = (
            f"{machine.chip}: an NPU that hexlm knows ({machine.device}, soc {machine.soc_model})"
        )
        yield Finding(Level.OK, "chip", text)
    elif is_snapdragon(machine):
        yield Finding(
            Level.WARNING,
            "chip",
            f"{machine.chip} is a Snapdragon that hexlm has no device file for; the CPU is used",
            'copy a file of configs/devices, set its soc_model, and name it as [npu] device = "…"',
        )
    else:
        name = machine.chip or "a chip that does not tell its name"
        yield Finding(Level.INFO, "chip", f"{name}: no Snapdragon, so models run on the CPU")
    if machine.on_battery:
        yield Finding(
            Level.INFO, "chip", "running on battery, which lowers the clocks of CPU and NPU"
        )


def python(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    text = f"Python {machine.python_version} for {machine.python_arch} on {machine.machine_arch}"
    if machine.python_arch != machine.machine_arch:
        yield Finding(
            Level.PROBLEM,
            "python",
            f"{text}: it is emulated, so that the CPU is several times slower and the NPU cannot "
            "be used",
            "install Python 3.12 or 3.13 for ARM64 from python.org, and hexlm with its pip",
        )
    elif is_windows_on_arm(machine) and version(machine.python_version) < (3, 12):
        yield Finding(
            Level.PROBLEM,
            "python",
            f"{text}: numba has no wheels for it",
            "install Python 3.12 or 3.13 for ARM64",
        )
    else:
        yield Finding(Level.OK, "python", f"{text}: native")


def runtime(facts: Facts) -> Iterator[Finding]:
    installed = facts.provider.onnxruntime
    if installed is None or version(installed) < OLDEST_ONNXRUNTIME:
        what = "is not installed" if installed is None else f"{installed} is too old"
        yield Finding(
            Level.PROBLEM,
            "onnxruntime",
            f"onnxruntime {what}: hexlm needs 1.32",
            "pip install --upgrade onnxruntime",
        )
    else:
        yield Finding(Level.OK, "onnxruntime", f"onnxruntime {installed}")
    if facts.provider.others:
        names = ", ".join(facts.provider.others)
        yield Finding(
            Level.PROBLEM,
            "onnxruntime",
            f"{names} writes into the same folder as onnxruntime; the last one installed wins",
            f"pip uninstall {' '.join(facts.provider.others)} onnxruntime; pip install onnxruntime",
        )


def provider(facts: Facts) -> Iterator[Finding]:
    installed, npu_wanted = facts.provider.provider, wants_npu(facts.machine)
    if installed is None:
        yield from missing_provider(facts.machine)
        return
    if version(installed) < OLDEST_PROVIDER:
        why = KNOWN_BAD_PROVIDERS.get(version(installed)[:2], "it lacks operators that hexlm uses")
        level = Level.PROBLEM if npu_wanted else Level.WARNING
        text = f"onnxruntime-qnn {installed} is too old: {why}"
        yield Finding(level, "provider", text, INSTALL_PROVIDER)
        return
    if facts.provider.crash is not None:
        yield Finding(
            Level.PROBLEM if npu_wanted else Level.WARNING,
            "provider",
            f"onnxruntime-qnn {installed} ends the process that loads it ({facts.provider.crash})",
            "update the NPU's driver; until then serve with --device cpu",
        )
        return
    qairt = facts.provider.qairt or "unknown"
    yield Finding(Level.OK, "provider", f"onnxruntime-qnn {installed} with QAIRT {qairt}")


def missing_provider(machine: MachineFacts) -> Iterator[Finding]:
    if wants_npu(machine):
        text = "onnxruntime-qnn is not installed, so the NPU is not used"
        yield Finding(Level.PROBLEM, "provider", text, INSTALL_PROVIDER)
    elif machine.glibc and version(machine.glibc) < OLDEST_GLIBC:
        yield Finding(
            Level.INFO,
            "provider",
            f"onnxruntime-qnn needs glibc 2.35 and here is {machine.glibc}: no compiling for NPUs",
        )
    else:
        text = "onnxruntime-qnn is not installed; only compiling for an NPU would need it here"
        yield Finding(Level.INFO, "provider", text, INSTALL_PROVIDER)


def driver(facts: Facts) -> Iterator[Finding]:
    """Only where the provider could be asked, and where there should be an NPU."""
    asked = facts.provider
    if not wants_npu(facts.machine) or asked.provider is None or asked.crash is not None:
        return
    name = f"{asked.driver_name or 'NPU driver'} {asked.driver_version or ''}".strip()
    if asked.driver_problem is not None:
        yield Finding(
            Level.PROBLEM,
            "driver",
            f"{name}: {asked.driver_problem}",
            "update the NPU's driver: Windows Update, optional updates, or the PC maker's page",
        )
    elif asked.device_node and not asked.device_node_usable:
        yield Finding(
            Level.PROBLEM,
            "driver",
            f"no permission for {asked.device_node}, the way to the NPU",
            f"add your user to the group that owns {asked.device_node} and log in again",
        )
    elif not asked.npu_found:
        yield Finding(
            Level.PROBLEM,
            "driver",
            f"{asked.finding}, although this chip has one",
            "install the NPU's driver (Device Manager, Neural processors), then restart",
        )
    else:
        yield Finding(Level.OK, "driver", f"{name}: {asked.finding}")


def cache(facts: Facts) -> Iterator[Finding]:
    found = facts.cache
    if not found.exists:
        yield Finding(Level.INFO, "cache", f"{found.path} is not there yet; `hexlm pull` makes it")
    elif not found.is_writable:
        yield Finding(
            Level.PROBLEM,
            "cache",
            f"{found.path} cannot be written: nothing can be imported or compiled",
            f"give your user the folder: chown -R $USER {found.path}",
        )
    else:
        yield from usable_cache(found)
    yield from long_paths(facts)


def usable_cache(found: CacheFacts) -> Iterator[Finding]:
    if not found.is_private:
        yield Finding(
            Level.WARNING,
            "cache",
            f"others may write into {found.path}, and what lies there is loaded as code",
            f"chmod -R go-w {found.path}",
        )
    free = format_bytes(found.free_bytes)
    if found.free_bytes < LOW_DISK_BYTES:
        text = f"{found.path}: only {free} free"
        yield Finding(Level.WARNING, "cache", text, "make room, or `hexlm rm` a model")
    else:
        yield Finding(Level.OK, "cache", f"{found.path}: {free} free")
    if not found.has_kernels:
        text = "the CPU kernels are not compiled yet: the first start takes up to a minute longer"
        yield Finding(Level.INFO, "cache", text)


def long_paths(facts: Facts) -> Iterator[Finding]:
    if facts.machine.system != "Windows":
        return
    longest = max((len(model.name) for model in facts.models), default=0)
    length = len(facts.cache.path) + longest + PATH_BELOW_CACHE
    if length > LONGEST_WINDOWS_PATH:
        yield Finding(
            Level.WARNING,
            "cache",
            f"paths of contexts in {facts.cache.path} get {length} characters long; Windows and "
            f"the QNN libraries take {LONGEST_WINDOWS_PATH}",
            "import under a shorter name: hexlm pull … --name NAME",
        )


def models(facts: Facts) -> Iterator[Finding]:
    if not facts.models:
        yield Finding(Level.INFO, "models", "no model is here", "hexlm pull smollm2-135m-instruct")
    for model in facts.models:
        if model.problem is not None:
            yield Finding(
                Level.PROBLEM, model.name, model.problem, f"hexlm pull {model.name} --force"
            )
        else:
            yield memory(model, facts.machine)
            for contexts in model.contexts:
                yield check_contexts(model, contexts, facts)
            yield from not_compiled(model, facts)


def memory(model: ModelFacts, machine: MachineFacts) -> Finding:
    """Weights and at least one sequence of the model's own length in int8."""
    kv_bytes = model.kv_bytes_per_token * model.context_length
    least = model.weight_bytes + (MIN_KV_MEMORY_BYTES if model.writes_text else 0)
    text = (
        f"{format_bytes(model.weight_bytes)} of weights"
        + (
            f", {format_bytes(kv_bytes)} of KV for {model.context_length:,} tokens"
            if kv_bytes
            else ""
        )
        + f"; memory {format_bytes(machine.memory_bytes)}, "
        f"{format_bytes(machine.available_bytes)} available"
    )
    if least > machine.memory_bytes:
        fix = "use a smaller model, or import it with fewer bits (hexlm quantize)"
        return Finding(Level.PROBLEM, model.name, f"does not fit: {text}", fix)
    if least > machine.available_bytes:
        return Finding(Level.WARNING, model.name, f"does not fit now: {text}", "end other programs")
    if kv_bytes > KV_MEMORY_SHARE * machine.available_bytes:
        return Finding(
            Level.INFO,
            model.name,
            f"fits, but not at its full length by default: {text}",
            "give --kv-memory more, or --kv-format int4",
        )
    return Finding(Level.OK, model.name, f"fits: {text}")


def check_contexts(model: ModelFacts, contexts: ContextFacts, facts: Facts) -> Finding:
    size = format_bytes(contexts.num_bytes)
    if contexts.device is None:
        why = (
            "of another version or chip" if facts.provider.provider else "not checked: no provider"
        )
        return Finding(
            Level.INFO if facts.provider.provider is None else Level.WARNING,
            model.name,
            f"contexts in {contexts.folder} ({size}) are {why}",
            "" if facts.provider.provider is None else f"delete {contexts.folder}",
        )
    bad = {state: n for state, n in contexts.counts.items() if state != "valid" and n}
    if not bad:
        text = f"contexts for {contexts.device} are valid ({size} in {contexts.folder})"
        return Finding(Level.OK, model.name, text)
    what = ", ".join(f"{n} {state}" for state, n in bad.items())
    return Finding(
        Level.WARNING,
        model.name,
        f"contexts for {contexts.device}: {what} of {sum(contexts.counts.values())} "
        f"({contexts.reason}); they are compiled again when the model is loaded",
        f"hexlm compile {model.name} --device {contexts.device}",
    )


def not_compiled(model: ModelFacts, facts: Facts) -> Iterator[Finding]:
    device = facts.machine.device
    if device is None or not model.writes_text:
        return
    if all(contexts.device != device for contexts in model.contexts):
        yield Finding(
            Level.INFO,
            model.name,
            f"no contexts for {device} yet: compiled in the background at the first start",
            f"hexlm compile {model.name}",
        )


def port(facts: Facts) -> Iterator[Finding]:
    found = facts.port
    where = f"{found.host}:{found.port}"
    if found.holder is None:
        yield Finding(Level.OK, "port", f"{where} is free")
    else:
        yield Finding(
            Level.WARNING,
            "port",
            f"{where} is taken by {found.holder}",
            f"end it, or serve with --port {found.port + 1}",
        )


def wants_npu(machine: MachineFacts) -> bool:
    return machine.device is not None or is_snapdragon(machine)


def is_snapdragon(machine: MachineFacts) -> bool:
    name = machine.chip.lower()
    return any(mark in name for mark in ("snapdragon", "qualcomm", "qcom,", "oryon"))


def is_windows_on_arm(machine: MachineFacts) -> bool:
    return machine.system == "Windows" and machine.machine_arch == "arm64"


def version(text: str) -> tuple[int, ...]:
    """The leading numbers: (2, 7, 0) of "2.7.0.dev1"."""
    numbers = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


RULES: tuple[Rule, ...] = (chip, python, runtime, provider, driver, cache, models, port)
