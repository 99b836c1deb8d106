"""The numbers of a text encoder (the BERT family), independent of the file they came from."""

from __future__ import annotations

from dataclasses import dataclass

POOLINGS = ("mean", "cls")
ACTIVATIONS = ("gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """A post-norm transformer over learned positions (Devlin et al. 2018), then one pooling.

    `context_length` is the longest text in tokens, its special tokens included; `hidden_size` is
    the length of an embedding. `pooling` is one of `POOLINGS`: the mean over all tokens, or the
    first token. `activation` is one of `ACTIVATIONS`. Embeddings are always normalized.

    With `pair_separator` it is a cross-encoder, which reads a query and a document as one text and
    gives one number, the logit of their fitting together: the first token of that id ends the
    query. Its pooling is the first token.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    context_length: int
    layer_norm_eps: float
    activation: str
    pooling: str
    pair_separator: int | None = None

    @property
    def is_cross_encoder(self) -> bool:
        return self.pair_separator is not None

    @property
    def output_size(self) -> int:
        """Numbers that come of a text: those of an embedding, or a cross-encoder's logit."""
        return 1 if self.is_cross_encoder else self.hidden_size

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


def encoder_shapes(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape [rows = outputs, cols = inputs] of every tensor of an encoder.

    `position_embed` has a row for each of the `context_length` places. Of a cross-encoder alone:
    `second_type`, what the tokens of the document have added to them, and its head, `pooler` and
    `score`.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, hidden),
        "position_embed": (config.context_length, hidden),
        **_norm_shapes("embed_norm", hidden),
    }
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        for name in ("q", "k", "v", "o"):
            shapes |= _dense_shapes(prefix + name, hidden, hidden)
        shapes |= _norm_shapes(prefix + "attn_norm", hidden)
        shapes |= _dense_shapes(prefix + "up", inner, hidden)
        shapes |= _dense_shapes(prefix + "down", hidden, inner)
        shapes |= _norm_shapes(prefix + "mlp_norm", hidden)
    if config.is_cross_encoder:
        shapes |= {"second_type": (hidden,)}
        shapes |= _dense_shapes("pooler", hidden, hidden) | _dense_shapes("score", 1, hidden)
    return shapes


def _dense_shapes(name: str, num_rows: int, num_cols: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (num_rows, num_cols), f"{name}.bias": (num_rows,)}


def _norm_shapes(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
