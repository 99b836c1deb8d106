"""`hexlm show`: the numbers of a model that is here, and what its KV cache costs per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from server.cli.list import table_console

if TYPE_CHECKING:
    from engine.architectures.config import ModelConfig
    from engine.architectures.encoder import EncoderConfig
    from engine.bundle import Bundle
    from server.bench.kv_use import KvUse
    from server.bench.model_cost import ModelCost
    from server.machine import Detected


def show(
    model: Annotated[str, typer.Argument(help="The name of a model that is here.")],
    memory: Annotated[
        bool, typer.Option("--memory", help="Show what weights, keys and values take instead.")
    ] = False,
) -> None:
    """Show the numbers of a model."""
    from server.model_store import ModelStore

    bundle = ModelStore().open(model)
    if memory:
        show_memory(bundle)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in describe(bundle):
        table.add_row(label, escape(value))
    table_console().print(table)


def show_memory(bundle: Bundle) -> None:
    """With the memory that a server would give to keys and values now. Raises BundleError."""
    from server.bench.kv_use import contexts_up_to, kv_uses
    from server.bench.model_cost import model_cost
    from server.machine import detect_kv_memory

    budget, cost = detect_kv_memory(), model_cost(bundle)
    console = table_console()
    for line in memory_lines(bundle.config, cost, budget):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    uses = kv_uses(bundle.config, contexts_up_to(bundle.config.context_length), budget.value)
    console.print(memory_table(uses, cost.weight_bytes))


def memory_lines(config: ModelConfig, cost: ModelCost, budget: Detected) -> list[str]:
    """The formula with the model's numbers, for every format."""
    from engine.kv_format import BLOCK_SIZE, KV_FORMATS
    from server.machine import format_bytes

    heads = f"{config.num_layers} layers x {config.num_kv_heads} heads"
    formulas = []
    for name, each in KV_FORMATS.items():
        size = each.padded_size(config.head_size)
        parts = f"{each.keys.num_bytes(size)} of keys + {each.values.num_bytes(size)} of values"
        formulas.append(f"{name}: {heads} x ({parts}) = {cost.kv_bytes_per_token[name]:,} bytes")
    return [
        f"weights: {format_bytes(cost.weight_bytes)} read by a step, "
        f"{format_bytes(cost.disk_bytes)} on disk",
        f"keys and values of a token: layers x heads x bytes of a head of {config.head_size} "
        "with its scales",
        *(f"  {formula}" for formula in formulas),
        f"in blocks of {BLOCK_SIZE} tokens; a server would have {format_bytes(budget.value)} for "
        f"them ({budget.reason})",
    ]


def memory_table(uses: Sequence[KvUse], weight_bytes: int) -> Table:
    """Per context and format: bytes of a sequence, with the weights, and sequences that fit."""
    from server.machine import format_bytes

    table = Table(box=None, pad_edge=False)
    for heading in ("context", "format", "a sequence", "with the weights", "sequences that fit"):
        table.add_column(heading, justify="left" if heading == "format" else "right", no_wrap=True)
    for use in sorted(uses, key=lambda each: each.num_tokens):
        table.add_row(
            f"{use.num_tokens:,}",
            use.kv_format,
            format_bytes(use.sequence_bytes),
            format_bytes(use.sequence_bytes + weight_bytes),
            f"{use.num_fitting:,}",
        )
    return table


def describe(bundle: Bundle) -> list[tuple[str, str]]:
    """(label, value) in the order in which they are shown."""
    from engine.manifest import ModelKind

    config, summary = bundle.manifest.config, bundle.summary
    is_decoder = bundle.kind is ModelKind.GENERATION
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
        *(describe_decoder(bundle) if is_decoder else describe_encoder(bundle.encoder_config)),
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
    if config.is_cross_encoder:
        return [("gives", "scores of documents for a query")]
    return [("dimensions", f"{config.hidden_size:,}"), ("pooling", f"{config.pooling}, normalized")]


def describe_decoder(bundle: Bundle) -> list[tuple[str, str]]:
    from engine.panel_width import read_choice
    from server.bench.kv_use import kv_bytes_per_token

    config, width = bundle.config, read_choice(bundle.path)
    return [
        *([] if width is None else [("bits in memory", f"{width.bits}: {width.reason}")]),
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
