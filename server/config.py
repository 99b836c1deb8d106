"""The configuration of `hexlm serve`: frozen dataclasses, read from TOML and flags.

Flags win over the file, the file over the defaults. An unknown key is an error that names the
nearest known one; types and ranges are checked here and nowhere else. `configs/server.toml`
documents every key. Does not know how a default called "auto" is detected (`machine.py`), what
a model name means (`model_store.py`) or where flags come from.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from engine.npu.device_config import PERF_MODES, PROFILING_LEVELS
from engine.speculation.config import METHODS
from scheduler.messages import Priority
from server.api_keys import ApiKey
from server.output_format import REASONING_PARSERS, TOOL_PARSERS
from server.settings import (
    auto_or,
    boolean,
    choice_table,
    integer,
    one_of,
    seconds,
    setting,
    size_bytes,
    text,
    text_table,
    texts,
)


class ConfigError(Exception):
    """The configuration cannot be used; the message is one line and names file and key."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The table `[server]`: the socket, who may use it, and how it ends."""

    host: str = setting("127.0.0.1", text)
    port: int = setting(8000, integer(0, 65535))
    api_keys: tuple[str, ...] = setting((), texts)
    api_key_file: str = setting("", text)
    cors_origins: tuple[str, ...] = setting((), texts)
    max_body_bytes: int = setting(8 * 1024**2, size_bytes)
    keep_alive_interval_s: float = setting(10.0, seconds(0.05))
    drain_timeout_s: float = setting(30.0, seconds())
    max_stored_responses: int = setting(1_000, integer(0))
    stored_responses_memory: int = setting(64 * 1024**2, size_bytes)
    max_background_responses: int = setting(32, integer(0))
    log_level: str = setting("info", one_of("debug", "info", "warning", "error"))
    debug: bool = setting(False, boolean)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The table `[models]`: what is served, under which other names, and how it is spoken to.

    `tool_parsers` and `reasoning_parsers` go from a model's name to a parser's.
    """

    model: tuple[str, ...] = setting(("smollm2-135m-instruct",), texts)
    aliases: Mapping[str, str] = setting({}, text_table)
    tool_parsers: Mapping[str, str] = setting({}, choice_table(*TOOL_PARSERS))
    reasoning_parsers: Mapping[str, str] = setting({}, choice_table(*REASONING_PARSERS))
    schema_in_prompt: bool = setting(True, boolean)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The table `[engine]`: the device and memory of each engine process, and its supervision.

    None stands for "auto": `threads` = the physical cores this process may use, `kv_memory`
    (bytes) = a share of the available memory, `max_model_len` (tokens) = the model's own.
    """

    device: str = setting("auto", one_of("auto", "cpu", "npu", "npu-emulated"))
    threads: int | None = setting(None, auto_or(integer(1, 1024)))
    kv_memory: int | None = setting(None, auto_or(size_bytes))
    kv_format: str = setting("auto", one_of("auto", "f32", "int8", "int8k4v", "int4"))
    max_model_len: int | None = setting(None, auto_or(integer(16)))
    stall_timeout_s: float = setting(60.0, seconds(0.1))
    max_restarts: int = setting(5, integer(0))
    restart_window_s: float = setting(600.0, seconds(1.0))
    max_resumes_per_request: int = setting(3, integer(0))


