"""The tiles for machines that the tests do not run on: they compile, to the instruction meant."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from engine.kernels.panel_matrix import PANEL_FORMS, PanelForm
from engine.kernels.panel_simd import emit_tile
from engine.kernels.simd import Emitter

TARGETS = {
    "i8mm": ("aarch64-pc-windows-msvc", "+neon,+fullfp16,+dotprod,+i8mm", "usdot"),
    "avxvnni": ("x86_64-pc-windows-msvc", "+avx2,+fma,+f16c,+avxvnni", "vpdpbusd"),
    "avx512vnni": ("x86_64-unknown-linux-gnu", "+avx512f,+avx512bw,+avx512vnni", "vpdpbusd"),
    "none": ("aarch64-unknown-linux-gnu", "+neon", "mla"),
}
NUM_ADDRESSES = 9


@pytest.fixture(scope="module", autouse=True)
def all_targets() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def assembly(kind: str, form: PanelForm, num_rows: int) -> str:
    triple, features, _ = TARGETS[kind]
    module = ir.Module()
    module.triple = triple
    signature = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * NUM_ADDRESSES)
    function = ir.Function(module, signature, "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    emit_tile(Emitter(builder), num_rows, form, kind, *function.args)
    builder.ret_void()
    target: Any = llvm.Target.from_triple(triple)
    machine = target.create_target_machine(features=features, opt=2)
    return str(machine.emit_assembly(llvm.parse_assembly(str(module))))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("form", PANEL_FORMS, ids=lambda form: f"{form.bits}-{form.kind}")
def test_a_tile_compiles_to_the_dot_product_of_its_machine(kind: str, form: PanelForm) -> None:
    assert TARGETS[kind][2] in assembly(kind, form, num_rows=2)
