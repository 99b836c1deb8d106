"""What every importer makes of a checkpoint's tokenizer, whatever it was kept in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# End-of-turn tokens of well-known chat formats. Many conversions name only one of a model's
# end tokens: a model that stops nowhere answers itself.
KNOWN_END_TOKENS = frozenset(
    {
        "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
        "<|eot|>", "<end_of_turn>", "<|endofturn|>", "<|end_of_turn|>", "<end_of_utterance>",
        "<EOT>", "<|return|>", "<｜end▁of▁sentence｜>",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """`json` is the text of a tokenizer.json. It adds no BOS by itself: `add_bos` says whether
    the model wants one. `vocab_size` is one more than the highest id.

    `eos_token_ids` begin with the token that the model itself calls its end.
    """

    json: str
    kind: str
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool


def end_tokens(named: Iterable[int], vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """The ids that the files name, in their order, then the well-known ones."""
    known = sorted(vocabulary[token] for token in KNOWN_END_TOKENS if token in vocabulary)
    return tuple(dict.fromkeys((*named, *known)))
