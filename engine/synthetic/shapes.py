"""The sizes of public models that are too large to carry around: numbers, no weights.

From their published config.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.architectures.config import LayerConfig, ModelConfig
from engine.architectures.rope import plain_rope


@dataclass(frozen=True, slots=True)
class Shape:
    """What a `config.json` says, with its names shortened; `title` is the model's own."""

    title: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    qkv_bias: bool = False
    window: int = 0

    def config(self, num_layers: int | None = None) -> ModelConfig:
        """`num_layers` makes it shallower, for tests. The last token of the vocabulary is EOS."""
        return ModelConfig(
            architecture=self.architecture,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            rms_norm_eps=self.rms_norm_eps,
            layers=(LayerConfig(window=self.window),) * (num_layers or self.num_layers),
            ropes=(plain_rope(self.head_size, self.rope_theta),),
            attention_scale=self.head_size**-0.5,
            tied_embeddings=False,
            bos_token_id=None,
            eos_token_ids=(self.vocab_size - 1,),
            add_bos=False,
            qkv_bias=self.qkv_bias,
        )


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "phi-3-mini": Shape(
            title="Phi-3-mini-4k-instruct (3.8B)",
            architecture="phi3",
            hidden_size=3072,
            intermediate_size=8192,
            num_layers=32,
            num_heads=32,
            num_kv_heads=32,
            head_size=96,
            vocab_size=32_064,
            context_length=4096,
            rms_norm_eps=1e-5,
            rope_theta=10_000.0,
            window=2047,
        ),
        "qwen2-7b": Shape(
            title="Qwen2-7B-Instruct (7.6B)",
            architecture="qwen2",
            hidden_size=3584,
            intermediate_size=18_944,
            num_layers=28,
            num_heads=28,
            num_kv_heads=4,
            head_size=128,
            vocab_size=152_064,
            context_length=32_768,
            rms_norm_eps=1e-6,
            rope_theta=1_000_000.0,
            qkv_bias=True,
        ),
        "llama-3-8b": Shape(
            title="Meta-Llama-3-8B-Instruct (8.0B)",
            architecture="llama",
            hidden_size=4096,
            intermediate_size=14_336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_size=128,
            vocab_size=128_256,
            context_length=8192,
            rms_norm_eps=1e-5,
            rope_theta=500_000.0,
        ),
        "qwen2-13b-class": Shape(
            title="Qwen2.5-14B-Instruct (14.8B), the Qwen of the 13B class",
            architecture="qwen2",
            hidden_size=5120,
            intermediate_size=13_824,
            num_layers=48,
            num_heads=40,
            num_kv_heads=8,
            head_size=128,
            vocab_size=152_064,
            context_length=32_768,
            rms_norm_eps=1e-6,
            rope_theta=1_000_000.0,
            qkv_bias=True,
        ),
    }
)
