"""From a validated body and a model to the engine's own words: sampling, priority, requests.

What depends on the model is checked here: ids against the vocabulary, the prompt against the
context. An over-long prompt is refused with the counts; prompt + max_tokens over the context is
clamped and ends with `length`. Choice i's seed is `choice_seed(seed, i)`.

Knows nothing of HTTP, text or how prompts are made.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.sampling_params import SamplingParams
from scheduler.messages import GenerationRequest, Priority
from server.choice_text import TextOptions
from server.errors import ContextExceeded, InvalidRequest
from server.generation import ChoiceSpec, GenerationSpec
from server.limits import LOGIT_BIAS_RANGE, MAX_SEQUENCES
from server.output_parser import OutputOptions
from server.protocol import GenerationBody
from server.served_embedder import ServedEmbedder
from server.served_model import ServedModel
from server.thinking_budget import ThinkingBudget

_MASK_64 = 2**64 - 1
_MASK_63 = 2**63 - 1
_SERVICE_TIERS = {
    "priority": Priority.HIGH,
    "fast": Priority.HIGH,
    "auto": Priority.NORMAL,
    "default": Priority.NORMAL,
    "scale": Priority.NORMAL,
    "flex": Priority.LOW,
}


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a dialect adds to the shared fields. `logprobs` as in SamplingParams.

    `max_tokens` None: up to the end of the context. `prompt_param` names the prompt's field in
    errors. `strips_leading_space`: the answer starts a text of its own. `timeout_s` counts for
    requests that have none of their own, from `arrival_s` (`time.monotonic()`; 0: the present).
    `predicted_token_ids` as in GenerationRequest.
    """

    request_id: str
    prompt_param: str
    max_tokens: int | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    strips_leading_space: bool = False
    keeps_every_logprob: bool = False
    output: OutputOptions = field(default_factory=OutputOptions)
    markers: tuple[str, ...] = ()
    grammar: str = ""
    thinking_budget: ThinkingBudget | None = None
    cache_scope: str = ""
    timeout_s: float | None = None
    highest_priority: Priority | None = None
    arrival_s: float = 0.0
    predicted_token_ids: tuple[int, ...] = ()


def generation_spec(
    body: GenerationBody,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    options: RequestOptions,
) -> GenerationSpec:
    """All choices of `prompts`: index = prompt_i * n + j. Raises InvalidRequest."""
    if len(prompts) * body.n > MAX_SEQUENCES:
        raise InvalidRequest(
            f"The number of prompts times 'n' is {len(prompts) * body.n}; "
            f"at most {MAX_SEQUENCES} are allowed.",
            param="n",
        )
    prompts = truncated(prompts, body, model, options.max_tokens)
    shared = _sampling(body, model, options)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    choices: list[ChoiceSpec] = []
    for i, prompt in enumerate(prompts):
        request = _request(body, model, tuple(prompt), shared, options)
        for j in range(body.n):
            index = i * body.n + j
            choices.append(_choice(request, options, index, i, choice_seed(seed, j)))
    text = TextOptions(
        stop=body.stop_strings,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        strips_leading_space=options.strips_leading_space and not options.grammar,
        min_tokens=body.min_tokens,
        keeps_every_logprob=options.keeps_every_logprob,
        markers=options.markers,
    )
    return GenerationSpec(
        tuple(choices),
        text,
        options.arrival_s or time.monotonic(),
        tuple(tuple(prompt) for prompt in prompts) if body.return_token_ids else None,
        options.output,
        options.thinking_budget,
    )


def truncated(
    prompts: Sequence[Sequence[int]],
    body: GenerationBody,
    model: ServedModel,
    max_tokens: int | None,
) -> list[Sequence[int]]:
    """The prompts cut to their last `truncate_prompt_tokens`, as vLLM does; -1 cuts to what leaves
    room for `max_tokens`, or for one token. Raises InvalidRequest."""
    keep, limit = body.truncate_prompt_tokens, model.context_limit
    if keep is None:
        return list(prompts)
    if keep == 0 or keep > limit:
        raise InvalidRequest(
            f"'truncate_prompt_tokens' is {keep}; it must be -1 or from 1 to {limit}, the maximum "
            "context length of the model.",
            param="truncate_prompt_tokens",
        )
    if keep == -1:
        keep = max(1, limit - max(1, max_tokens or 1))
    return [prompt[-keep:] for prompt in prompts]


def choice_seed(seed: int, choice: int) -> int:
    """Choice 0 keeps the seed (its low 63 bits); the others get a mix of seed and number.

    The mix is the finalizer of SplitMix64 (Steele, Lea and Flood 2014) over
    seed + choice * 0x9E3779B97F4A7C15, cut to 63 bits.
    """
    if choice == 0:
        return seed & _MASK_63
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (mixed ^ (mixed >> 31)) & _MASK_63


def check_token_ids(
    token_ids: Sequence[int], model: ServedModel | ServedEmbedder, param: str
) -> None:
    """Raise InvalidRequest if an id is not in the vocabulary."""
    if token_ids and max(token_ids) >= model.vocab_size:
        raise InvalidRequest(
            f"'{param}' holds the token id {max(token_ids)}, but the vocabulary of "
            f"{model.name} ends at {model.vocab_size - 1}.",
            param=param,
        )


