"""The limits of a request, in one place. A value over one of them is a 400 that names the field.

They bound what a small body can make the server allocate, not what a model can do.
"""

from __future__ import annotations

MAX_JSON_DEPTH = 64
"""Nested objects and lists in a body, and in the JSON text of tool arguments."""

MAX_MESSAGES = 10_000
MAX_TOOL_CALLS = 128
MAX_TOOLS = 128

MAX_CHOICES = 128
"""`n`, as at OpenAI."""

MAX_PROMPTS = 1_024
MAX_SEQUENCES = 1_024
"""Prompts of one completions request times `n`."""

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_024
MAX_STOP_TOKEN_IDS = 128

MAX_LOGIT_BIAS = 1_024
LOGIT_BIAS_RANGE = 100.0

MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5

MAX_TEMPERATURE = 2.0
PENALTY_RANGE = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_TOKENS = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions when it is left out, as at OpenAI."""

PRIORITY_RANGE = 1_000

MAX_TIMEOUT_S = 86_400
"""Of one request; a day."""

MIN_SEED = -(2**63)
MAX_SEED = 2**63 - 1

CHAT_MIN_MAX_TOKENS = 1
"""Least `max_tokens` in chat; `/v1/completions` takes 0, to score a prompt with `echo`."""

MAX_IDENTIFIER_CHARS = 512
"""`model`, `user`, `cache_salt`, ids in messages."""

MAX_EMBEDDING_INPUTS = 2_048
"""Texts of one embeddings request, as at OpenAI; also documents of one rerank request."""

MAX_EMBEDDING_TOKENS = 2**20
"""Tokens of all texts of one request."""

MAX_QUEUED_EMBEDDING_TOKENS = 2**21
"""Tokens of all unfinished requests of one embedding model; beyond that, 429."""

MAX_GRAMMAR_CHARS = 131_072
"""JSON Schema, Lark, GBNF or regex text; all choices together."""

MAX_OBJECT_PROPERTIES = 500
MAX_SCHEMA_PROPERTIES = 5_000
MAX_MULTIPLE_OF = 10_000
"""`multipleOf` without its decimal point and its trailing zeros."""

MAX_ERROR_MESSAGE_CHARS = 2_000
