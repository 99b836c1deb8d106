import time

import pytest

from server.errors import InvalidRequest
from server.json_body import parse_body


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "empty"),
        (b"  ", "empty"),
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'"x"', "JSON object"),
        (b'{"a":1,}', "not valid JSON"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":"caf\xff"}', "not UTF-8"),
        ('{"a":1}'.encode("utf-16"), "not UTF-8"),
        ('{"a":1}'.encode("utf-32-le"), "not valid JSON"),
        (b'{"a":"\\ud83d"}', "surrogate"),
        (b'{"\\uDC00":1}', "surrogate"),
        (b'{"a":' + b"9" * 5000 + b"}", "number"),
        (b"\x1f\x8b\x08\x00", "not UTF-8"),
    ],
)
def test_a_bad_body_is_one_sentence(raw: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        parse_body(raw)
    assert len(caught.value.message) < 300


def test_a_byte_order_mark_is_skipped_and_the_last_duplicate_counts() -> None:
    assert parse_body(b'\xef\xbb\xbf{"a":1,"a":2}') == {"a": 2}


def test_a_proper_surrogate_pair_is_an_emoji() -> None:
    assert parse_body(b'{"a":"\\ud83d\\ude00"}') == {"a": "😀"}


@pytest.mark.parametrize("depth", [500, 5_000, 100_000])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_refused_quickly(depth: int, brackets: tuple[str, str]) -> None:
    raw = f'{{"x":{brackets[0] * depth}0{brackets[1] * depth}}}'.encode()
    start_s = time.perf_counter()
    with pytest.raises(InvalidRequest, match="nested deeper than 64"):
        parse_body(raw)
    assert time.perf_counter() - start_s < 1


def test_brackets_inside_strings_are_not_nesting() -> None:
    text = '[[[[{{{{\\"[[' * 100
    assert parse_body(f'{{"a":"{text}"}}'.encode())["a"].count("[") == 600


@pytest.mark.parametrize("text", ['"' + '\\"' * 500_000, '["' + "\\" * 999_999, '["",' * 300_000])
def test_hostile_strings_take_linear_time(text: str) -> None:
    start_s = time.perf_counter()
    with pytest.raises(InvalidRequest):
        parse_body(("[" * 65 + text).encode()[1:] if text[0] == '"' else text.encode())
    assert time.perf_counter() - start_s < 2