def _sampling(body: GenerationBody, model: ServedModel, options: RequestOptions) -> SamplingParams:
    check_token_ids(body.stop_token_ids, model, "stop_token_ids")
    # With top_p 0 no token is probable enough: the most likely one remains.
    top_k = 1 if body.top_p == 0 else max(0, min(body.top_k, model.vocab_size))
    # A grammar says where its output may end, so there the end tokens are not ignored.
    eos = () if body.ignore_eos and not options.grammar else model.stop_token_ids
    return SamplingParams(
        max_tokens=0,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=top_k,
        top_p=body.top_p or 1.0,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body, model),
        stop_token_ids=tuple(dict.fromkeys((*eos, *body.stop_token_ids))),
        logprobs=options.logprobs,
        is_seeded=body.seed is not None,
    )


def _logit_bias(body: GenerationBody, model: ServedModel) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, value in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest(
                f"'logit_bias' has the key '{key[:40]}', which is not a token id.",
                param="logit_bias",
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequest("'logit_bias' values must be numbers.", param="logit_bias")
        if not math.isfinite(value) or abs(value) > LOGIT_BIAS_RANGE:
            raise InvalidRequest(
                f"'logit_bias' values must lie between -{LOGIT_BIAS_RANGE:g} and "
                f"{LOGIT_BIAS_RANGE:g}.",
                param="logit_bias",
            )
        biases[int(key)] = float(value)
    check_token_ids(list(biases), model, "logit_bias")
    return tuple(sorted(biases.items()))


def _request(
    body: GenerationBody,
    model: ServedModel,
    prompt: tuple[int, ...],
    shared: SamplingParams,
    options: RequestOptions,
) -> GenerationRequest:
    """The request of one prompt, still without the id and seed of a choice."""
    limit = model.context_limit
    # Scoring a prompt needs a token too, though it is thrown away.
    wants_tokens = options.max_tokens != 0 or options.prompt_logprobs is not None
    if len(prompt) + wants_tokens > limit:
        raise ContextExceeded(limit, len(prompt), param=options.prompt_param)
    room = limit - len(prompt)
    max_tokens = room if options.max_tokens is None else min(options.max_tokens, room)
    if body.min_tokens > max_tokens and options.max_tokens != 0:
        raise InvalidRequest(
            f"'min_tokens' is {body.min_tokens}, but only {max_tokens} tokens can be generated.",
            param="min_tokens",
        )
    now_s = time.time()
    return GenerationRequest(
        request_id=options.request_id,
        prompt_token_ids=prompt,
        sampling=replace(shared, max_tokens=max_tokens),
        priority=_priority(body, options.highest_priority),
        arrival_s=now_s,
        deadline_s=_deadline_s(body, options, now_s),
        cache_salt=_cache_salt(options.cache_scope, body.cache_salt),
        prompt_logprobs=options.prompt_logprobs,
        grammar=options.grammar,
        predicted_token_ids=options.predicted_token_ids,
    )


def _choice(
    request: GenerationRequest, options: RequestOptions, index: int, prompt_index: int, seed: int
) -> ChoiceSpec:
    num_prompt_tokens = len(request.prompt_token_ids)
    drops_output = request.sampling.max_tokens == 0
    if drops_output and request.prompt_logprobs is None:
        return ChoiceSpec(index, prompt_index, num_prompt_tokens, None)
    sampling = replace(request.sampling, seed=seed, max_tokens=max(1, request.sampling.max_tokens))
    if drops_output:
        sampling = replace(sampling, min_tokens=0)
    request = replace(
        request,
        request_id=f"{options.request_id}-{index}",
        sampling=sampling,
    )
    return ChoiceSpec(index, prompt_index, num_prompt_tokens, request, drops_output)


def _deadline_s(body: GenerationBody, options: RequestOptions, now_s: float) -> float | None:
    timeout_s = options.timeout_s if body.timeout is None else body.timeout
    if timeout_s is None:
        return None
    elapsed_s = time.monotonic() - options.arrival_s if options.arrival_s else 0.0
    return now_s - elapsed_s + timeout_s


def _priority(body: GenerationBody, highest: Priority | None) -> Priority:
    """What is asked for, but not above `highest`; `highest` itself if nothing is."""
    asked = _asked_priority(body)
    if highest is None:
        return Priority.NORMAL if asked is None else asked
    return highest if asked is None else max(asked, highest)


def _asked_priority(body: GenerationBody) -> Priority | None:
    """`priority` as an integer (lower is sooner, 0 is normal) or a name wins over the tier; the
    tier "auto" leaves it to the server."""
    if isinstance(body.priority, str):
        return Priority[body.priority.upper()]
    if body.priority is not None:
        return _sign_priority(body.priority)
    if body.service_tier is None or body.service_tier == "auto":
        return None
    if body.service_tier not in _SERVICE_TIERS:
        raise InvalidRequest(
            f"'service_tier' must be one of {', '.join(_SERVICE_TIERS)}.", param="service_tier"
        )
    return _SERVICE_TIERS[body.service_tier]


def _sign_priority(number: int) -> Priority:
    if number == 0:
        return Priority.NORMAL
    return Priority.HIGH if number < 0 else Priority.LOW


def _cache_salt(scope: str, salt: str | None) -> str:
    """Scope and salt, so joined that no salt a client chooses reaches another key's scope."""
    return f"{scope}:{salt or ''}" if scope or salt else ""
