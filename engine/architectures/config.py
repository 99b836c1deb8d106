"""The numbers of a decoder, independent of the file format they came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rope:
    """One way of rotating queries and keys (RoPE, Su et al. 2021), half-split as in transformers.

    `frequencies` [rotary_size / 2]: the angle per position of each pair (i, i + rotary_size / 2) of
    the first `rotary_size` elements of a head, every scaling applied; the rest of the head is not
    rotated. No frequencies: nothing is rotated (NoPE). `magnitude` multiplies cosines and sines.
    `long_frequencies` replace them in an engine whose sequences may be longer than
    `original_length` (0: never). `scaling` is the scheme's name, for people.
    """

    frequencies: tuple[float, ...]
    long_frequencies: tuple[float, ...] = ()
    original_length: int = 0
    magnitude: float = 1.0
    scaling: str = "default"

    @property
    def rotary_size(self) -> int:
        return 2 * len(self.frequencies)

    def frequencies_for(self, max_model_len: int) -> tuple[float, ...]:
        """The ones for every position of an engine whose sequences have up to this many tokens.

        One choice for an engine's whole life: a token's key must not depend on how long its
        sequence is by now.
        """
        is_long = bool(self.long_frequencies) and max_model_len > self.original_length
        return self.long_frequencies if is_long else self.frequencies


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What attention differs in from layer to layer.

    `window`: a token sees itself and the `window - 1` tokens before it; 0 is no limit.
    `rope` is an index into `ModelConfig.ropes`.
    """

    window: int = 0
    rope: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`architecture` names an entry of the table in `engine/architectures`. Sizes in elements.

    Importers bring every file to the one form that these numbers describe: they permute rows where
    a file keeps RoPE interleaved, and add 1 where it keeps norm weights around zero.
    `eos_token_ids` is the union of every source of end tokens.

    `norm_placement`: `pre` (before attention and MLP), `sandwich` (before and after, Gemma), `post`
    (after only, OLMo 2). `query_key_norm`: `none`, `head` (over each head) or `full` (over the
    whole projection). A softcap of 0 is none: cap * tanh(x / cap) of attention scores or logits.
    The scales multiply: queries x keys, the embedding's rows, what attention and MLP add to the
    residual, the logits.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    layers: tuple[LayerConfig, ...]
    ropes: tuple[Rope, ...]
    attention_scale: float
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    norm_placement: str = "pre"
    query_key_norm: str = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    logits_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size
