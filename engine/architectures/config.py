"""The numbers of a decoder, independent of the file format they came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`architecture` names an entry of the table in `engine/architectures`. Sizes in elements.

    RoPE is always the half-split form (as in transformers); importers permute rows where a file
    keeps the interleaved one. `eos_token_ids` is the union of every source of end tokens.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size