@dataclass(frozen=True, slots=True)
class NpuTable:
    """The table `[npu]`: how the NPU is used. Empty texts stand for the device's own choice."""

    device_file: str = setting("", text)
    perf_mode: str = setting("", one_of("", *PERF_MODES))
    fused: bool = setting(False, boolean)
    profiling: str = setting("", one_of(*PROFILING_LEVELS))


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The table `[scheduler]`: how many sequences share an engine, and how they wait."""

    max_num_seqs: int = setting(32, integer(1, 4096))
    max_num_batched_tokens: int = setting(512, integer(1))
    max_queue: int = setting(256, integer(0))
    aging_s: float = setting(10.0, seconds(0.1))
    enable_prefix_caching: bool = setting(True, boolean)
    default_deadline_s: float = setting(0.0, seconds())


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """The table `[speculation]`: how the next tokens are guessed, to be checked many at a time.

    `draft_models` goes from a model's name to the name or path of the one that drafts for it.
    """

    method: str = setting("auto", one_of(*METHODS))
    max_draft_tokens: int = setting(16, integer(1, 64))
    draft_models: Mapping[str, str] = setting({}, text_table)


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """The table `[embedding]`: how texts of embedding models are put into batches."""

    batch_window_s: float = setting(0.005, seconds())
    max_batch_texts: int = setting(32, integer(1, 4096))
    max_batch_tokens: int = setting(1024, integer(1))
    max_length_difference: int = setting(32, integer(0))


@dataclass(frozen=True, slots=True)
class ApiKeySettings:
    """One table of `[[api_keys]]`: a key with a name for people, its priority and its limits.

    `priority` None: as each request asks. Limits of 0 are none.
    """

    name: str = setting("", text)
    key: str = setting("", text)
    key_file: str = setting("", text)
    priority: str | None = setting(None, one_of("high", "normal", "low"))
    requests_per_minute: int = setting(0, integer(0))
    tokens_per_minute: int = setting(0, integer(0))


@dataclass(frozen=True, slots=True)
class ServerConfig:
    server: ServerSettings = field(default_factory=ServerSettings)
    models: ModelSettings = field(default_factory=ModelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    npu: NpuTable = field(default_factory=NpuTable)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    embedding: EmbeddingSettings = field(default_factory=EmbeddingSettings)
    api_keys: tuple[ApiKeySettings, ...] = field(default=(), repr=False)

    @property
    def has_keys(self) -> bool:
        return bool(self.server.api_keys or self.server.api_key_file or self.api_keys)


_SECRETS = ("api_keys", "key")
"""Not repeated in errors, which end up in logs."""

_TABLES: dict[str, type[Any]] = {
    "server": ServerSettings,
    "models": ModelSettings,
    "engine": EngineSettings,
    "npu": NpuTable,
    "scheduler": SchedulerSettings,
    "speculation": SpeculationSettings,
    "embedding": EmbeddingSettings,
}


def load_config(path: Path | None = None, flags: Mapping[str, Any] | None = None) -> ServerConfig:
    """Read `path` (None: no file) and lay `flags` over it.

    `flags` maps key names without their table to values; None means "not given".

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    document = _read_file(path) if path is not None else {}
    keys = _checked_keys(document.pop("api_keys", []), str(path))
    tables = _checked_tables(document, str(path))
    for key, value in (flags or {}).items():
        if value is not None:
            table = table_of(key)
            flag = "--" + key.replace("_", "-")
            tables[table][key] = _read_value(_TABLES[table], key, value, flag)
    config = ServerConfig(
        **{name: kind(**tables[name]) for name, kind in _TABLES.items()}, api_keys=keys
    )
    _check_together(config.scheduler)
    return config


def known_keys() -> tuple[str, ...]:
    """Every key as `table.key`, in the order of the dataclasses."""
    return tuple(f"{name}.{f.name}" for name, kind in _TABLES.items() for f in fields(kind))


def table_of(key: str) -> str:
    """The table that holds `key`; key names are unique over all tables."""
    return next(name for name, kind in _TABLES.items() if key in _names(kind))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from error


