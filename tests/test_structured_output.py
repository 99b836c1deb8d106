"""Grammars on a real engine: a random model that obeys is the proof that it is the mask's doing.

Documents are checked by an independent validator; comparisons are for equality.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import jsonschema_rs
import pytest

from engine.bundle import Bundle
from engine.sampling_params import SamplingParams
from scheduler.messages import FinishReason, GenerationRequest, Priority
from scheduler.sequence import Sequence
from server.structured import (
    any_grammar,
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)
from server.tokenizer import Tokenizer
from tests.engine_rig import Reply, serve, serve_alone
from tests.loaded_model import LoadedModel, load_model

LINE = {
    "type": "object",
    "properties": {"who": {"$ref": "#/$defs/Who"}, "text": {"type": "string", "maxLength": 12}},
    "required": ["who", "text"],
    "additionalProperties": False,
}
LINES = {
    "type": "object",
    "properties": {
        "lines": {
            "type": "array",
            "minItems": 2,
            "maxItems": 2,
            "items": {"$ref": "#/$defs/Line"},
        }
    },
    "required": ["lines"],
    "additionalProperties": False,
    "$defs": {"Who": {"enum": ["Ana", "Bo"]}, "Line": LINE},
}
TREE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 9},
        "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    },
    "required": ["v", "kids"],
    "additionalProperties": False,
}


def forced(text: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"t": {"type": "string", "enum": [text]}},
        "required": ["t"],
        "additionalProperties": False,
    }


@dataclass(frozen=True)
class Subject:
    model: LoadedModel
    tokenizer: Tokenizer
    end_token_ids: tuple[int, ...]

    def request(
        self, grammar: str, name: str = "r", max_tokens: int = 400, **sampling: Any
    ) -> GenerationRequest:
        values: dict[str, Any] = {
            "temperature": 0.0,
            "stop_token_ids": self.end_token_ids,
        } | sampling
        params = SamplingParams(max_tokens=max_tokens, **values)
        prompt = tuple(range(10, 10 + 20 + len(name)))
        return GenerationRequest(name, prompt, params, grammar=grammar)

    def say(self, grammar: str, **sampling: Any) -> tuple[str, FinishReason | None]:
        reply = serve_alone(self.model, self.request(grammar, **sampling))
        assert reply.error is None
        return self.text(reply), reply.finish_reason

    def text(self, reply: Reply) -> str:
        ids = [i for i in reply.token_ids if i not in self.end_token_ids]
        return self.tokenizer.decode(ids)


@pytest.fixture(scope="module")
def subject(tiny_bundle: Bundle) -> Subject:
    tokenizer = Tokenizer.from_file(tiny_bundle.tokenizer_path)
    return Subject(load_model(tiny_bundle), tokenizer, tiny_bundle.config.eos_token_ids)


@pytest.mark.parametrize("keyword", ["$defs", "definitions"])
def test_an_enum_behind_references_is_enforced_for_every_seed(
    subject: Subject, keyword: str
) -> None:
    schema = json.loads(json.dumps(LINES).replace("$defs", keyword))
    grammar = json_schema_grammar(schema)
    requests = [
        subject.request(grammar, f"r{seed}", temperature=0.9, seed=seed) for seed in range(25)
    ]
    run = serve(subject.model, {0: requests})
    for reply in run.replies.values():
        assert reply.finish_reason is FinishReason.STOP
        jsonschema_rs.validate(schema, json.loads(subject.text(reply)))


def test_a_recursive_schema_gives_trees(subject: Subject) -> None:
    for seed in range(5):
        text, reason = subject.say(json_schema_grammar(TREE), temperature=1.0, seed=seed)
        assert reason is FinishReason.STOP
        jsonschema_rs.validate(TREE, json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 0, "maximum": 20_000_000_000},
        {"type": "integer", "minimum": -5, "maximum": -3},
        {"type": "integer", "minimum": 10, "maximum": 1e3},
        {"type": "integer", "minimum": 2**62, "maximum": 2**63},
        {"type": "integer", "minimum": 2**60 + 1, "maximum": 2**60 + 300},
        {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 7},
        {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 30},
        {"type": "number", "minimum": 0.1, "maximum": 0.3},
    ],
    ids=str,
)
def test_bounds_hold(subject: Subject, schema: dict[str, Any]) -> None:
    whole = {"type": "array", "items": schema, "minItems": 3, "maxItems": 3}
    for seed in range(4):
        text, reason = subject.say(
            json_schema_grammar(whole), temperature=1.0, seed=seed, max_tokens=200
        )
        if reason is FinishReason.STOP:
            jsonschema_rs.validate(whole, json.loads(text))
        else:
            assert schema["type"] == "number", "a fraction may have any number of digits"


@pytest.mark.parametrize(
    "text",
    [
        "好的 👩‍👩‍👧‍👦 naïve Ω 🇯🇵 end",
        "  two  spaces and-a word\tend ",
        "alpha beta gamma delta",
        "😊é中",
        "a\u2028b",
        '"q\\',
        "</s><|im_end|>",
        "<|im_end|>",
    ],
)
def test_a_schema_of_one_value_gives_that_value(subject: Subject, text: str) -> None:
    said, reason = subject.say(json_schema_grammar(forced(text)))
    assert (json.loads(said), reason) == ({"t": text}, FinishReason.STOP)


def test_unicode_in_names_and_enums_is_the_same_from_escapes_and_from_utf8(
    subject: Subject,
) -> None:
    values = ["東京", "é", "😀", "a\u2028b", '"q\\']
    schema = {"type": "object", "properties": {"Straße": {"enum": values}}, "required": ["Straße"]}
    escaped = json.loads(json.dumps(schema, ensure_ascii=True))
    assert json_schema_grammar(escaped) == json_schema_grammar(schema)
    seen = set()
    for seed in range(20):
        text, _ = subject.say(json_schema_grammar(schema), temperature=2.0, seed=seed)
        seen.add(json.loads(text)["Straße"])
    assert len(seen) > 1 and seen <= set(values)


def test_a_document_that_is_cut_has_length_and_a_whole_one_has_stop_exactly_at_the_budget(
    subject: Subject,
) -> None:
    grammar = json_schema_grammar(forced("ab😀"))
    whole = serve_alone(subject.model, subject.request(grammar))
    num_tokens = len(whole.token_ids)
    for max_tokens in range(1, num_tokens + 2):
        reply = serve_alone(subject.model, subject.request(grammar, max_tokens=max_tokens))
        assert reply.token_ids == whole.token_ids[:max_tokens]
        is_cut = max_tokens < num_tokens
        assert reply.finish_reason is (FinishReason.LENGTH if is_cut else FinishReason.STOP)


def test_a_finished_document_ends_whatever_min_tokens_says(subject: Subject) -> None:
    grammar = json_schema_grammar(forced("yes"))
    text, reason = subject.say(grammar, min_tokens=300)
    assert (json.loads(text), reason) == ({"t": "yes"}, FinishReason.STOP)
    assert subject.say(choice_grammar([""]), min_tokens=5) == ("", FinishReason.STOP)


def test_logprobs_are_finite_and_their_bytes_are_the_text(subject: Subject) -> None:
    grammar = json_schema_grammar(forced("😊é中"))
    reply = serve_alone(subject.model, subject.request(grammar, logprobs=5))
    entries = [pair for entry in reply.logprobs for pair in (entry.top)]
    assert all(-1000 < logprob <= 0 for _, logprob in entries)
    assert all(-1000 < entry.logprob <= 0 for entry in reply.logprobs)
    assert [entry.token_id for entry in reply.logprobs] == reply.token_ids
    said = b"".join(subject.tokenizer.token_bytes(entry.token_id) for entry in reply.logprobs)
    assert json.loads(said) == {"t": "😊é中"}


@pytest.mark.parametrize(
    ("grammar", "allowed"),
    [
        (
            choice_grammar(["red", "blue", "red hot", 'a "b"\n']),
            {"red", "blue", "red hot", 'a "b"\n'},
        ),
        (any_grammar('root ::= ("x" | "y") "z"'), {"xz", "yz"}),
        (any_grammar('start: /[ab]/ "c"'), {"ac", "bc"}),
        (
            regex_grammar("^(1[0-2]|3)/x?$"),
            {"10/", "11/", "12/", "3/", "10/x", "11/x", "12/x", "3/x"},
        ),
    ],
)
def test_choices_regexes_and_grammars_hold(
    subject: Subject, grammar: str, allowed: set[str]
) -> None:
    said = {subject.say(grammar, temperature=2.0, seed=seed)[0] for seed in range(12)}
    assert len(said) > 1 and said <= allowed


def test_digits_are_ascii_digits(subject: Subject) -> None:
    patterns = {"type": "array", "items": {"type": "string", "pattern": r"^\d{4}$"}, "minItems": 5}
    for seed in range(3):
        text, _ = subject.say(regex_grammar(r"\d{20}"), temperature=3.0, seed=seed)
        assert text.isascii() and text.isdigit()
        text, _ = subject.say(
            json_schema_grammar(patterns), temperature=3.0, seed=seed, max_tokens=60
        )
        assert text.isascii()


def mixed(subject: Subject) -> list[GenerationRequest]:
    lines, tree = json_schema_grammar(LINES), json_schema_grammar(TREE)
    free = replace(subject.request("", "free", 40), sampling=SamplingParams(40, temperature=0.0))
    return [
        subject.request(lines, "greedy", logprobs=3),
        subject.request(lines, "seeded", temperature=1.1, seed=7, logprobs=3),
        free,
        subject.request(tree, "tree", temperature=0.9, top_p=0.9, seed=3),
        subject.request(choice_grammar(["yes", "no"]), "choice", repetition_penalty=1.3),
        subject.request(lines, "cut", 30, temperature=1.0, seed=2),
    ]


@pytest.fixture(scope="module")
def alone(subject: Subject) -> dict[str, Reply]:
    return {r.request_id: serve_alone(subject.model, r) for r in mixed(subject)}


def assert_same(replies: dict[str, Reply], alone: dict[str, Reply]) -> None:
    for name, reply in alone.items():
        assert replies[name].content == reply.content


def test_batched_equals_alone(subject: Subject, alone: dict[str, Reply]) -> None:
    requests = mixed(subject)
    assert_same(serve(subject.model, {0: requests}).replies, alone)
    arrivals = {2 * i: [request] for i, request in enumerate(requests)}
    assert_same(serve(subject.model, arrivals).replies, alone)


def test_preempted_equals_undisturbed(subject: Subject, alone: dict[str, Reply]) -> None:
    low = [
        replace(request, priority=Priority.LOW)
        for request in mixed(subject)
        if request.request_id in ("seeded", "greedy")
    ]
    low = [replace(r, sampling=replace(r.sampling, max_tokens=150)) for r in low]
    high = [replace(subject.request("", f"h{i}", 60), priority=Priority.HIGH) for i in range(3)]
    run = serve(subject.model, {0: low, 9: high[:1], 30: high[1:]}, num_blocks=11)
    assert run.stats.total_preemptions >= 1
    for request in low:
        assert run.replies[request.request_id].content == alone[request.request_id].content


@pytest.mark.parametrize("num_sent", [1, 5, 20])
def test_resumed_equals_uninterrupted(
    subject: Subject, alone: dict[str, Reply], num_sent: int
) -> None:
    for request in mixed(subject)[:2]:
        whole = alone[request.request_id]
        resumed = replace(request, resumed_token_ids=tuple(whole.token_ids[:num_sent]))
        rest = serve_alone(subject.model, resumed)
        assert rest.token_ids == whole.token_ids[num_sent:]
        assert rest.finish_reason is whole.finish_reason


class HalfRight:
    """Drafts what was said when alone, with an error now and then, and beyond the end."""

    def __init__(self, alone: dict[str, Reply]) -> None:
        self._alone = alone
        self.num_accepted = 0
        self._before: dict[str, int] = {}

    def propose(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            name, at = sequence.request_id, sequence.num_output_tokens
            self.num_accepted += max(0, at - self._before.get(name, at) - 1)
            self._before[name] = at
            drafts = [*self._alone[name].token_ids, 5, 5, 5][at : at + 1 + at % 4]
            if at % 5 == 3 and drafts:
                drafts[-1] = (drafts[-1] + 1) % 300
            room = sequence.max_num_tokens - sequence.num_tokens - 1
            sequence.draft_token_ids = drafts[:room]


def test_speculative_equals_plain(subject: Subject, alone: dict[str, Reply]) -> None:
    proposer = HalfRight(alone)
    run = serve(subject.model, {0: mixed(subject)}, proposer)
    assert_same(run.replies, alone)
    assert proposer.num_accepted > 50


def test_a_grammar_that_gives_up_ends_its_sequence_and_no_other(
    subject: Subject, alone: dict[str, Reply]
) -> None:
    many = range(3000)
    rules = "\n".join(f'r{i}: "x" s{i}\ns{i}: /[a-c]/ | "{i}" s{i}' for i in many)
    text = f'start: "kkk" ({" | ".join(f"r{i}" for i in many)})\n{rules}'
    bad = subject.request(json.dumps({"grammars": [{"lark_grammar": text}]}), "bad")
    run = serve(subject.model, {0: [*mixed(subject), bad]})
    assert run.replies["bad"].finish_reason is FinishReason.ERROR
    assert "could not be kept to its grammar" in (run.replies["bad"].error or "")
    assert run.stats.total_failed_steps == 0
    assert_same(run.replies, alone)
