"""One server with the small real model for all cases that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.bundle import Bundle
from tests.cases.real_server import RealServer, real_server


@pytest.fixture(scope="session")
def real(real_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with real_server(tmp_path_factory.mktemp("server")) as server:
        yield server
