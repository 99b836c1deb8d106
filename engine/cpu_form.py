"""Which way a whole step runs on the CPU: our own kernels, or ONNX Runtime's sessions.

The kernels wherever a bundle has panels: they are faster and hold more block formats exactly. The
sessions run what has none (float32 references, odd sizes) and can be asked for.
"""

from __future__ import annotations

from engine.bundle import Bundle
from engine.embedding import Embedding
from engine.kernel_runner import KernelRunner
from engine.kernels.attention_kernel import KernelAttention
from engine.kv_cache import PagedKVCache
from engine.lane import CpuLane
from engine.model_runner import ModelRunner
from engine.panel_weights import PanelWeights, has_panels
from engine.step_form import StepForm

CPU_KERNELS = ("auto", "onnxruntime")


def open_cpu_form(
    bundle: Bundle,
    embedding: Embedding,
    cache: PagedKVCache,
    max_model_len: int,
    max_tokens: int,
    max_rows: int,
    num_threads: int,
    kernels: str = "auto",
) -> StepForm:
    """`kernels` is one of `CPU_KERNELS`. Raises BundleError when a file is damaged."""
    config = bundle.config
    if kernels == "auto" and has_panels(bundle):
        weights = PanelWeights(bundle, max_model_len)
        return KernelRunner(
            config, weights, embedding, cache, max_tokens, max_rows, num_threads, max_model_len
        )
    lane = CpuLane(config, bundle.path, max_tokens, max_rows, num_threads)
    attention = KernelAttention(config, cache.kv_format, max_model_len, max_tokens, num_threads)
    return ModelRunner(lane, attention, embedding, cache)
