"""A whole checkpoint quantized from its float32 values: the writer that an import takes.

Layer by layer: read, calibrate, quantize, put on disk; then the bundle is written from the parts.
Only one layer's weights are in memory at a time, and what is on disk survives an interruption.
Knows no text: the calibration tokens come from the caller.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.architectures.config import ModelConfig
from engine.batch import Float32Array, Int32Array
from engine.errors import ImportFailed
from engine.export.model import WrittenModel, write_model
from engine.export.packing import PackedMatrix, pack_auto, row_chunks
from engine.importers.checkpoint import Checkpoint, CheckpointTensor
from engine.importers.integer_blocks import IntegerBlocks
from engine.layer_tensors import STACKS
from engine.quantize.bit_budget import Candidate, choose_wide
from engine.quantize.blocks import join, quantize
from engine.quantize.calibration import calibrate
from engine.quantize.layer import MatrixReport, quantize_layer
from engine.quantize.settings import MIXED, QuantizeSettings
from engine.quantize.work_folder import WorkFolder
from engine.version import own_version

REPORT_FILE = "quantization.json"

OnProgress = Callable[[int, int], None]
Stack = tuple[int, str]


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What was chosen for every stacked matrix, layer by layer. `num_tokens` were calibrated on."""

    settings: QuantizeSettings
    num_tokens: int
    layers: tuple[tuple[MatrixReport, ...], ...]

    @property
    def bits_per_weight(self) -> float:
        """Mean over the layers' matrices, with scales and zero points."""
        reports = [report for layer in self.layers for report in layer]
        total = sum(report.num_weights * report.bits_per_weight for report in reports)
        return total / sum(report.num_weights for report in reports)


class QuantizingWriter:
    """Called by the exporter as any writer of a model's weights and graphs (`WriteModel`)."""

    def __init__(
        self, settings: QuantizeSettings, token_ids: Int32Array, work_path: Path, num_threads: int
    ) -> None:
        """`token_ids` [S, T]: S calibration texts of the same length. `work_path` is kept until
        `finish`. Raises ImportFailed for settings that cannot be."""
        settings.check()
        self._settings = settings
        self._token_ids = token_ids
        self._work_path = work_path
        self._num_threads = num_threads
        self._report: QuantizeReport | None = None

    def __call__(
        self, checkpoint: Checkpoint, folder: Path, on_progress: OnProgress
    ) -> WrittenModel:
        num_layers = checkpoint.config.num_layers
        total = 2 * num_layers + 1
        work = WorkFolder(self._work_path, self._key(checkpoint))
        self._quantize_layers(checkpoint, work, lambda done: on_progress(done, total))
        chosen = self._choose(work, num_layers)
        self._report = _report(work, chosen, self._settings, self._token_ids.size)
        written = write_model(
            _ScaledCheckpoint(checkpoint, work),
            folder,
            lambda done, _: on_progress(num_layers + done, total),
            _StoredPacker(work, chosen, self._settings, self._num_threads),
        )
        (folder / REPORT_FILE).write_text(json.dumps(asdict(self._report), indent=1), "utf-8")
        return WrittenModel((*written.files, REPORT_FILE), written.weight_format)

    def finish(self) -> QuantizeReport:
        """Removes the parts: the bundle is there.

        Raises ImportFailed when it is not ours: another process made one of the same file while
        this one waited for it.
        """
        if self._report is None:
            raise ImportFailed("another process has just made this model; see what it made of it")
        shutil.rmtree(self._work_path, ignore_errors=True)
        return self._report

    def _key(self, checkpoint: Checkpoint) -> dict[str, object]:
        return {
            "source": checkpoint.digest,
            "settings": asdict(self._settings),
            "text": hashlib.sha256(self._token_ids.tobytes()).hexdigest(),
            "shape": list(self._token_ids.shape),
            "converter": own_version(),
        }

    def _quantize_layers(
        self, checkpoint: Checkpoint, work: WorkFolder, on_layer: Callable[[int], None]
    ) -> None:
        start, activations = work.resume(checkpoint.config.num_layers)
        on_layer(start)
        layers = calibrate(checkpoint, self._token_ids, self._num_threads, start, activations)
        for found in layers:
            quantized = quantize_layer(
                checkpoint,
                found.layer,
                found.inputs,
                self._settings.formats,
                self._settings.is_activation_aware,
                self._num_threads,
            )
            work.save(found.layer, quantized, found.following)
            on_layer(found.layer + 1)

    def _choose(self, work: WorkFolder, num_layers: int) -> Mapping[Stack, int]:
        """Stack → the index of the form that it is kept in."""
        if self._settings.weight_format != MIXED:
            return {(layer, stack): 0 for layer in range(num_layers) for stack in STACKS}
        candidates = [
            _candidate((layer, stack), reports)
            for layer in range(num_layers)
            for stack, reports in work.load_reports(layer).items()
        ]
        wide = choose_wide(candidates, self._settings.max_bits)
        return {one.key: int(one.key in wide) for one in candidates}


