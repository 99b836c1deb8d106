"""What an engine is told about speculation, and what it carries of it once it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.speculation.draft_model import DraftModel

METHODS = ("auto", "off", "ngram", "draft")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """`method` is one of METHODS. "auto" looks n-grams up, and asks the draft model, if there is
    one, for sequences in which that finds nothing. `max_draft_tokens` bounds the drafts of a
    sequence in a step.
    """

    method: str = "auto"
    max_draft_tokens: int = 16
    draft_bundle: Path | None = None

    @property
    def looks_up_ngrams(self) -> bool:
        return self.method in ("auto", "ngram")

    @property
    def uses_draft_model(self) -> bool:
        return self.method in ("auto", "draft") and self.draft_bundle is not None


@dataclass(frozen=True, slots=True)
class Speculation:
    config: SpeculationConfig
    draft_model: DraftModel | None = None


NO_SPECULATION = Speculation(SpeculationConfig(method="off"))
