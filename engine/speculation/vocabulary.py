"""Whether two models speak of the same tokens: drafts are token ids, so they must."""

from __future__ import annotations

import json
from typing import Any

from engine.bundle import Bundle
from engine.errors import DoesNotFit


def common_vocab_size(target: Bundle, draft: Bundle) -> int:
    """How many token ids both models know. Embeddings may be padded to different sizes.

    Raises DoesNotFit, with the first difference, if an id means different things to them, and
    BundleError for a tokenizer that cannot be read.
    """
    ours, theirs = _tokens_of(target), _tokens_of(draft)
    if ours != theirs:
        raise DoesNotFit(
            f"{draft.name} cannot draft for {target.name}: {_difference(ours, theirs)}; "
            "use a draft model with the same tokenizer"
        )
    return min(target.config.vocab_size, draft.config.vocab_size)


def _difference(ours: dict[int, str], theirs: dict[int, str]) -> str:
    for token_id in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(token_id), theirs.get(token_id)
        if mine != other:
            return f"token {token_id} is {_shown(other)} instead of {_shown(mine)}"
    raise AssertionError("there is no difference")


def _shown(text: str | None) -> str:
    return "missing" if text is None else repr(text[:40])


def _tokens_of(bundle: Bundle) -> dict[int, str]:
    try:
        document = json.loads(bundle.tokenizer_path.read_bytes())
        tokens = _vocabulary(document["model"]["vocab"])
        for added in document.get("added_tokens") or []:
            tokens[added["id"]] = added["content"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise bundle.damaged(f"its tokenizer cannot be read ({error})") from error
    return tokens


def _vocabulary(vocab: Any) -> dict[int, str]:
    """Of a BPE or WordPiece model: token → id; of a Unigram model: [token, score] in id order."""
    if isinstance(vocab, dict):
        return {token_id: token for token, token_id in vocab.items()}
    return {token_id: entry[0] for token_id, entry in enumerate(vocab)}
