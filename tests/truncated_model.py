"""The first layers of a model as a model of their own, sharing its weights file: a draft model.

Nobody trained it to end there, so it guesses badly; what it is good for is to be wrong often.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from engine.bundle import MANIFEST_FILE, TOKENIZER_FILE, WEIGHTS_FILE, Bundle
from engine.export.exporter import describe_file
from engine.export.model import INDEX_FILE, _graphs, load_weights
from engine.manifest import encode_manifest


def truncate_bundle(bundle: Bundle, folder: Path, num_layers: int) -> Bundle:
    """The bundle `folder`, made of `num_layers` layers, the last norm and the head of `bundle`."""
    folder.mkdir()
    config = replace(bundle.config, layers=bundle.config.layers[:num_layers])
    weights = load_weights(bundle.path)
    weights = replace(weights, layers=weights.layers[:num_layers])
    for name in (WEIGHTS_FILE, TOKENIZER_FILE):
        os.link(bundle.path / name, folder / name)
    (folder / INDEX_FILE).write_text(json.dumps(asdict(weights)), "utf-8")
    files = [WEIGHTS_FILE, TOKENIZER_FILE, INDEX_FILE]
    for name, graph in _graphs(config, weights).items():
        (folder / name).write_bytes(graph.SerializeToString())
        files.append(name)
    manifest = replace(
        bundle.manifest,
        name=folder.name,
        config=config,
        files=tuple(describe_file(folder, file) for file in files),
    )
    (folder / MANIFEST_FILE).write_text(encode_manifest(manifest), "utf-8")
    return Bundle.open(folder)
