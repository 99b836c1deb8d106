"""`hexlm doctor`: rules over recorded machines, probes of this one, and the verb."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from engine.npu.recipe import UNSHARED
from server.cli.main import run
from server.doctor.facts import (
    CacheFacts,
    ContextFacts,
    Facts,
    MachineFacts,
    ModelFacts,
    PortFacts,
    ProviderFacts,
)
from server.doctor.findings import Finding, Level, examine, has_problem
from server.doctor.probes import (
    ask_provider,
    cache_facts,
    model_facts,
    plain_arch,
    port_holder,
    read_facts,
)
from server.model_store import ModelStore, describe
from tests.tiny_model import import_tiny_model

GIB = 1024**3
X2_ELITE = Facts(
    version="0.1.0",
    machine=MachineFacts(
        system="Windows",
        machine_arch="arm64",
        python_arch="arm64",
        python_version="3.13.2",
        chip="Snapdragon(R) X2 Elite - X2E88100 - Qualcomm(R) Oryon(TM) CPU",
        device="x2_elite",
        soc_model=88,
        glibc="",
        memory_bytes=32 * GIB,
        available_bytes=24 * GIB,
        on_battery=False,
    ),
    provider=ProviderFacts(
        onnxruntime="1.32.0",
        provider="2.7.0",
        qairt="2.51.0",
        npu_found=True,
        finding="the QNN provider lists a Hexagon NPU",
        crash=None,
        driver_name="Snapdragon(R) X2 Elite - Hexagon(TM) NPU",
        driver_version="30.0.220.3000",
        driver_problem=None,
        device_node="",
        device_node_usable=False,
        others=(),
    ),
    cache=CacheFacts(r"C:\Users\kim\AppData\Local\hexlm", True, True, True, 100 * GIB, True),
    models=(
        ModelFacts(
            name="qwen3-4b",
            problem=None,
            writes_text=True,
            weight_bytes=3 * GIB,
            kv_bytes_per_token=74_000,
            context_length=32_768,
            contexts=(ContextFacts(r"C:\npu\88-2.51.0", "x2_elite", 3 * GIB, {"valid": 38}, ""),),
        ),
    ),
    port=PortFacts("127.0.0.1", 8000, None),
)
"""Everything is as it should be."""

X86 = replace(
    X2_ELITE,
    machine=replace(
        X2_ELITE.machine,
        system="Linux",
        machine_arch="x86_64",
        python_arch="x86_64",
        chip="AMD EPYC",
        device=None,
        soc_model=None,
        glibc="2.36",
        on_battery=None,
    ),
    provider=replace(
        X2_ELITE.provider,
        npu_found=False,
        finding="the QNN provider lists no Hexagon NPU on this machine",
        driver_name=None,
        driver_version=None,
    ),
)


def with_machine(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, machine=replace(facts.machine, **changes))


def with_provider(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, provider=replace(facts.provider, **changes))


def with_model(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, models=(replace(facts.models[0], **changes),))


def wrong(facts: Facts) -> list[Finding]:
    return [f for f in examine(facts) if f.level in (Level.WARNING, Level.PROBLEM)]


def only(facts: Facts, level: Level) -> Finding:
    (finding,) = wrong(facts)
    assert finding.level is level
    assert finding.fix and "\n" not in finding.message + finding.fix
    return finding


@pytest.mark.parametrize("facts", [X2_ELITE, X86], ids=["x2 elite", "x86"])
def test_a_machine_that_is_well_has_nothing_to_mend(facts: Facts) -> None:
    assert wrong(facts) == []
    assert not has_problem(examine(facts))


def test_a_healthy_report_names_chip_driver_versions_and_contexts() -> None:
    text = " ".join(finding.message for finding in examine(X2_ELITE))
    for part in ("x2_elite, soc 88", "30.0.220.3000", "QAIRT 2.51.0", "native", "are valid"):
        assert part in text


def test_a_python_for_x64_on_windows_on_arm_is_a_problem() -> None:
    finding = only(with_machine(X2_ELITE, python_arch="x86_64"), Level.PROBLEM)
    assert "emulated" in finding.message and "ARM64" in finding.fix


def test_python_3_11_has_no_numba_on_windows_on_arm_and_is_fine_elsewhere() -> None:
    assert "numba" in only(with_machine(X2_ELITE, python_version="3.11.9"), Level.PROBLEM).message
    assert wrong(with_machine(X86, python_version="3.11.9")) == []


@pytest.mark.parametrize(
    ("changes", "message", "fix"),
    [
        (
            {"npu_found": False, "finding": "the provider lists none"},
            "although this chip",
            "driver",
        ),
        ({"driver_problem": "driver too old"}, "driver too old", "Windows Update"),
        ({"crash": "exit code -11"}, "ends the process", "--device cpu"),
        ({"provider": None}, "not installed", "hexlm[npu]"),
        ({"provider": "2.6.1"}, "issue 858", "hexlm[npu]"),
        ({"provider": "2.5.0"}, "error 1002", "hexlm[npu]"),
        ({"provider": "1.24.4"}, "lacks operators", "hexlm[npu]"),
        ({"onnxruntime": "1.31.1"}, "needs 1.32", "pip install"),
        ({"onnxruntime": None}, "not installed", "pip install"),
        ({"others": ("onnxruntime-directml",)}, "the same folder", "pip uninstall"),
    ],
)
def test_what_keeps_the_npu_from_working_is_a_problem(
    changes: dict[str, object], message: str, fix: str
) -> None:
    finding = only(with_provider(X2_ELITE, **changes), Level.PROBLEM)
    assert message in finding.message and fix in finding.fix


@pytest.mark.parametrize("changes", [{"provider": None}, {"crash": "exit code -11"}])
def test_without_a_snapdragon_the_npu_is_nobodys_problem(changes: dict[str, object]) -> None:
    assert not has_problem(examine(with_provider(X86, **changes)))


def test_a_snapdragon_without_a_device_file_is_told_how_to_get_one() -> None:
    facts = with_machine(X2_ELITE, chip="Snapdragon(R) X9 Qualcomm", device=None, soc_model=None)
    assert "soc_model" in only(facts, Level.WARNING).fix


def test_an_npu_that_linux_does_not_let_us_open_is_a_problem() -> None:
    linux = with_machine(X2_ELITE, system="Linux")
    facts = with_provider(linux, device_node="/dev/fastrpc-cdsp", device_node_usable=False)
    assert "/dev/fastrpc-cdsp" in only(facts, Level.PROBLEM).message
    assert wrong(with_provider(facts, device_node_usable=True)) == []


def test_an_old_glibc_is_told_where_the_provider_cannot_be_installed() -> None:
    facts = with_provider(with_machine(X86, glibc="2.31"), provider=None)
    assert "glibc 2.35" in next(f for f in examine(facts) if f.topic == "provider").message


@pytest.mark.parametrize(
    ("memory", "level"), [(2, Level.PROBLEM), (20, Level.WARNING), (25, Level.INFO)]
)
def test_a_model_is_measured_against_memory(memory: int, level: Level) -> None:
    facts = with_machine(
        with_model(X2_ELITE, weight_bytes=21 * GIB, kv_bytes_per_token=400_000),
        memory_bytes=32 * GIB if memory > 2 else 16 * GIB,
        available_bytes=memory * GIB,
    )
    (finding,) = [f for f in examine(facts) if f.topic == "qwen3-4b" and "memory" in f.message]
    assert finding.level is level and "21.0 GiB of weights" in finding.message


def test_a_damaged_model_is_a_problem() -> None:
    finding = only(with_model(X2_ELITE, problem="it has no readable model.json"), Level.PROBLEM)
    assert finding.fix == "hexlm pull qwen3-4b --force"


@pytest.mark.parametrize("state", ["outdated", "damaged", "missing"])
def test_contexts_that_cannot_be_used_are_a_warning(state: str) -> None:
    contexts = ContextFacts("npu", "x2_elite", 9, {"valid": 30, state: 2}, "head: has changed")
    finding = only(with_model(X2_ELITE, contexts=(contexts,)), Level.WARNING)
    assert f"2 {state} of 32 (head: has changed)" in finding.message
    assert finding.fix == "hexlm compile qwen3-4b --device x2_elite"


def test_contexts_of_another_version_are_a_warning_and_none_at_all_are_not() -> None:
    old = ContextFacts("npu/88-2.50.0", None, 9, {}, "")
    contexts = (*X2_ELITE.models[0].contexts, old)
    assert (
        only(with_model(X2_ELITE, contexts=contexts), Level.WARNING).fix == "delete npu/88-2.50.0"
    )
    none = examine(with_model(X2_ELITE, contexts=()))
    assert any(f.fix == "hexlm compile qwen3-4b" and f.level is Level.INFO for f in none)


@pytest.mark.parametrize(
    ("changes", "level", "message"),
    [
        ({"is_writable": False}, Level.PROBLEM, "cannot be written"),
        ({"is_private": False}, Level.WARNING, "loaded as code"),
        ({"free_bytes": GIB}, Level.WARNING, "1.0 GiB free"),
        ({"path": "C:\\" + "long" * 50}, Level.WARNING, "characters long"),
    ],
)
def test_the_cache_folder_is_looked_at(changes: dict[str, Any], level: Level, message: str) -> None:
    assert (
        message in only(replace(X2_ELITE, cache=replace(X2_ELITE.cache, **changes)), level).message
    )


def test_a_port_that_is_taken_is_a_warning_with_the_next_one() -> None:
    facts = replace(X2_ELITE, port=PortFacts("127.0.0.1", 8000, "process 7 (python)"))
    finding = only(facts, Level.WARNING)
    assert "process 7 (python)" in finding.message and "--port 8001" in finding.fix


def test_every_architecture_has_one_name() -> None:
    assert [plain_arch(name) for name in ("AMD64", "x86_64", "ARM64", "aarch64", "win32")] == [
        "x86_64",
        "x86_64",
        "arm64",
        "arm64",
        "win32",
    ]


def test_a_listening_port_has_a_holder_and_a_free_one_has_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_holder("127.0.0.1", port) is not None
    assert port_holder("127.0.0.1", port) is None


@pytest.mark.parametrize(
    ("script", "crash"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("print('no json')", "exit code 0"),
        ("print('{\"npu_found\": true}')", None),
    ],
)
def test_a_provider_that_ends_its_process_is_a_fact(script: str, crash: str | None) -> None:
    answer, how = ask_provider([sys.executable, "-c", script])
    assert how == crash and (answer == {"npu_found": True}) == (crash is None)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no mode bits")
def test_a_cache_that_others_may_write_is_not_private(tmp_path: Path) -> None:
    assert cache_facts(tmp_path).is_private
    tmp_path.chmod(0o777)
    assert not cache_facts(tmp_path).is_private
    assert not cache_facts(tmp_path / "not" / "there").exists


def test_a_model_is_described_with_all_its_folders_of_contexts(tmp_path: Path) -> None:
    bundle = import_tiny_model(tmp_path)
    (bundle.path / "npu" / f"88-1.0.0{UNSHARED}").mkdir(parents=True)
    facts = model_facts(describe(bundle.path))
    assert facts.writes_text and facts.problem is None
    assert facts.weight_bytes == bundle.weights_path.stat().st_size
    assert [(c.device, c.num_bytes) for c in facts.contexts] == [(None, 0)]
    bundle.weights_path.unlink()
    assert "weights.bin" in (model_facts(describe(bundle.path)).problem or "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    (tmp_path / "hexlm" / "models").mkdir(parents=True)
    return tmp_path / "hexlm"


def test_the_facts_of_this_machine_can_be_read(cache: Path) -> None:
    facts = read_facts(ModelStore(), "127.0.0.1", 0)
    assert facts.machine.memory_bytes > facts.machine.available_bytes > 0
    assert facts.provider.onnxruntime is not None and facts.provider.crash is None
    assert facts.models == () and facts.port.holder is None
    assert facts.cache.path == str(cache) and facts.cache.is_writable


def test_the_verb_prints_findings_with_their_fixes_and_its_code_tells_of_problems(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache / "models" / "broken").mkdir()
    assert run(["doctor", "--port", "0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (number,) = [i for i, line in enumerate(lines) if line.startswith("problem  broken: ")]
    assert lines[number + 1] == "         fix: hexlm pull broken --force"


def test_the_verb_speaks_json(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json", "--port", "0"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert {"level", "topic", "message", "fix"} == set(document["findings"][0])
    assert document["facts"]["machine"]["python_version"].startswith("3.")


def test_a_crash_of_the_provider_is_no_crash_of_the_doctor() -> None:
    assert has_problem(examine(with_provider(X2_ELITE, crash="exit code -11", npu_found=False)))
