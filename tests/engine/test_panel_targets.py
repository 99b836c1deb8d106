"""The tiles for machines that the tests do not run on: they compile, to the instruction meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from engine.kernels.panel_amx import (
    emit_configure,
    emit_unpack,
    emit_wide_tile,
    has_matrix_unit,
)
from engine.kernels.panel_matrix import PANEL_FORMS, PanelForm
from engine.kernels.panel_simd import emit_tile
from engine.kernels.simd import Emitter

TARGETS = {
    "i8mm": ("aarch64-pc-windows-msvc", "+neon,+fullfp16,+dotprod,+i8mm", "usdot"),
    "avxvnni": ("x86_64-pc-windows-msvc", "+avx2,+fma,+f16c,+avxvnni", "vpdpbusd"),
    "avx512vnni": ("x86_64-unknown-linux-gnu", "+avx512f,+avx512bw,+avx512vnni", "vpdpbusd"),
    "none": ("aarch64-unknown-linux-gnu", "+neon", "mla"),
}
Emit = Callable[[Emitter, Sequence[Any]], None]


@pytest.fixture(scope="module", autouse=True)
def all_targets() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def assembly(triple: str, features: str, num_arguments: int, emit: Emit) -> str:
    """Of a function of so many int64."""
    module = ir.Module()
    module.triple = triple
    signature = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * num_arguments)
    function = ir.Function(module, signature, "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(Emitter(builder), function.args)
    builder.ret_void()
    target: Any = llvm.Target.from_triple(triple)
    machine = target.create_target_machine(features=features, opt=2)
    return str(machine.emit_assembly(llvm.parse_assembly(str(module))))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("form", PANEL_FORMS, ids=lambda form: f"{form.bits}-{form.kind}")
def test_a_tile_compiles_to_the_dot_product_of_its_machine(kind: str, form: PanelForm) -> None:
    triple, features, instruction = TARGETS[kind]

    def emit(e: Emitter, values: Sequence[Any]) -> None:
        emit_tile(e, 2, 2, form, kind, *values)

    assert instruction in assembly(triple, features, 9, emit)


@pytest.mark.parametrize("num_rows", [8, 16])
def test_a_wide_tile_compiles_to_the_matrix_unit(num_rows: int) -> None:
    def emit(e: Emitter, values: Sequence[Any]) -> None:
        emit_configure(e)
        emit_unpack(e, PANEL_FORMS[1], *values[:4])
        emit_wide_tile(e, num_rows, *values[:8])

    features = "+avx512f,+avx512bw,+amx-tile,+amx-int8"
    found = assembly("x86_64-unknown-linux-gnu", features, 8, emit)
    assert all(each in found for each in ("ldtilecfg", "tileloadd", "tdpbsud", "tilestored"))


def test_a_matrix_unit_that_the_machine_does_not_tell_of_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"amx-tile": True})
    has_matrix_unit.cache_clear()
    assert not has_matrix_unit()
    has_matrix_unit.cache_clear()
