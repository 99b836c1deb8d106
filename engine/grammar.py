"""What a sequence may generate next, as the sampler and the scheduler see it.

A grammar follows the output of one sequence, token by token, and says which tokens may come next.
`UNCONSTRAINED` is the grammar of a sequence that may generate anything. Knows no grammar language
and no text: `grammar_matcher.py` implements the protocol.

A grammar never fails open: whatever goes wrong is a GrammarError, which ends its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

TokenMask = NDArray[np.int32]
"""[ceil(V / 32)] int32: bit `i % 32` of word `i // 32` is set if token i may come."""


class GrammarError(ValueError):
    """A text that is no usable grammar, or a grammar that cannot go on. The message says why."""


class Grammar(Protocol):
    """The state of one sequence. Moves only with `accept`."""

    @property
    def is_terminated(self) -> bool:
        """Whether the output is complete, so that nothing but an end token could follow."""
        ...

    def masks(self, draft_token_ids: Sequence[int]) -> Sequence[TokenMask | None]:
        """What may come next, and what may come behind each draft if the drafts before it hold.

        1 + number of drafts entries, valid until the next call; None allows everything. Behind a
        draft that may not come there is nothing to ask, so these are None too. Raises GrammarError.
        """
        ...

    def accept(self, token_ids: Sequence[int]) -> int:
        """Move behind these tokens, or behind the one of them that terminates the output.

        Returns how many it moved. Raises GrammarError if one of them may not come.
        """
        ...

    def num_allowed(self, draft_token_ids: Sequence[int]) -> int:
        """How many of the drafts, from the first on, may come."""
        ...


class GrammarSource(Protocol):
    def create(self, text: str) -> Grammar:
        """The grammar of `text` before the first token; an empty text is no constraint.

        Raises GrammarError.
        """
        ...


class Unconstrained:
    """Every token may come, for ever."""

    is_terminated = False

    def masks(self, draft_token_ids: Sequence[int]) -> Sequence[TokenMask | None]:
        return (None,) * (1 + len(draft_token_ids))

    def accept(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def num_allowed(self, draft_token_ids: Sequence[int]) -> int:
        return len(draft_token_ids)


UNCONSTRAINED = Unconstrained()


class NoGrammars:
    """For an engine that cannot enforce any: a request with a grammar is refused."""

    def create(self, text: str) -> Grammar:
        if text:
            raise GrammarError("this engine cannot enforce a grammar")
        return UNCONSTRAINED
