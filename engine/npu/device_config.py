"""What one kind of NPU wants: token buckets, options of the QNN provider, power modes.

Read from `configs/devices/*.toml`, where every line carries the measurement or source behind it,
or from a file of the user's. Unknown keys are errors. Knows no provider and no graphs; the
options are handed on as the text that the provider reads.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from engine.errors import DeviceUnavailable

PERF_MODES = (
    "burst",
    "sustained_high_performance",
    "high_performance",
    "balanced",
    "low_balanced",
    "high_power_saver",
    "power_saver",
    "low_power_saver",
    "extreme_power_saver",
    "default",
)
"""The provider's names, fastest first; `default` leaves the choice to the driver."""

PROFILING_LEVELS = ("", "basic", "detailed")
"""How much QNN measures of each call: nothing, the call, or every node of its graph as well."""

EMULATED = "emulated"

# Provider options that a device may set, all of them in the provider's binary. What decides where
# a graph runs, or which chip it is made for, is not among them: that is the lane's to say.
_PROVIDER_KEYS: dict[str, type] = {
    "vtcm_mb": int,
    "extended_udma": bool,
    "rpc_control_latency": int,
    "qnn_context_priority": str,
    "htp_graph_finalization_optimization_mode": int,
    "enable_htp_fp16_precision": bool,
    "enable_htp_fp16_clamp_overflow": bool,
    "enable_htp_shared_memory_allocator": bool,
    "enable_htp_spill_fill_buffer": bool,
    "enable_htp_prepare_and_load": bool,
    "enable_vtcm_backup_buffer_sharing": bool,
    "htp_reused_io_limit_mb": int,
    "num_graph_prepare_threads": int,
    "disable_file_mapped_weights": bool,
}
_PERF_MODE_OPTION = "htp_performance_mode"


@dataclass(frozen=True, slots=True)
class FusedForm:
    """The graphs with the attention inside: how many layers each has, and for which sizes.

    `token_buckets` and `window_buckets` (earlier tokens of all sequences together) make one graph
    for each pair. No buckets: the device does without this form.
    """

    layers_per_graph: int
    token_buckets: tuple[int, ...]
    window_buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """`reported_names`: parts of the names by which the chip reports itself, in lower case.

    `token_buckets` are for the segments, `head_buckets` for the head, both ascending.
    `perf_mode` holds while sessions are open; `run_perf_mode` and `post_run_perf_mode` ("" for
    none) are voted for before and after every single call.
    """

    name: str
    description: str
    soc_model: int
    htp_arch: int
    reported_names: tuple[str, ...]
    token_buckets: tuple[int, ...]
    head_buckets: tuple[int, ...]
    perf_mode: str
    run_perf_mode: str
    post_run_perf_mode: str
    fused: FusedForm
    extra_options: Mapping[str, str]
    is_emulated: bool = False

    @property
    def provider_options(self) -> dict[str, str]:
        """Of every session. The chip itself (`soc_model`) is for the session to add."""
        return {**self.extra_options, _PERF_MODE_OPTION: self.perf_mode}

    @property
    def run_options(self) -> dict[str, str]:
        """Of every call."""
        options = {
            "qnn.htp_perf_mode": self.run_perf_mode,
            "qnn.htp_perf_mode_post_run": self.post_run_perf_mode,
        }
        return {key: mode for key, mode in options.items() if mode}

    def with_perf_mode(self, perf_mode: str) -> DeviceConfig:
        """Raises DeviceUnavailable for an unknown mode."""
        try:
            return replace(self, perf_mode=_perf_mode(perf_mode))
        except ValueError as error:
            raise DeviceUnavailable(f"the NPU's perf_mode must be {error}") from None

    def emulated(self) -> DeviceConfig:
        """The same chip in the emulator."""
        return replace(self, is_emulated=True)

    def with_buckets(
        self, token_buckets: Sequence[int], head_buckets: Sequence[int]
    ) -> DeviceConfig:
        return replace(
            self, token_buckets=_buckets(token_buckets), head_buckets=_buckets(head_buckets)
        )


@dataclass(frozen=True, slots=True)
class NpuSettings:
    """What a user may say about the NPU, the table `[npu]` of the configuration.

    `device_file`: a packaged device or the path of a file; "" for the one that the chip names.
    `perf_mode`: one of `PERF_MODES`; "" for the device's own. `fused`: whether the graphs with the
    attention inside are compiled and offered to the dispatcher, too. `profiling`: one of
    `PROFILING_LEVELS`, for traces.
    """

    device_file: str = ""
    perf_mode: str = ""
    fused: bool = False
    profiling: str = ""


def chosen_device(settings: NpuSettings, reported: str | None) -> DeviceConfig:
    """`reported` is what the chip calls itself; None stands for the emulator.

    Raises DeviceUnavailable for a wrong setting or a chip that is not known.
    """
    if settings.device_file:
        config = load_device(settings.device_file)
    else:
        config = load_device(EMULATED) if reported is None else choose_device(reported)
    if reported is None:
        config = config.emulated()
    elif config.is_emulated:
        raise DeviceUnavailable(
            "[npu] device_file is the emulator; use --device npu-emulated for it"
        )
    return config.with_perf_mode(settings.perf_mode) if settings.perf_mode else config


