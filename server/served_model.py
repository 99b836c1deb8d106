"""One model as the routes see it: its names, its engine and its text side, bound together.

Knows nothing of how a model is found, loaded or unloaded (`models.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from engine.architectures.config import ModelConfig
from engine.grammar_matcher import GrammarFactory
from server.engine_port import Engine
from server.output_format import OutputFormat
from server.prompt import PromptRenderer
from server.served_embedder import ServedEmbedder
from server.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """`max_model_len` is in tokens, prompt and answer together, and is what is enforced.

    `schema_in_prompt`: whether the schema of a `response_format` is told to the model.
    `folder` is the bundle's, if it has one on this machine.
    `stop_token_ids` is the union of all end tokens of the model. `created` is in Unix seconds.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    renderer: PromptRenderer
    config: ModelConfig
    max_model_len: int
    created: int
    quantization: str = "unknown"
    aliases: tuple[str, ...] = ()
    output_format: OutputFormat = OutputFormat()
    schema_in_prompt: bool = True
    folder: Path | None = None

    @cached_property
    def grammars(self) -> GrammarFactory:
        """Compiles what outputs have to match, as the engine will do it again."""
        return GrammarFactory(self.tokenizer.to_json, self.stop_token_ids, self.config.vocab_size)

    @property
    def vocab_size(self) -> int:
        """Ids that a client may name: known to the tokenizer and to the model."""
        return min(self.tokenizer.vocab_size, self.config.vocab_size)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        size = self.config.vocab_size
        return tuple(i for i in self.config.eos_token_ids if 0 <= i < size)

    @property
    def context_limit(self) -> int:
        """`max_model_len`, or less if the engine found room for less."""
        info = self.engine.info
        return min(self.max_model_len, info.max_model_len) if info else self.max_model_len


class ModelRegistry(Protocol):
    """Name → model, for both kinds of models."""

    def get(self, name: str | None) -> ServedModel:
        """By name or alias. None is the default model. Raises UnknownModel, or WrongModelKind for
        a model that does not write text."""
        ...

    def list(self) -> Sequence[ServedModel]:
        """Every served model that writes text once, the default one first."""
        ...

    def get_embedder(self, name: str | None) -> ServedEmbedder:
        """By name or alias. None is the default one. Raises UnknownModel, or WrongModelKind for a
        model that gives no embeddings, as a cross-encoder."""
        ...

    def get_reranker(self, name: str | None) -> ServedEmbedder:
        """By name or alias, a cross-encoder or an embedding model. None is the first cross-encoder
        or, without one, the first embedding model. Raises UnknownModel, or WrongModelKind for a
        model that writes text."""
        ...

    def embedders(self) -> Sequence[ServedEmbedder]:
        """Every served embedding model and cross-encoder once, in the order of loading."""
        ...
