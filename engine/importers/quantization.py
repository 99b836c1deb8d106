"""What a checkpoint's configuration says of how its weights are quantized.

config.json keeps it under `quantization_config`; older AWQ and GPTQ tools wrote a file of its own
beside it. Methods that are not read are refused by name. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ImportFailed
from engine.importers.gguf_metadata import Metadata
from engine.importers.json_file import plain_settings, read_json_file

OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
SUPPORTED = "bfloat16, float16 or float32 weights, AWQ, GPTQ, compressed-tensors (packed integers)"
AWQ_PACKINGS = ("gemm", "gemv")
GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
MAX_GROUP = 1 << 24


@dataclass(frozen=True, slots=True)
class Quantization:
    """`method` is `awq`, `gptq` or `compressed-tensors`; `group_size` 0 is one group a row.

    `zero_offset` is added to a stored zero; `packing` is AWQ's name of its layout.
    """

    method: str
    bits: int
    group_size: int
    zero_offset: int = 0
    packing: str = "gemm"
    is_symmetric: bool = False

    def __str__(self) -> str:
        """For people: `AWQ 4-bit, groups of 128`."""
        groups = f"groups of {self.group_size}" if self.group_size else "one group a row"
        name = self.method if self.method == "compressed-tensors" else self.method.upper()
        return f"{name} {self.bits}-bit, {groups}"


def read_quantization(folder: Path, document: Mapping[str, object]) -> Quantization | None:
    """None for plain floats. Raises ImportFailed for what cannot be read."""
    section = document.get("quantization_config", document.get("compression_config"))
    path = folder / "config.json"
    if section is None:
        for name, method in OLD_FILES.items():
            if (folder / name).exists():
                path = folder / name
                section = {"quant_method": method, **_object(path, read_json_file(path))}
                break
        else:
            return None
    values = _object(path, section)
    settings = plain_settings(path, values)
    method = settings.string("quant_method")
    match method:
        case "awq":
            return _read_awq(settings)
        case "gptq":
            return _read_gptq(settings)
        case "compressed-tensors":
            return _read_compressed(path, values)
    raise ImportFailed(
        f"{path}: weights quantized by {method[:40]!r} are not supported; supported: {SUPPORTED}"
    )


def _object(path: Path, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ImportFailed(f"{path} describes its quantization wrongly; download it again")
    return value


def _read_awq(settings: Metadata) -> Quantization:
    packing = (settings.optional_string("version") or "gemm").lower()
    if packing not in AWQ_PACKINGS:
        raise ImportFailed(
            f"{settings.path}: AWQ weights packed for {packing[:40]!r} are not supported; "
            f"supported: {', '.join(AWQ_PACKINGS)}"
        )
    bits = settings.integer("bits" if "bits" in settings else "w_bit", 1, 8, 4)
    if bits != 4:
        raise ImportFailed(f"{settings.path}: AWQ weights of {bits} bits are not supported, only 4")
    key = "group_size" if "group_size" in settings else "q_group_size"
    return Quantization("awq", bits, _group_size(settings, key, 128), packing=packing)


def _read_gptq(settings: Metadata) -> Quantization:
    name = settings.optional_string("checkpoint_format") or "gptq"
    if name not in GPTQ_FORMATS:
        raise ImportFailed(
            f"{settings.path}: GPTQ weights in the format {name[:40]!r} are not supported; "
            f"supported: {', '.join(GPTQ_FORMATS)}"
        )
    bits = settings.integer("bits", 1, 16)
    if bits not in (2, 4, 8):
        raise ImportFailed(
            f"{settings.path}: GPTQ weights of {bits} bits are not supported, only 2, 4 and 8"
        )
    return Quantization(
        "gptq", bits, _group_size(settings, "group_size", 128), zero_offset=GPTQ_FORMATS[name]
    )


def _group_size(settings: Metadata, key: str, default: int) -> int:
    size = settings.integer(key, -1, MAX_GROUP, default)
    if size == 0 or (size > 0 and size % 16):
        raise settings.wrong(key, "-1 or a multiple of 16")
    return max(size, 0)


def _read_compressed(path: Path, values: Mapping[str, object]) -> Quantization:
    """One scheme for all layers, weights only."""
    if (form := values.get("format")) != "pack-quantized":
        raise ImportFailed(
            f"{path}: compressed-tensors in the format {str(form)[:40]!r} are not supported; "
            "supported: 'pack-quantized'"
        )
    groups = list(_object(path, values.get("config_groups")).values())
    schemes = [_object(path, _object(path, group).get("weights")) for group in groups]
    if not schemes or any(scheme != schemes[0] for scheme in schemes):
        raise ImportFailed(f"{path}: {len(schemes)} quantization schemes in one model, not one")
    if any(_object(path, group).get("input_activations") is not None for group in groups):
        raise ImportFailed(f"{path}: quantized activations are not supported; supported: weights")
    settings = plain_settings(path, schemes[0])
    bits = settings.integer("num_bits", 1, 16)
    if bits not in (4, 8) or settings.optional_string("type") not in (None, "int"):
        raise ImportFailed(
            f"{path}: packed weights are {bits} bits wide; supported: ints of 4 or 8"
        )
    strategy = settings.optional_string("strategy") or "group"
    if strategy not in ("group", "channel"):
        raise ImportFailed(f"{path}: quantization by {strategy[:40]!r} is not supported")
    size = _group_size(settings, "group_size", -1) if strategy == "group" else 0
    is_symmetric = settings.boolean("symmetric", True)
    return Quantization("compressed-tensors", bits, size, is_symmetric=is_symmetric)
