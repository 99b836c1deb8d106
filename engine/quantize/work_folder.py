"""The layers that are done, on disk, so that an interrupted quantization goes on where it was.

One file a layer, and one with the activations behind the last of them. Each is written under
another name and renamed. A folder that was begun for something else is emptied. Does not know how
layers are quantized.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.export.packing import PackedMatrix
from engine.float_forward import Activations
from engine.quantize.layer import MatrixReport, QuantizedLayer

_KEY_FILE = "key.json"
_ACTIVATIONS_FILE = "activations.npz"
Arrays = dict[str, NDArray[np.generic]]


class WorkFolder:
    """Not for several processes at once: the import lock of the destination keeps others out."""

    def __init__(self, path: Path, key: Mapping[str, object]) -> None:
        """`key` says what is being made of what: nothing of another key is ever used."""
        self.path = path
        text = json.dumps(key, sort_keys=True)
        if _read_text(path / _KEY_FILE) != text:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            (path / _KEY_FILE).write_text(text, "utf-8")

    def save(self, layer: int, quantized: QuantizedLayer, following: Activations | None) -> None:
        """The layer first: activations that are there belong behind a layer that is."""
        _write(self._layer_path(layer), _encode(quantized))
        if following is not None:
            parts = {name: getattr(following, name) for name in Activations.__slots__}
            _write(self.path / _ACTIVATIONS_FILE, {"layer": np.array(layer + 1), **parts})

    def load_matrix(self, layer: int, stack: str, choice: int) -> PackedMatrix:
        return _decode_matrix(self._read(layer, f"matrix/{stack}/{choice}/"))

    def load_vectors(self, layer: int) -> dict[str, NDArray[np.float32]]:
        return {name: _floats(array) for name, array in self._read(layer, "vector/").items()}

    def load_reports(self, layer: int) -> dict[str, list[MatrixReport]]:
        """Of every form of each stack."""
        reports: dict[str, list[MatrixReport]] = {}
        for name, text in self._read(layer, "report/").items():
            stack, _ = name.split("/")
            reports.setdefault(stack, []).append(MatrixReport(**json.loads(str(text))))
        return reports

    def resume(self, num_layers: int) -> tuple[int, Activations | None]:
        """The first layer that is still to be done, and the activations in front of it.

        (`num_layers`, None) when all are done, (0, None) at the beginning.
        """
        num_done = 0
        while num_done < num_layers and self._layer_path(num_done).exists():
            num_done += 1
        if num_done == num_layers:
            return num_layers, None
        try:
            arrays = _read(self.path / _ACTIVATIONS_FILE)
            layer = int(arrays.pop("layer"))
            activations = Activations(**{name: _floats(array) for name, array in arrays.items()})
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
            return 0, None
        return (layer, activations) if layer <= num_done else (0, None)

    def _read(self, layer: int, prefix: str) -> Arrays:
        return _read(self._layer_path(layer), prefix)

    def _layer_path(self, layer: int) -> Path:
        return self.path / f"layer_{layer:03d}.npz"


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _write(path: Path, arrays: Arrays) -> None:
    staging = path.with_name(f".{path.name}")
    with staging.open("wb") as stream:
        np.savez(stream, allow_pickle=False, **arrays)
    staging.replace(path)


def _read(path: Path, prefix: str = "") -> Arrays:
    """The arrays whose names begin with `prefix`, without it; the others are not read."""
    with np.load(path, allow_pickle=False) as stored:
        names = [name for name in stored.files if name.startswith(prefix)]
        return {name.removeprefix(prefix): stored[name] for name in names}


def _encode(layer: QuantizedLayer) -> Arrays:
    arrays: Arrays = {f"vector/{name}": vector for name, vector in layer.vectors.items()}
    for stack, choices in layer.choices.items():
        for index, choice in enumerate(choices):
            parts = _encode_matrix(choice.matrix)
            arrays |= {f"matrix/{stack}/{index}/{name}": part for name, part in parts.items()}
            arrays[f"report/{stack}/{index}"] = np.array(json.dumps(asdict(choice.report)))
    return arrays


def _encode_matrix(matrix: PackedMatrix) -> Arrays:
    assert matrix.scales is not None, "a quantized matrix has scales"
    numbers = np.array([matrix.bits, matrix.block_size, matrix.columns or 0])
    arrays: Arrays = {"numbers": numbers, "data": matrix.data, "scales": matrix.scales}
    if matrix.zero_points is not None:
        arrays["zero_points"] = matrix.zero_points
    return arrays


def _decode_matrix(arrays: Arrays) -> PackedMatrix:
    bits, block_size, columns = (int(number) for number in arrays["numbers"])
    zero_points = arrays.get("zero_points")
    return PackedMatrix(
        bits=bits,
        data=_bytes(arrays["data"]),
        scales=_floats(arrays["scales"]),
        block_size=block_size,
        zero_points=None if zero_points is None else _bytes(zero_points),
        columns=columns or None,
    )


def _bytes(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return array.astype(np.uint8, copy=False)


def _floats(array: NDArray[np.generic]) -> NDArray[np.float32]:
    return array.astype(np.float32, copy=False)