def _candidate(key: Stack, reports: Sequence[MatrixReport]) -> Candidate[Stack]:
    narrow, wide = reports
    return Candidate(
        key,
        narrow.num_weights,
        narrow.output_error,
        wide.output_error,
        narrow.bits_per_weight,
        wide.bits_per_weight,
    )


def _report(
    work: WorkFolder, chosen: Mapping[Stack, int], settings: QuantizeSettings, num_tokens: int
) -> QuantizeReport:
    layers: dict[int, list[MatrixReport]] = {}
    for (layer, stack), index in chosen.items():
        layers.setdefault(layer, []).append(work.load_reports(layer)[stack][index])
    return QuantizeReport(settings, num_tokens, tuple(tuple(layers[i]) for i in sorted(layers)))


class _StoredPacker:
    """Takes the layers' matrices from the work folder, and packs the embedding and the head."""

    def __init__(
        self,
        work: WorkFolder,
        chosen: Mapping[Stack, int],
        settings: QuantizeSettings,
        num_threads: int,
    ) -> None:
        self._work = work
        self._chosen = chosen
        self._settings = settings
        self._num_threads = num_threads

    def __call__(self, name: str, tensors: Sequence[CheckpointTensor]) -> PackedMatrix:
        if not name.startswith("layers."):
            return self._pack_head(name, tensors)
        _, layer, stack = name.split(".")
        return self._work.load_matrix(int(layer), stack, self._chosen[int(layer), stack])

    def _pack_head(self, name: str, tensors: Sequence[CheckpointTensor]) -> PackedMatrix:
        """At 8 bits integers stay what they are."""
        if self._settings.head_bits == 8:
            return pack_auto(name, tensors)
        narrow = self._settings.narrow
        return join(
            [
                quantize(rows, narrow, num_threads=self._num_threads)
                for tensor in tensors
                for rows in row_chunks(tensor)
            ]
        )


class _ScaledCheckpoint:
    """A checkpoint whose norms and biases have taken up the scale that went into the matrices."""

    def __init__(self, checkpoint: Checkpoint, work: WorkFolder) -> None:
        self._checkpoint = checkpoint
        self._work = work

    @property
    def config(self) -> ModelConfig:
        return self._checkpoint.config

    @property
    def digest(self) -> str:
        return self._checkpoint.digest

    @property
    def tokenizer_json(self) -> str:
        return self._checkpoint.tokenizer_json

    @property
    def chat_template(self) -> str | None:
        return self._checkpoint.chat_template

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def tensor(self, name: str) -> CheckpointTensor:
        if name.startswith("layers."):
            _, layer, part = name.split(".")
            vector = self._work.load_vectors(int(layer)).get(part)
            if vector is not None:
                return _Vector(name, vector)
        return self._checkpoint.tensor(name)


@dataclass(frozen=True, slots=True)
class _Vector:
    """A vector of ours in the place of one of the checkpoint's."""

    name: str
    values: Float32Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def quant_type(self) -> str:
        return "F32"

    def raw(self) -> NDArray[np.uint8]:
        return self.values[None].view(np.uint8)

    def dequantize(self) -> Float32Array:
        return self.values

    def rows(self, start: int, stop: int) -> Float32Array:
        return self.values[start:stop]

    def blocks(self) -> IntegerBlocks | None:
        return None
