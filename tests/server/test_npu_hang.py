"""A call into the NPU that never comes back: the engine ends itself and the client sees a pause."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

from engine.bundle import Bundle
from scheduler.messages import GenerationRequest
from server.engine_client import ClientPolicy, EngineClient
from server.engine_process import SpawnLauncher
from server.supervisor import SupervisionPolicy
from tests.engine_rig import greedy_with_logprobs, serve_alone
from tests.loaded_model import load_model
from tests.npu_engine_process import REASON, run_hanging_engine

POLICY = ClientPolicy(4, 16, supervision=SupervisionPolicy(stall_timeout_s=100.0))
REQUEST = GenerationRequest("a", tuple(range(5, 45)), greedy_with_logprobs(60))


def test_a_hang_costs_a_pause_and_no_token(tiny_bundle: Bundle, tmp_path: Path) -> None:
    expected = serve_alone(load_model(tiny_bundle), REQUEST, max_num_batched_tokens=64)
    entry = partial(run_hanging_engine, bundle=tiny_bundle.path, state=tmp_path)

    async def main() -> None:
        client = EngineClient("tiny", SpawnLauncher(entry, "tiny"), POLICY)
        client.start()
        try:
            await client.wait_settled()
            first_pid = client.pid
            assert client.devices is not None and client.devices.reason == REASON
            outputs = [output async for output in client.generate(REQUEST)]
            tokens = [token for output in outputs for token in output.new_token_ids]
            assert tokens == expected.token_ids
            assert client.pid != first_pid
            npu = client.devices.lanes[0]
            assert npu.state == "closed"
            assert "an engine before this one ended itself: middle segment 1 on npu" in npu.detail
            assert outputs[-1].devices == ("cpu",)
            assert {lane.name: lane.num_steps > 0 for lane in client.stats.lanes} == {
                "npu": False, "cpu": True
            }  # fmt: skip
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(main(), 240))
    hang = json.loads((tmp_path / "npu-hang.json").read_text())
    assert hang["count"] == 1 and "did not come back within 1 s" in hang["reason"]
