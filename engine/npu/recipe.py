"""What compiled contexts are made of, as plain values: graphs, groups of graphs, and the recipe.

A context is used only where its whole recipe is what would be used today. Pure; knows neither
files nor the provider.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

# Provider options that change what is compiled. The others (clocks, priorities, allocators) are
# for sessions, and some of them are refused on a machine without an NPU.
COMPILE_OPTIONS = frozenset(
    {
        "vtcm_mb",
        "extended_udma",
        "enable_htp_fp16_precision",
        "enable_htp_fp16_clamp_overflow",
        "enable_htp_spill_fill_buffer",
        "htp_graph_finalization_optimization_mode",
        "op_affinity",
    }
)

UNSHARED = "-unshared"
"""Ends the name of a folder of contexts for the emulator."""


@dataclass(frozen=True, slots=True)
class GraphId:
    """`part` of the model for `num_tokens` tokens; `window` earlier ones if attention is inside."""

    part: str
    num_tokens: int
    window: int = 0

    @property
    def name(self) -> str:
        window = f"_w{self.window}" if self.window else ""
        return f"{self.part}_t{self.num_tokens}{window}"


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Graphs over the same weights: compiled together, published together, one folder."""

    name: str
    graphs: tuple[GraphId, ...]


@dataclass(frozen=True, slots=True)
class ContextRecipe:
    """`provider` and `qairt` are versions, `bundle` the digest of what the weights come from.

    `options` are pairs in order. `shared`: the graphs of a group share one binary and its weights;
    every device wants that, the emulator cannot open it.
    """

    soc_model: int
    provider: str
    qairt: str
    bundle: str
    options: tuple[tuple[str, str], ...]
    shared: bool

    @property
    def folder_name(self) -> str:
        return f"{self.soc_model}-{self.qairt}" + ("" if self.shared else UNSHARED)


def compile_options(options: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The ones that belong to a recipe."""
    return tuple(sorted((key, options[key]) for key in COMPILE_OPTIONS & set(options)))


def plan_groups(
    parts: Sequence[str], token_buckets: Sequence[int], head: str, head_buckets: Sequence[int]
) -> tuple[ContextGroup, ...]:
    """One group per part. A group of all parts would be 1 % smaller and need twice the memory."""
    return tuple(
        ContextGroup(
            part,
            tuple(GraphId(part, n) for n in (head_buckets if part == head else token_buckets)),
        )
        for part in parts
    )


def differing(ours: ContextRecipe, theirs: Mapping[str, object]) -> str | None:
    """How a recipe that was read from JSON differs, in words; None if it is the same."""
    for key, value in json.loads(json.dumps(asdict(ours))).items():
        if theirs.get(key) != value:
            return f"made with {key} {_short(theirs.get(key))} instead of {_short(value)}"
    return None


def _short(value: object) -> str:
    return str(value)[:40]
