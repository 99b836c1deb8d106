"""A model that is on disk and can be served: its text side, and how its engine is launched.

Made from a bundle and the configuration. Nothing is loaded and no process is started here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from engine.architectures.config import ModelConfig
from engine.bundle import MANIFEST_FILE, Bundle
from engine.errors import BundleError, ImportFailed
from engine.npu.device_config import NpuSettings
from engine.speculation.config import SpeculationConfig
from server.config import ConfigError, ServerConfig, SpeculationSettings
from server.engine_entry import EngineSpec, run_engine
from server.engine_process import EngineLauncher, SpawnLauncher
from server.machine import detect_kv_memory, detect_threads, format_bytes
from server.model_catalog import find_registered
from server.model_store import ModelStore
from server.output_format import OutputFormat, output_format
from server.prompt import PromptRenderer
from server.sources.errors import StoreError
from server.tokenizer import Tokenizer
from server.tool_parsers import registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadableModel:
    """`max_model_len` in tokens, `created` in Unix seconds; the rest as in `ServedModel`."""

    name: str
    launcher: EngineLauncher
    tokenizer: Tokenizer
    renderer: PromptRenderer
    config: ModelConfig
    max_model_len: int
    created: int
    quantization: str = "unknown"
    aliases: tuple[str, ...] = ()
    output_format: OutputFormat = OutputFormat()
    schema_in_prompt: bool = True
    folder: Path | None = None


def from_bundle(folder: Path, config: ServerConfig) -> LoadableModel:
    """Open a bundle.

    Raises:
        BundleError: the folder is not a usable bundle.
        ConfigError: the configuration asks for more than the model can do.
    """
    bundle = Bundle.open(folder)
    model = bundle.config
    tokenizer = Tokenizer.from_file(
        bundle.tokenizer_path, bos_token_id=model.bos_token_id, add_bos=model.add_bos
    )
    written = _output_format(bundle, config)
    renderer = PromptRenderer(
        bundle.chat_template,
        tokenizer,
        _special_tokens(model, tokenizer),
        registry.find_family(written.tool_parser).template_call_id,
    )
    if not renderer.uses_tools and bundle.name not in config.models.tool_parsers:
        # The model is taught to call by our own prompt, in our own format.
        written = replace(written, tool_parser=registry.GENERIC)
    return LoadableModel(
        name=bundle.name,
        launcher=SpawnLauncher(partial(run_engine, spec=engine_spec(folder, config)), bundle.name),
        tokenizer=tokenizer,
        renderer=renderer,
        config=model,
        max_model_len=_max_model_len(bundle, config),
        created=int((folder / MANIFEST_FILE).stat().st_mtime),
        quantization=bundle.summary.quantization,
        aliases=aliases_of(bundle.name, config.models.aliases),
        output_format=written,
        schema_in_prompt=config.models.schema_in_prompt,
        folder=folder,
    )


def engine_spec(folder: Path, config: ServerConfig) -> EngineSpec:
    """What the engine process is told; what is "auto" is detected here and its reason logged."""
    engine, scheduler = config.engine, config.scheduler
    return EngineSpec(
        bundle=folder,
        device=engine.device,
        num_threads=num_threads(engine.threads),
        kv_memory_bytes=_kv_memory_bytes(engine.kv_memory, len(config.models.model)),
        kv_format=engine.kv_format,
        max_model_len=engine.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        aging_s=scheduler.aging_s,
        enable_prefix_caching=scheduler.enable_prefix_caching,
        log_level=config.server.log_level,
        npu=NpuSettings(**asdict(config.npu)),
        speculation=_speculation(folder, config.speculation),
    )


def _speculation(folder: Path, settings: SpeculationSettings) -> SpeculationConfig:
    """A model is named in the configuration as its bundle's folder is. Raises ConfigError."""
    draft_model = settings.draft_models.get(folder.name)
    if draft_model is None and settings.method == "draft":
        raise ConfigError(
            f'speculation.method is "draft", but speculation.draft_models names none for '
            f"{folder.name}; add one, or use auto"
        )
    draft_bundle = None if draft_model is None else _draft_bundle(draft_model)
    return SpeculationConfig(settings.method, settings.max_draft_tokens, draft_bundle)


def _draft_bundle(name_or_path: str) -> Path:
    try:
        return ModelStore().resolve(name_or_path)
    except (StoreError, ImportFailed, BundleError) as error:
        raise ConfigError(f"speculation.draft_models: {error}") from error


def _output_format(bundle: Bundle, config: ServerConfig) -> OutputFormat:
    """The configuration's names win over the registered ones, and these over the template."""
    tool_parser = config.models.tool_parsers.get(bundle.name)
    reasoning_parser = config.models.reasoning_parsers.get(bundle.name)
    if (registered := find_registered(bundle.name)) is not None:
        tool_parser = tool_parser or registered.tool_parser
        reasoning_parser = reasoning_parser or registered.reasoning_parser
    return output_format(bundle.chat_template, tool_parser, reasoning_parser)


def aliases_of(name: str, configured: Mapping[str, str]) -> tuple[str, ...]:
    """Other names of a model: those it is registered with, then those of the configuration."""
    registered = find_registered(name)
    known = registered.aliases if registered is not None and registered.name == name else ()
    ours = (alias for alias, target in configured.items() if target == name or target in known)
    return tuple(dict.fromkeys((*known, *ours)))


def num_threads(wanted: int | None) -> int:
    """Threads of an engine process; what is "auto" is detected and its reason logged."""
    if wanted is not None:
        return wanted
    detected = detect_threads()
    logger.info("threads: %d (auto: %s)", detected.value, detected.reason)
    return detected.value


def _kv_memory_bytes(wanted: int | None, num_models: int) -> int:
    if wanted is not None:
        return wanted
    detected = detect_kv_memory(num_models)
    logger.info("kv_memory: %s (auto: %s)", format_bytes(detected.value), detected.reason)
    return detected.value


def _max_model_len(bundle: Bundle, config: ServerConfig) -> int:
    made_for, wanted = bundle.config.context_length, config.engine.max_model_len
    if wanted is not None and wanted > made_for:
        raise ConfigError(
            f"max_model_len is {wanted}, but {bundle.name} was made for {made_for} tokens; "
            f"use at most {made_for}, or auto"
        )
    return wanted or made_for


def _special_tokens(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """The variables that chat templates use. The first end token is the model's own one."""
    end = model.eos_token_ids[0] if model.eos_token_ids else None
    return {
        "bos_token": tokenizer.token_text(model.bos_token_id),
        "eos_token": tokenizer.token_text(end),
    }
