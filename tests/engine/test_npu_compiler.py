"""The compiling process: what it leaves, how its failures read, and that nothing is done twice."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from engine.bundle import Bundle
from engine.errors import CompileFailed, ContextRejected
from engine.export.import_lock import own_identity
from engine.npu.compile_task import CompileTask, decode_task, encode_task
from engine.npu.compiler import CHILD, LOCK_FILE, CompileReport, compile_missing
from engine.npu.context_store import ContextStore, GroupState
from engine.npu.device_config import load_device
from engine.npu.device_contexts import context_store
from engine.npu.graphs import NpuGraphs
from engine.npu.qnn_session import QnnOptions, open_context, open_graph, run_once
from engine.npu.recipe import ContextRecipe, GraphId, plan_groups
from tests import fake_compiler
from tests.engine.test_qnn_target import run_on_cpu
from tests.tiny_model import import_tiny_model

RECIPE = ContextRecipe(88, "2.7.0", "2.51.0", "d" * 64, (("vtcm_mb", "8"),), shared=True)
GROUPS = plan_groups(("segment_000", "segment_001", "head"), (1, 8), "head", (1,))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """One of this module's own: contexts are written into it."""
    return import_tiny_model(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def store(bundle: Bundle) -> ContextStore:
    store = ContextStore(bundle, RECIPE, GROUPS)
    store.clear()
    return store


def child(mode: str) -> list[str]:
    return [sys.executable, fake_compiler.__file__, mode]


def test_a_task_crosses_the_pipe_unchanged() -> None:
    task = CompileTask(Path("/a bundle"), RECIPE, GROUPS, background=True)
    assert decode_task(encode_task(task)) == task


def test_all_groups_are_compiled_and_progress_counts_graphs(store: ContextStore) -> None:
    seen: list[tuple[int, int]] = []
    report = compile_missing(
        store, lambda done, total, what: seen.append((done, total)), child=child("good")
    )
    assert store.invalid() == ()
    assert seen == sorted(seen) and seen[0] == (0, 5) and seen[-1] == (5, 5)
    assert [*report.seconds] == [graph.name for group in GROUPS for graph in group.graphs]
    assert [*report.num_bytes] == ["segment_000", "segment_001", "head"]
    assert not (store.folder / LOCK_FILE).exists()


def test_what_is_valid_is_left_alone_and_what_is_damaged_made_again(store: ContextStore) -> None:
    compile_missing(store, child=child("good"))
    assert compile_missing(store, child=child("refuse")) == CompileReport()
    (store.folder / "segment_001" / "segment_001_t1_ctx_qnn.bin").write_bytes(b"damaged")
    report = compile_missing(store, child=child("good"))
    assert [*report.num_bytes] == ["segment_001"] and store.invalid() == ()


def test_all_is_made_again_when_asked(store: ContextStore) -> None:
    compile_missing(store, child=child("good"))
    report = compile_missing(store, again=True, background=True, child=child("good"))
    assert [*report.num_bytes] == ["segment_000", "segment_001", "head"]
    assert store.invalid() == ()


def test_contexts_of_another_provider_are_made_again(store: ContextStore) -> None:
    compile_missing(store, child=child("good"))
    newer = ContextStore(store.bundle, replace(RECIPE, provider="2.7.1"), GROUPS)
    assert [check.state for check in newer.checks()] == [GroupState.OUTDATED] * 3
    compile_missing(newer, child=child("good"))
    assert newer.invalid() == () and store.invalid() == GROUPS


def test_a_reason_that_the_compiler_gives_is_the_error(store: ContextStore) -> None:
    with pytest.raises(CompileFailed, match="^segment_000_t1: the provider refuses MatMulNBits$"):
        compile_missing(store, child=child("refuse"))
    assert not (store.folder / LOCK_FILE).exists()


def test_a_compiler_that_dies_again_and_again_is_an_error_that_names_the_graph(
    store: ContextStore,
) -> None:
    with pytest.raises(CompileFailed) as caught:
        compile_missing(store, child=child("die"))
    message = str(caught.value)
    assert "compiling segment_000_t8 for the chip 88" in message and "\n" not in message
    assert "terminate called" in message
    assert sys.platform == "win32" or "died of SIGABRT" in message


def test_a_compiler_that_dies_once_goes_on_where_it_was(store: ContextStore) -> None:
    store.folder.mkdir(parents=True, exist_ok=True)
    compile_missing(store, child=child("die-once"))
    assert store.invalid() == ()


def test_a_compiler_that_says_it_is_done_and_is_not_is_not_believed(store: ContextStore) -> None:
    with pytest.raises(CompileFailed, match="segment_000 was compiled and is missing"):
        compile_missing(store, child=child("lie"))


def test_a_second_compiler_waits_and_finds_everything_done(store: ContextStore) -> None:
    store.folder.mkdir(parents=True, exist_ok=True)
    lock = store.folder / LOCK_FILE
    lock.write_text(own_identity(), "ascii")
    waiting, reports = threading.Event(), list[CompileReport]()

    def wait() -> None:
        reports.append(compile_missing(store, lambda *_: waiting.set(), child=child("refuse")))

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(30)
    for group in GROUPS:
        folder = store.partial_folder(group)
        fake_compiler.write_contexts(folder, group)
        store.publish(group, folder)
    lock.unlink()
    thread.join(30)
    assert reports == [CompileReport()]


def test_the_compiling_process_does_not_outlive_who_started_it(store: ContextStore) -> None:
    task = encode_task(CompileTask(store.bundle.path, RECIPE, GROUPS))
    done = subprocess.run(CHILD, input=task, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and '"group"' not in done.stdout
    assert store.invalid() == GROUPS


@pytest.mark.npu
def test_real_contexts_give_what_the_graphs_give_and_no_other_chip_takes_them(
    bundle: Bundle,
) -> None:
    store = context_store(bundle, load_device("emulated"))
    compile_missing(store)
    assert store.invalid() == ()
    graphs, options = NpuGraphs.of(bundle.config, bundle.path), QnnOptions(88, emulated=True)
    graph = GraphId("segment_001", 32)
    model = graphs.model("segment_001", 32)
    inputs, _ = run_on_cpu(model, bundle.path)
    compiled = run_once(open_context(store.path(graph), options, shared=False), inputs)
    at_once = run_once(open_graph(model, "segment_001", options, bundle.path), inputs)
    assert compiled.keys() == at_once.keys()
    assert all((compiled[name] == at_once[name]).all() for name in compiled)
    with pytest.raises(ContextRejected, match="segment_001_t32"):
        open_context(store.path(graph), replace(options, soc_model=60), shared=False)


@pytest.mark.npu
@pytest.mark.parametrize("device", ["x_elite", "x2_elite"])
def test_for_a_device_the_buckets_of_a_segment_share_one_binary(
    bundle: Bundle, device: str
) -> None:
    config = load_device(device)
    store = context_store(bundle, config.with_buckets((1, 8), (1, 8)))
    compile_missing(store)
    assert store.folder.name.startswith(f"{config.soc_model}-2.")
    assert [check.state for check in store.checks()] == [GroupState.VALID] * 4
    for group in store.groups:
        binaries = [*(store.folder / group.name).glob("*.bin")]
        assert [path.name for path in binaries] == [f"{group.graphs[0].name}_ctx_qnn.bin"]
    models = [store.path(graph) for group in store.groups for graph in group.graphs]
    assert len({graph_name(path) for path in models}) == len(models) == store.num_graphs
    with pytest.raises(ContextRejected, match="the emulator cannot open"):
        open_context(
            store.path(GraphId("head", 1)), QnnOptions(config.soc_model, emulated=True), shared=True
        )


def graph_name(path: Path) -> str:
    """QNN's. A process that opens two of the same name takes one for the other."""
    (node,) = onnx.load(path).graph.node
    name = next(part.s for part in node.attribute if part.name == "partition_name")
    return str(name.decode())


@pytest.mark.npu
def test_the_providers_refusal_reaches_the_caller(bundle: Bundle) -> None:
    store = context_store(bundle, load_device("emulated"))
    unknown = ContextStore(bundle, replace(store.recipe, soc_model=12345), store.groups)
    with pytest.raises(CompileFailed, match="segment_000_t1: .* does not take the chip 12345"):
        compile_missing(unknown)
