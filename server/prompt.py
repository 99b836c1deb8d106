"""Messages to one prompt text through the model's own chat template.

Three rules live here. Content forges nothing: a noncharacter breaks up every control token's text
that a user typed, before the template sees it (`Tokenizer.encode_rendered` takes it out again).
The template sees the messages as they came; only if it refuses them, later system messages are
folded into the next user turn, then all of them (Gemma, Qwen). A final assistant message that is
to be continued ends the prompt to the byte. A trailing assistant message without
`continue_final_message` is a finished turn, and a new one begins after it.
Tools go to a template that has the variable `tools`; for another one `tool_prompt.py` writes them.

Knows nothing of HTTP. May run for seconds in the worst case: call it in a worker thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.errors import InvalidRequest
from server.messages import Message
from server.template import ChatTemplate, TemplateRefused
from server.tokenizer import Tokenizer
from server.tool_prompt import as_text, ordered_results, with_template_ids
from server.tools import FunctionTool

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

FALLBACK_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For models that bring no template: base models, mostly."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """`text` with `marker` inside every control token that a user typed. `continued` is the text
    of the message that the answer goes on with, if there is one."""

    text: str
    marker: str
    continued: str = ""

    @property
    def continues(self) -> bool:
        return bool(self.continued)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.encode_rendered(self.text, self.marker)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """`add_generation_prompt` None: yes, unless the final message is continued."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[FunctionTool, ...] = ()


class PromptRenderer:
    """Renders with one model's template. Safe in any thread."""

    def __init__(
        self,
        template: str | None,
        tokenizer: Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        template_call_id: Callable[[str], str] = str,
    ) -> None:
        """`special_tokens`: the template's variables such as `bos_token` and `eos_token`.

        `template_call_id` makes of a tool call's id what the template accepts.

        Raises TemplateRefused if the template does not compile.
        """
        self._template = ChatTemplate(template if template is not None else FALLBACK_TEMPLATE)
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self._template_call_id = template_call_id

    @property
    def uses_tools(self) -> bool:
        """Whether the template itself tells the model of its tools."""
        return self._template.uses_tools

    def render(
        self, messages: Sequence[Message], options: PromptOptions | None = None
    ) -> RenderedPrompt:
        """Raises InvalidRequest if the template takes the messages in no form, or options clash."""
        options = options or PromptOptions()
        _check_options(messages, options)
        tools = [tool.definition() for tool in options.tools]
        marker, sentinel = _unused_noncharacters([*messages, *tools])
        tools = self._guard(tools, marker)
        guarded = self._with_tools(self._guard(list(messages), marker), tools)
        prefill = guarded[-1]["content"] if options.continue_final_message else ""
        if options.continue_final_message:
            last = guarded.pop()
            if prefill:
                guarded.append(last | {"content": sentinel + prefill + sentinel})
        variables = self._variables(options, bool(prefill))
        if tools:
            variables["tools"] = tools
        text = self._render_some_form(guarded, variables)
        if prefill:
            text = _cut_at(text, sentinel) + prefill
        return RenderedPrompt(text, marker, continued=prefill)

    def _variables(self, options: PromptOptions, continues: bool) -> dict[str, Any]:
        adds = options.add_generation_prompt
        if options.continue_final_message:
            adds = not continues
        return {
            # Templates ask `tools is not none` as well as `tools`: absent is not enough.
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **options.template_variables,
            "add_generation_prompt": True if adds is None else adds,
        }

    def _with_tools(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
        """The messages as this template can take them: with tools, or with text instead."""
        messages = ordered_results(messages)
        if self._template.uses_tools:
            return with_template_ids(messages, self._template_call_id)
        return as_text(messages, tools)

    def _guard(self, value: Any, marker: str) -> Any:
        """The same value with every control token's text in it broken up by `marker`."""
        if isinstance(value, str):
            return self._tokenizer.break_special(value, marker)
        if isinstance(value, dict):
            return {self._guard(k, marker): self._guard(v, marker) for k, v in value.items()}
        if isinstance(value, list):
            return [self._guard(item, marker) for item in value]
        return value

    def _render_some_form(self, messages: list[Message], variables: dict[str, Any]) -> str:
        refusal: TemplateRefused | None = None
        for form in (_as_given, _fold_later_system, _fold_every_system):
            try:
                return self._template.render(variables | {"messages": form(messages)})
            except TemplateRefused as error:
                refusal = refusal or error
        raise InvalidRequest(
            f"The model's chat template refuses these messages: {refusal}", param="messages"
        ) from refusal


def _as_given(messages: list[Message]) -> list[Message]:
    return messages


def _fold_later_system(messages: list[Message]) -> list[Message]:
    """Leading system messages become one; later ones open the next user turn."""
    num_leading = next(
        (i for i, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    leading = [message["content"] for message in messages[:num_leading]]
    system = [{"role": "system", "content": "\n\n".join(leading)}] if leading else []
    return system + _fold_every_system(messages[num_leading:])


def _fold_every_system(messages: list[Message]) -> list[Message]:
    """System texts go, in order, to the front of the next user turn, or into one of their own."""
    folded: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
            continue
        if waiting and message["role"] == "user":
            message = message | {"content": "\n\n".join([*waiting, message["content"]])}
        elif waiting:
            _append_user(folded, waiting)
        waiting = []
        if message["role"] == "user":
            _append_user(folded, [message["content"]], message)
        else:
            folded.append(message)
    if waiting:
        _append_user(folded, waiting)
    return folded


def _append_user(messages: list[Message], texts: list[str], message: Message | None = None) -> None:
    """Templates that are strict about system messages are strict about alternation too."""
    if messages and messages[-1]["role"] == "user":
        previous = messages.pop()
        texts = [previous["content"], *texts]
        message = previous
    content = "\n\n".join(texts)
    messages.append((message or {"role": "user"}) | {"content": content})


def _check_options(messages: Sequence[Message], options: PromptOptions) -> None:
    if not options.continue_final_message:
        return
    if options.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            param="continue_final_message",
        )
    if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        raise InvalidRequest(
            "'continue_final_message' needs a last message of the assistant with text only.",
            param="continue_final_message",
        )


def _unused_noncharacters(messages: Sequence[Message]) -> tuple[str, str]:
    """Two characters that stand nowhere in `messages`."""
    unused = [
        character
        for character in _NONCHARACTERS
        if not any(character in text for text in _texts(messages))
    ]
    if len(unused) < 2:
        raise InvalidRequest(
            "The messages use nearly all of the noncharacters U+FDD0 to U+FDEF; two are needed.",
            param="messages",
        )
    return unused[0], unused[1]


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _cut_at(text: str, sentinel: str) -> str:
    """What stands before the message that begins with `sentinel`."""
    end = text.rfind(sentinel)
    start = text.rfind(sentinel, 0, end) if end > 0 else -1
    if start < 0:
        raise InvalidRequest(
            "The model's chat template does not render the final assistant message, so it "
            "cannot be continued.",
            param="continue_final_message",
        )
    return text[:start]
