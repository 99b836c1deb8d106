"""What a chat request's tools and reasoning options mean for one model: prompt, grammar, reading.

Decided before anything is generated; all bad input ends here. The plan of the prompt comes first,
since how the answer begins is read off the rendered prompt.

Knows requests and models; not how a prompt is rendered, a grammar run or an answer read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from server.errors import InvalidRequest
from server.output_parser import OutputOptions
from server.protocol import ChatBody
from server.reasoning import EFFORT_TOKENS, TAGS
from server.served_model import ServedModel
from server.thinking_budget import ThinkingBudget
from server.tool_grammar import Thinking, Vocabulary, structured_rules, tool_grammar
from server.tool_parsers.registry import find_family
from server.tools import ToolMode, ToolRequest, read_tool_request


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """`template_variables` go beside the client's own, which win. `max_thinking_tokens` None: no
    bound, or a model that does not reason. `told_schema`: what the prompt says of the answer."""

    tools: ToolRequest = field(default_factory=ToolRequest)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    max_thinking_tokens: int | None = None
    told_schema: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """`markers`: control tokens that must stay in the text. `tool_grammar`: Lark text, or ""; with
    structured output it says `@structured` where that belongs, if calls do not take its place."""

    output: OutputOptions = field(default_factory=OutputOptions)
    markers: tuple[str, ...] = ()
    tool_grammar: str = ""
    thinking_budget: ThinkingBudget | None = None


def plan_prompt(
    body: ChatBody, model: ServedModel, schema: dict[str, Any] | None = None
) -> PromptPlan:
    """`schema`: what the answer must match, if it may be told. Raises InvalidRequest."""
    tools = read_tool_request(body.tools, body.tool_choice, body.parallel_tool_calls)
    is_told = model.schema_in_prompt and tools.mode is not ToolMode.REQUIRED
    told_schema = schema if is_told else None
    if not model.output_format.reasons:
        if body.thinking_budget is not None:
            raise InvalidRequest(
                f"'thinking_budget' is not served: {model.name} does not reason.",
                param="thinking_budget",
            )
        return PromptPlan(tools, told_schema=told_schema)
    variables: dict[str, Any] = {}
    max_tokens = body.thinking_budget
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            variables["enable_thinking"] = False
        if max_tokens is None:
            max_tokens = EFFORT_TOKENS[body.reasoning_effort]
    return PromptPlan(tools, variables, max_tokens, told_schema)


def plan_answer(
    plan: PromptPlan,
    model: ServedModel,
    *,
    starts_inside: bool,
    continues: bool,
    is_structured: bool = False,
) -> AnswerPlan:
    """`starts_inside`: the prompt ends in a thought. `continues`: the answer goes on inside a
    message; it begins no thought then. `is_structured`: the client says what text must match.

    Raises InvalidRequest if calls of these functions cannot be enforced.
    """
    tools = plan.tools
    reasons = model.output_format.reasons and (starts_inside or not continues)
    has_tools = tools.mode is not ToolMode.NONE
    family = find_family(model.output_format.tool_parser)
    grammar = ""
    if tools.needs_grammar or is_structured:
        vocabulary = Vocabulary(model.tokenizer.control_tokens)
        thinking = Thinking(starts_inside) if reasons else None
        is_text_structured = is_structured and tools.mode is not ToolMode.REQUIRED
        write = structured_rules if is_text_structured else tool_grammar
        grammar = write(tools, family, vocabulary, thinking)
    budget = None
    if reasons and plan.max_thinking_tokens is not None:
        budget = ThinkingBudget(plan.max_thinking_tokens, starts_inside)
    return AnswerPlan(
        output=OutputOptions(
            tool_parser=family.name if has_tools else "",
            functions=tools.callable,
            reasons=reasons,
            starts_inside=starts_inside,
        ),
        markers=(*(family.markers if has_tools else ()), *(TAGS if reasons else ())),
        tool_grammar=grammar,
        thinking_budget=budget,
    )
