"""Which contexts may be used: whole, unchanged, and made by exactly this recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.bundle import Bundle
from engine.errors import CompileFailed
from engine.npu.context_store import (
    GROUP_FILE,
    ContextStore,
    GroupState,
    bundle_digest,
    folder_bytes,
    other_folders,
)
from engine.npu.recipe import ContextGroup, ContextRecipe, GraphId, compile_options, plan_groups
from tests.fake_compiler import write_contexts

RECIPE = ContextRecipe(88, "2.7.0", "2.51.0", "d" * 64, (("vtcm_mb", "8"),), shared=True)
GROUPS = plan_groups(("segment_000", "head"), (1, 8), "head", (1,))


@pytest.fixture
def store(tiny_bundle: Bundle, tmp_path: Path) -> ContextStore:
    bundle = replace(tiny_bundle, path=tmp_path)
    store = ContextStore(bundle, RECIPE, GROUPS)
    for group in GROUPS:
        folder = store.partial_folder(group)
        write_contexts(folder, group)
        store.publish(group, folder)
    return store


def with_recipe(store: ContextStore, recipe: ContextRecipe) -> ContextStore:
    return ContextStore(store.bundle, recipe, store.groups)


def states(store: ContextStore) -> list[GroupState]:
    return [check.state for check in store.checks()]


def test_a_group_has_a_graph_for_each_of_its_buckets() -> None:
    assert (
        ContextGroup("segment_000", (GraphId("segment_000", 1), GraphId("segment_000", 8))),
        ContextGroup("head", (GraphId("head", 1),)),
    ) == GROUPS
    assert GraphId("fused_002", 8, window=512).name == "fused_002_t8_w512"


def test_what_was_published_is_valid_and_lies_below_chip_and_version(store: ContextStore) -> None:
    assert states(store) == [GroupState.VALID, GroupState.VALID]
    assert store.invalid() == ()
    path = store.path(GraphId("segment_000", 8))
    assert path == store.bundle.path / "npu/88-2.51.0/segment_000/segment_000_t8_ctx.onnx"
    assert path.is_file()
    assert sorted(folder.name for folder in store.folder.iterdir()) == ["head", "segment_000"]
    assert store.num_present() == store.num_graphs == 3


def test_what_was_never_compiled_is_missing(store: ContextStore) -> None:
    store.clear()
    assert states(store) == [GroupState.MISSING, GroupState.MISSING]
    assert store.invalid() == GROUPS and store.num_present() == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replace(RECIPE, provider="2.6.0"), "made with provider 2.7.0 instead of 2.6.0"),
        (replace(RECIPE, bundle="e" * 64), f"made with bundle {'d' * 40} instead of {'e' * 40}"),
        (replace(RECIPE, options=()), "made with options [['vtcm_mb', '8']] instead of []"),
    ],
)
def test_contexts_of_another_recipe_are_outdated(
    store: ContextStore, change: ContextRecipe, reason: str
) -> None:
    check = with_recipe(store, change).check(GROUPS[0])
    assert (check.state, check.reason) == (GroupState.OUTDATED, reason)


@pytest.mark.parametrize("change", [{"soc_model": 60}, {"qairt": "2.50.0"}, {"shared": False}])
def test_contexts_of_another_chip_version_or_kind_lie_elsewhere(
    store: ContextStore, change: dict[str, int]
) -> None:
    other = with_recipe(store, replace(RECIPE, **change))  # type: ignore[arg-type]
    assert states(other) == [GroupState.MISSING, GroupState.MISSING]


def test_other_versions_for_the_same_chip_are_found(store: ContextStore) -> None:
    newer = replace(RECIPE, qairt="2.52.0")
    assert other_folders(store.bundle, newer) == (store.folder,)
    assert other_folders(store.bundle, RECIPE) == ()
    assert other_folders(store.bundle, replace(newer, soc_model=60)) == ()
    assert folder_bytes(store.folder) > 2000


@pytest.mark.parametrize("buckets", [(8,), (1, 8, 32), (8, 1)])
def test_contexts_for_other_buckets_are_outdated(
    store: ContextStore, buckets: tuple[int, ...]
) -> None:
    other = plan_groups(("segment_000",), buckets, "head", (1,))
    (check,) = ContextStore(store.bundle, RECIPE, other).checks()
    assert check.state is GroupState.OUTDATED
    assert check.reason == "made for segment_000_t1, segment_000_t8"


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_bit, "has changed"),
        (Path.unlink, "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes instead of"),
    ],
    ids=["bit", "gone", "short"],
)
@pytest.mark.parametrize("name", ["segment_000_t1_ctx_qnn.bin", "segment_000_t8_ctx.onnx"])
def test_a_file_that_is_not_as_it_was_written_is_damage(
    store: ContextStore, name: str, damage: Callable[[Path], None], reason: str
) -> None:
    damage(store.folder / "segment_000" / name)
    check = store.check(GROUPS[0])
    assert check.state is GroupState.DAMAGED
    assert check.reason.startswith(name) and reason in check.reason
    assert store.invalid() == (GROUPS[0],)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "{}", '{"format": 1}', '{"format": 1, "graphs": 3, "recipe": 1}', "\xff"],
)
def test_a_record_that_is_not_one_of_ours_is_damage(store: ContextStore, text: str) -> None:
    (store.folder / "head" / GROUP_FILE).write_text(text, "latin-1")
    assert store.check(GROUPS[1]).state is GroupState.DAMAGED


def test_a_record_names_no_file_outside_its_folder(store: ContextStore, tmp_path: Path) -> None:
    record_path = store.folder / "head" / GROUP_FILE
    record = json.loads(record_path.read_text())
    record["files"][0]["name"] = f"../../../{tmp_path.name}"
    record_path.write_text(json.dumps(record))
    assert store.check(GROUPS[1]).reason == f"{tmp_path.name} is missing"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op_type": "MatMulNBits"}, "holds more than one compiled node: MatMulNBits"),
        ({"qairt": "2.50.1"}, "was compiled by QAIRT 'v2.50.1.260929181845', not 2.51.0"),
    ],
)
def test_a_model_that_is_no_context_is_not_published(
    store: ContextStore, changes: dict[str, str], message: str
) -> None:
    folder = store.partial_folder(GROUPS[0])
    write_contexts(folder, GROUPS[0], **changes)
    with pytest.raises(CompileFailed, match=message):
        store.publish(GROUPS[0], folder)
    assert states(store) == [GroupState.VALID, GroupState.VALID]


def test_a_model_without_its_binary_is_not_published(store: ContextStore) -> None:
    folder = store.partial_folder(GROUPS[1])
    write_contexts(folder, GROUPS[1])
    (folder / "head_t1_ctx_qnn.bin").unlink()
    with pytest.raises(CompileFailed, match="which is not beside it"):
        store.publish(GROUPS[1], folder)


def test_publishing_again_replaces_what_was_there(store: ContextStore) -> None:
    flip_a_bit(store.folder / "head" / "head_t1_ctx_qnn.bin")
    folder = store.partial_folder(GROUPS[1])
    write_contexts(folder, GROUPS[1])
    store.publish(GROUPS[1], folder)
    assert states(store) == [GroupState.VALID, GroupState.VALID]


def test_only_options_that_change_what_is_compiled_belong_to_a_recipe() -> None:
    options = {"vtcm_mb": "8", "rpc_control_latency": "100", "extended_udma": "1"}
    assert compile_options(options) == (("extended_udma", "1"), ("vtcm_mb", "8"))


def test_two_imports_of_one_source_have_the_same_digest(tiny_bundle: Bundle) -> None:
    manifest = tiny_bundle.manifest
    moved = replace(manifest, source=replace(manifest.source, path="elsewhere", modified_ns=1))
    other = replace(manifest, source=replace(manifest.source, sha256="0" * 64))
    digest = bundle_digest(tiny_bundle)
    assert bundle_digest(replace(tiny_bundle, manifest=moved)) == digest
    assert bundle_digest(replace(tiny_bundle, manifest=other)) != digest
