"""The grammar of an answer: what the client asks its output to match, its tools and its thought.

- Tools that must be called leave no room for structured output: the calls are the answer.
- Tools that may be called stand beside it: the answer is calls, or what the client described.
- A reasoning model thinks first, freely.

Everything is compiled here for the model that will run it, so all bad input ends here.
"""

from __future__ import annotations

from server.errors import InvalidRequest
from server.served_model import ServedModel
from server.structured import StructuredError, check_grammar, embedded, lark_grammar
from server.structured_request import Constraint, compile_constraint


def answer_grammar(constraint: Constraint | None, lark: str, model: ServedModel) -> str:
    """One grammar text of both, or "". Slow: call it in a worker thread.

    `lark` is the plan's grammar, or "": where it says `@structured`, the client's own stands.
    Raises InvalidRequest.
    """
    grammar = "" if constraint is None else compile_constraint(constraint, model.grammars)
    if not lark:
        return grammar
    try:
        grammar = embedded(lark, grammar) if "@structured" in lark else lark_grammar(lark)
        check_grammar(grammar, model.grammars)
    except StructuredError as error:
        raise InvalidRequest(
            f"'tools' cannot be enforced: {error.message}.", param="tools"
        ) from error
    return grammar
