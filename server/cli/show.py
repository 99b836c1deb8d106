"""`hexlm show`: the numbers of a model that is here, and what its KV cache costs per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from server.cli.list import table_console

if TYPE_CHECKING:
    from engine.architectures.config import ModelConfig
    from engine.architectures.encoder import EncoderConfig
    from engine.bundle import Bundle

SCALE_BYTES = 4
INT4_GROUP_SIZE = 32


def show(model: Annotated[str, typer.Argument(help="The name of a model that is here.")]) -> None:
    """Show the numbers of a model."""
    from server.model_store import ModelStore

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in describe(ModelStore().open(model)):
        table.add_row(label, escape(value))
    table_console().print(table)


def describe(bundle: Bundle) -> list[tuple[str, str]]:
    """(label, value) in the order in which they are shown."""
    from engine.manifest import ModelKind

    config, summary = bundle.manifest.config, bundle.summary
    is_embedder = bundle.kind is ModelKind.EMBEDDING
    return [
        ("name", bundle.name),
        ("kind", bundle.kind),
        ("title", summary.title or "not given"),
        ("licence", summary.licence or "not given"),
        ("architecture", config.architecture),
        ("parameters", f"{summary.num_parameters:,}"),
        ("layers", f"{config.num_layers}"),
        ("hidden size", f"{config.hidden_size:,}"),
        ("heads", describe_heads(config)),
        ("head size", f"{config.head_size}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("context", f"{config.context_length:,} tokens"),
        ("quantization", f"{summary.quantization} in the file, {bundle.weight_format} here"),
        ("pre-tokenizer", summary.pre_tokenizer),
        *(describe_encoder(bundle.encoder_config) if is_embedder else describe_decoder(bundle)),
        ("size on disk", f"{bundle.num_bytes / 1e6:,.1f} MB"),
        ("source", f"{bundle.source.path} ({bundle.source.num_bytes / 1e6:,.1f} MB)"),
        ("source SHA-256", bundle.source.sha256),
        ("path", str(bundle.path)),
    ]


def describe_heads(config: ModelConfig | EncoderConfig) -> str:
    """An encoder has as many for keys and values as for queries."""
    from engine.architectures.config import ModelConfig

    num_kv_heads = config.num_kv_heads if isinstance(config, ModelConfig) else config.num_heads
    return f"{config.num_heads}, {num_kv_heads} for keys and values"


def describe_encoder(config: EncoderConfig) -> list[tuple[str, str]]:
    return [("dimensions", f"{config.hidden_size:,}"), ("pooling", f"{config.pooling}, normalized")]


def describe_decoder(bundle: Bundle) -> list[tuple[str, str]]:
    config = bundle.config
    return [
        ("BOS token", describe_bos(config)),
        ("end tokens", ", ".join(map(str, config.eos_token_ids)) or "none"),
        ("chat template", "none" if bundle.chat_template is None else "yes"),
        *(
            (f"KV cache, {name}", f"{num_bytes:,} bytes per token")
            for name, num_bytes in kv_bytes_per_token(config).items()
        ),
    ]


def describe_bos(config: ModelConfig) -> str:
    if config.bos_token_id is None:
        return "none"
    return f"{config.bos_token_id}, {'added' if config.add_bos else 'not added'} to prompts"


def kv_bytes_per_token(config: ModelConfig) -> dict[str, int]:
    """Bytes of one token's keys and values over all layers, for each format of the KV cache.

    A head has a scale of 4 bytes; in int4 each group of 32 elements has one.
    """
    head_size = config.head_size
    num_groups = -(-head_size // INT4_GROUP_SIZE)
    head_bytes = {
        "f32": 4 * head_size + SCALE_BYTES,
        "int8": head_size + SCALE_BYTES,
        "int4": head_size // 2 + SCALE_BYTES * num_groups,
    }
    num_heads = 2 * config.num_layers * config.num_kv_heads
    return {name: num_heads * num_bytes for name, num_bytes in head_bytes.items()}
