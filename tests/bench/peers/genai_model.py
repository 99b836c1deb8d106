"""A model folder of onnxruntime-genai from a GGUF file: `genai_model.py FILE FOLDER`.

Runs in the environment of that package, with torch and transformers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import onnxruntime_genai
import torch
import transformers


def write_dequantized(gguf: Path, folder: str) -> None:
    """As float32 in the form that Hugging Face keeps models in."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


def build(source: str, out: str, cache: str) -> None:
    builder = Path(onnxruntime_genai.__file__).parent / "models" / "builder.py"
    paths = ["-i", source, "-o", out, "-c", cache]
    options = ["-p", "int4", "-e", "cpu", "--extra_options", "hf_token=false"]
    subprocess.run([sys.executable, str(builder), *paths, *options], check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as cache:
        write_dequantized(Path(sys.argv[1]), source)
        build(source, sys.argv[2], cache)
