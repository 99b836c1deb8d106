"""What the tests share: compiled kernels on disk, a tiny random model, and the real small one."""

from __future__ import annotations

import pytest

from engine import kernel_cache
from engine.bundle import Bundle
from engine.errors import BundleError
from server.model_store import ModelStore
from server.sources.errors import StoreError
from tests.tiny_model import import_tiny_model

REAL_MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def kernels() -> None:
    """Kernels come from, and go to, the folder that the program itself uses."""
    kernel_cache.use_kernel_cache(kernel_cache.default_folder())


@pytest.fixture(scope="session")
def tiny_bundle(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return import_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def real_bundle(kernels: None) -> Bundle:
    """The small real model. It is a failure, not a skip, if the set-up did not fetch it."""
    try:
        return ModelStore().open(REAL_MODEL)
    except (StoreError, BundleError) as error:
        pytest.fail(f"the tests marked `model` need {REAL_MODEL}: run `make test` ({error})")
