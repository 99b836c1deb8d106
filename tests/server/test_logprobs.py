import json
import math

from engine.logprobs import TokenLogprobs
from server.adapters.logprobs import FLOOR, LegacyLogprobs, chat_entries, token_name
from tests.server.byte_tokenizer import BOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


def test_infinities_and_nan_become_the_floor() -> None:
    entry = TokenLogprobs(97, -math.inf, ((98, math.nan), (99, -1.0)))
    chat, legacy = chat_entries(TOKENIZER, [entry]), LegacyLogprobs(TOKENIZER).take([entry])
    json.dumps([chat, legacy], allow_nan=False)
    assert chat[0]["logprob"] == legacy["token_logprobs"][0] == FLOOR
    assert legacy["top_logprobs"] == [{"b": FLOOR, "c": -1.0, "a": FLOOR}]


def test_partial_characters_have_names_of_their_own() -> None:
    assert len({token_name(TOKENIZER, byte) for byte in range(256)}) == 256
    assert token_name(TOKENIZER, 0xF0) == "bytes:\\xf0"


def test_offsets_of_an_echoed_prompt_ignore_the_bos_that_was_added() -> None:
    legacy, prompt = LegacyLogprobs(TOKENIZER), [BOS, 97, 98]
    scores = (None, TokenLogprobs(97, -1.0), TokenLogprobs(98, -1.0))
    assert legacy.take_prompt(prompt, scores, len("ab"))["text_offset"] == [0, 0, 1]
    assert legacy.take([TokenLogprobs(99, -1.0)])["text_offset"] == [2]
