"""What the tests share: compiled kernels on disk, a tiny random model, and the real small one."""

from __future__ import annotations

import platform
import sys

import pytest

from engine.bundle import Bundle
from engine.errors import BundleError
from engine.kernels import kernel_cache
from engine.npu.qnn_session import find_emulator
from server.model_store import ModelStore
from server.sources.errors import StoreError
from tests.tiny_model import import_tiny_model

REAL_MODEL = "smollm2-135m-instruct"
NO_EMULATOR = "no HTP emulator"


@pytest.fixture(scope="session")
def kernels() -> None:
    """Kernels come from, and go to, the folder that the program itself uses."""
    kernel_cache.use_kernel_cache(kernel_cache.default_folder())


@pytest.fixture(scope="session")
def tiny_bundle(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return import_tiny_model(tmp_path_factory.mktemp("tiny"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("npu") is not None:
        need_emulator()


@pytest.fixture(scope="session")
def emulator() -> None:
    """The HTP emulator, for tests that need it and a fixture to say so."""
    need_emulator()


def need_emulator() -> None:
    """Where there is no wheel with the HTP's emulator, its tests are skipped, and the summary says
    so; where there is one and it is not installed, that is a failure."""
    found, finding = find_emulator()
    if not found and can_install_emulator():
        pytest.fail(f"tests of the NPU need the HTP's emulator: {finding}", pytrace=False)
    if not found:
        pytest.skip(f"{NO_EMULATOR}: {finding}")


def can_install_emulator() -> bool:
    """onnxruntime-qnn has it in the wheel for x86-64 Linux with glibc 2.35 or later."""
    library, version = platform.libc_ver()
    glibc = tuple(int(part) for part in version.split(".")[:2]) if library == "glibc" else (0, 0)
    return (sys.platform, platform.machine()) == ("linux", "x86_64") and glibc >= (2, 35)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    untested = [reason for reason in skipped if NO_EMULATOR in reason]
    if untested:
        terminalreporter.section("THE NPU WAS NOT TESTED", sep="!", red=True)
        terminalreporter.line(f"{len(untested)} tests did not run: {untested[0]}")


@pytest.fixture(scope="session")
def real_bundle(kernels: None) -> Bundle:
    """The small real model. It is a failure, not a skip, if the set-up did not fetch it."""
    try:
        return ModelStore().open(REAL_MODEL)
    except (StoreError, BundleError) as error:
        pytest.fail(f"the tests marked `model` need {REAL_MODEL}: run `make test` ({error})")
