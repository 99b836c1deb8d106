"""Every architecture's graphs in the HTP emulator: all nodes are taken, and the numbers are right.

What a segment does not hold (rotation, windows, softcaps of scores, scales of queries) runs on the
CPU for every architecture alike and is compared in test_parity.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from engine.export.exporter import import_checkpoint
from engine.npu.graphs import NpuGraphs
from engine.npu.qnn_session import open_graph, run_once
from tests.emulator import emulated_options
from tests.parity.checkpoints import save
from tests.parity.families import FAMILIES

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("emulator")]
X2_ELITE = 88
NUM_TOKENS = 8
# fp16 against fp32: steps of 5e-4 to 1e-3 of a number.
MAX_RELATIVE_RMS = 2e-3
# One of each set of operations; the others differ in numbers only.
NAMES = ("llama-2-gqa-bias", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "granite", "olmo2")
Arrays = dict[str, NDArray[np.generic]]


@pytest.mark.parametrize("name", NAMES)
def test_every_node_runs_on_the_htp_and_is_right(tmp_path: Path, name: str) -> None:
    saved = save(FAMILIES[name], tmp_path / "model")
    source = saved.folder / "model.safetensors"
    bundle = import_checkpoint(source, tmp_path / "bundle", "tiny", lambda *_: None)
    graphs = NpuGraphs.of(bundle.config, bundle.path)
    for part in (*graphs.names[:2], *graphs.names[-2:]):
        model = graphs.model(part, NUM_TOKENS)
        inputs, expected = run_on_cpu(model, bundle.path)
        found = run_once(open_graph(model, part, emulated_options(X2_ELITE), bundle.path), inputs)
        for output, values in expected.items():
            difference = relative_rms(found[output], values)
            assert difference < MAX_RELATIVE_RMS, f"{part}, {output}: {difference:.2g}"


def run_on_cpu(model: bytes, folder: Path) -> tuple[Arrays, Arrays]:
    """Random inputs, and what the CPU provider makes of them with fp32 activations."""
    options = ort.SessionOptions()
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", f"{folder}/"
    )
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(1)
    inputs: Arrays = {
        value.name: rng.standard_normal(value.shape, np.float32) for value in session.get_inputs()
    }
    names = [value.name for value in session.get_outputs()]
    return inputs, dict(zip(names, session.run(names, inputs), strict=True))


def relative_rms(found: NDArray[np.generic], expected: NDArray[np.generic]) -> float:
    difference = found.astype(np.float64) - expected.astype(np.float64)
    return float(np.sqrt((difference**2).mean() / (expected.astype(np.float64) ** 2).mean()))