def _checked_tables(document: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    for name, table in document.items():
        if name not in _TABLES or not isinstance(table, Mapping):
            raise _unknown(name, source)
        for key, value in table.items():
            if key not in _names(_TABLES[name]):
                raise _unknown(f"{name}.{key}", source)
            tables[name][key] = _read_value(_TABLES[name], key, value, f"{name}.{key} in {source}")
    return tables


def _checked_keys(entries: Any, source: str) -> tuple[ApiKeySettings, ...]:
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
        raise ConfigError(f"api_keys in {source} must be tables: write [[api_keys]]")
    keys = tuple(_checked_key(entry, f"api_keys[{i}]", source) for i, entry in enumerate(entries))
    for i, key in enumerate(keys):
        if not key.name or key.name in {other.name for other in keys[:i]}:
            raise ConfigError(f"api_keys[{i}].name in {source} must be a name of its own")
        if bool(key.key) == bool(key.key_file):
            raise ConfigError(f"api_keys[{i}] in {source} needs either key or key_file")
    return keys


def _checked_key(entry: Mapping[str, Any], where: str, source: str) -> ApiKeySettings:
    for name in entry:
        if name not in _names(ApiKeySettings):
            known = ", ".join(f.name for f in fields(ApiKeySettings))
            raise ConfigError(f"unknown key {name!r} of {where} in {source}; known are {known}")
    return ApiKeySettings(
        **{
            name: _read_value(ApiKeySettings, name, value, f"{where}.{name} in {source}")
            for name, value in entry.items()
        }
    )


def _read_value(table: type[Any], key: str, value: Any, where: str) -> Any:
    kind = next(f.metadata["kind"] for f in fields(table) if f.name == key)
    try:
        return kind(value)
    except ValueError as error:
        shown = "" if key in _SECRETS else f"; it is {value!r}"
        raise ConfigError(f"{where} must be {error}{shown}") from None


def _check_together(scheduler: SchedulerSettings) -> None:
    if scheduler.max_num_batched_tokens <= scheduler.max_num_seqs:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens ({scheduler.max_num_batched_tokens}) must exceed "
            f"scheduler.max_num_seqs ({scheduler.max_num_seqs}), or full seats would leave "
            "nothing for prompts"
        )


def _unknown(key: str, source: str) -> ConfigError:
    """Compare whole names first, then the part after the dot: a key in the wrong table."""
    known = (*known_keys(), *_TABLES)
    leaf = key.rpartition(".")[2]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    near = same_leaf or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:
        near = difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in known], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; tables are {', '.join(_TABLES)}"
    return ConfigError(f"unknown key {key!r} in {source}{hint}")


def _names(table: type[Any]) -> set[str]:
    return {f.name for f in fields(table)}


def read_api_keys(settings: ServerSettings) -> tuple[str, ...]:
    """The keys given directly and those in `api_key_file`, one a line, `#` starts a comment.

    Raises:
        ConfigError: the file cannot be read, or holds no key (which would open the server).
    """
    if not settings.api_key_file:
        return settings.api_keys
    return settings.api_keys + _keys_in(settings.api_key_file, "server.api_key_file")


def read_key_policies(config: ServerConfig) -> tuple[ApiKey, ...]:
    """The keys of `[[api_keys]]` with what they may do.

    Raises:
        ConfigError: a key's file cannot be read or does not hold exactly one key, or a key is
            empty or given twice.
    """
    policies = tuple(_policy(settings) for settings in config.api_keys)
    secrets = [policy.secret for policy in policies] + list(read_api_keys(config.server))
    for policy in policies:
        if secrets.count(policy.secret) > 1:
            raise ConfigError(f"api_keys: the key of {policy.name!r} is given twice")
    return policies


def _policy(settings: ApiKeySettings) -> ApiKey:
    where = f"api_keys: key_file of {settings.name!r}"
    found = _keys_in(settings.key_file, where) if settings.key_file else (settings.key,)
    if len(found) > 1:
        raise ConfigError(f"{where} holds {len(found)} keys; it must hold one")
    try:
        return ApiKey(
            found[0],
            settings.name,
            Priority[settings.priority.upper()] if settings.priority else None,
            settings.requests_per_minute or None,
            settings.tokens_per_minute or None,
        )
    except ValueError as error:
        raise ConfigError(f"api_keys: {settings.name!r}: {error}") from error


def _keys_in(file: str, where: str) -> tuple[str, ...]:
    """The keys in a file, one a line."""
    path = Path(file).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} {path} cannot be read: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and line.strip()[0] != "#")
    if not keys:
        raise ConfigError(f"{where} {path} holds no key; write one a line")
    return keys
