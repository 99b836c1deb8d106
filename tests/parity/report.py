"""Prints the parity table: `python -m tests.parity.report` (Markdown; about a minute)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from transformers.utils import logging

from engine.kernels import kernel_cache
from tests.parity.checkpoints import PATHS, difference, import_folder, load, save
from tests.parity.families import FAMILIES


def main() -> None:
    kernel_cache.use_kernel_cache(kernel_cache.default_folder())
    logging.disable_progress_bar()
    print(f"| model | tokens | {' | '.join(PATHS)} | spread of the logits |")
    print(f"|---|---|{'---|' * len(PATHS)}---|")
    with tempfile.TemporaryDirectory() as root:
        for name in sys.argv[1:] or FAMILIES:
            print(row(name, Path(root)), flush=True)


def row(name: str, root: Path) -> str:
    saved = save(FAMILIES[name], root / name)
    bundle = import_folder(saved.folder, root / f"{name}-bundle")
    model = load(bundle, saved.family.max_model_len)
    found = [difference(logits(model, saved.tokens), saved.expected) for logits in PATHS.values()]
    columns = " | ".join(f"{value:.1e}" for value in found)
    return f"| {name} | {len(saved.tokens)} | {columns} | {saved.expected.std():.2f} |"


if __name__ == "__main__":
    main()