def packaged_devices() -> tuple[DeviceConfig, ...]:
    """All that come with the program, by name."""
    folder = resources.files("configs").joinpath("devices")
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    configs = [
        parse_device(file.read_text("utf-8"), file.name.removesuffix(".toml"), file.name)
        for file in files
    ]
    return tuple(sorted(configs, key=lambda config: config.name))


def load_device(name_or_path: str) -> DeviceConfig:
    """A packaged device by its name, or the file at a path that ends in .toml.

    Raises DeviceUnavailable when there is none or it is wrong.
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path).expanduser()
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DeviceUnavailable(f"the device file {path} cannot be read: {error}") from error
        return parse_device(text, path.stem, str(path))
    known = {config.name: config for config in packaged_devices()}
    if name_or_path not in known:
        raise DeviceUnavailable(
            f"unknown NPU device {name_or_path!r}: use one of {', '.join(known)}, or the path of "
            "a .toml file"
        )
    return known[name_or_path]


def choose_device(reported: str) -> DeviceConfig:
    """The packaged device whose name the hardware reports, in whatever case and company.

    Raises DeviceUnavailable for a chip that none of them is for.
    """
    text = reported.lower()
    found = [c for c in packaged_devices() if any(name in text for name in c.reported_names)]
    if len(found) == 1:
        return found[0]
    chips = ", ".join(config.name for config in packaged_devices() if config.reported_names)
    what = "several devices" if found else "none of the devices"
    raise DeviceUnavailable(
        f"the NPU reports itself as {reported.strip()[:100]!r}, which fits {what} that hexlm knows "
        f"({chips}); choose one with [npu] device_file"
    )


def parse_device(text: str, name: str, source: str) -> DeviceConfig:
    """Raises DeviceUnavailable naming `source` and the key that is wrong."""
    try:
        document = tomllib.loads(text)
        fields = {key: kind(document.pop(key)) for key, kind in _FIELDS.items() if key in document}
        extra_options = _provider_options(document.pop("provider", {}))
        fused = _fused_form(document.pop("fused", {}))
        _refuse_unknown(document, [*_FIELDS, "provider", "fused"], "")
        missing = [key for key in _FIELDS if key not in fields and key not in _OPTIONAL]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise DeviceUnavailable(f"the device file {source} is wrong: {error}") from error
    values = _OPTIONAL | fields
    return DeviceConfig(
        name=name,
        fused=fused,
        extra_options=extra_options,
        is_emulated=name == EMULATED,
        **values,
    )


def _provider_options(table: object) -> dict[str, str]:
    if not isinstance(table, dict):
        raise ValueError("[provider] must be a table")
    _refuse_unknown(table, list(_PROVIDER_KEYS), "provider.")
    options = {}
    for key, value in table.items():
        kind = _PROVIDER_KEYS[key]
        if type(value) is not kind:
            raise ValueError(f"provider.{key} must be of type {kind.__name__}, not {value!r}")
        options[key] = str(int(bool(value))) if kind is bool else str(value)
    return options


def _fused_form(table: object) -> FusedForm:
    if not isinstance(table, dict):
        raise ValueError("[fused] must be a table")
    known = ["layers_per_graph", "token_buckets", "window_buckets"]
    _refuse_unknown(table, known, "fused.")
    if not table:
        return FusedForm(0, (), ())
    missing = [key for key in known if key not in table]
    if missing:
        raise ValueError(f"fused.{missing[0]} is missing")
    return FusedForm(
        _positive(table["layers_per_graph"]),
        _buckets(table["token_buckets"]),
        _buckets(table["window_buckets"]),
    )


def _refuse_unknown(table: Mapping[str, object], known: Sequence[str], prefix: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"unknown key {prefix}{key}; {hint}")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} must be a string")
    return value


def _positive(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} must be a positive integer")
    return value


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"reported_names must be a list of strings, not {value!r}")
    return tuple(_text(item).lower() for item in value)


def _buckets(value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"buckets must be a list of positive integers, not {value!r}")
    buckets = tuple(_positive(item) for item in value)
    if list(buckets) != sorted(set(buckets)):
        raise ValueError(f"buckets must ascend, not {value!r}")
    return buckets


def _perf_mode(value: object) -> str:
    if value not in PERF_MODES:
        raise ValueError(f"one of {', '.join(PERF_MODES)}, not {value!r}")
    return str(value)


def _perf_mode_or_none(value: object) -> str:
    return "" if value == "" else _perf_mode(value)


_FIELDS: dict[str, Callable[[object], Any]] = {
    "description": _text,
    "soc_model": _positive,
    "htp_arch": _positive,
    "reported_names": _names,
    "token_buckets": _buckets,
    "head_buckets": _buckets,
    "perf_mode": _perf_mode,
    "run_perf_mode": _perf_mode_or_none,
    "post_run_perf_mode": _perf_mode_or_none,
}
_OPTIONAL: dict[str, Any] = {"run_perf_mode": "", "post_run_perf_mode": "", "reported_names": ()}
