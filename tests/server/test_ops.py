import pytest

from engine.device_board import DeviceReport, LaneReport
from engine.lane_usage import LaneUsage
from engine.version import own_version
from scheduler.messages import FinishReason, StepStats
from server.app import create_app
from server.engine_state import EngineState
from server.metrics import Metrics
from tests.server.byte_tokenizer import IM_END, IM_START
from tests.server.http_client import HI, app_of, chat, error_of, post, send
from tests.server.scripted_client import INFO, FakeEngine, FakeRegistry, saying, served


def test_a_ready_engine_is_ready_and_healthy() -> None:
    app = app_of(FakeEngine(saying("a")))
    assert send(app, "GET", "/live").json() == {"status": "alive"}
    assert send(app, "GET", "/ready").json() == {"status": "ready"}
    health = send(app, "GET", "/health").json()["models"]["fake/model"]
    assert (health["state"], health["num_free_blocks"]) == ("ready", 60)
    assert health["engine"]["device_reason"] == "a test"
    assert health["engine"]["kv_format"] == "int8"


@pytest.mark.parametrize("state", [s for s in EngineState if s is not EngineState.READY])
def test_an_engine_that_makes_no_tokens_is_alive_but_not_ready(state: EngineState) -> None:
    engine = FakeEngine(saying("a"))
    engine.state, engine.state_detail, engine.info = state, "compiling 3 of 31", None
    app = app_of(engine)
    assert send(app, "GET", "/live").status_code == 200
    ready, health = send(app, "GET", "/ready"), send(app, "GET", "/health")
    assert (ready.status_code, health.status_code) == (503, 503)
    assert ready.json()["reasons"] == {"fake/model": f"{state}: compiling 3 of 31"}
    assert int(ready.headers["retry-after"]) > 0
    assert health.json()["models"]["fake/model"]["engine"] is None


def test_one_ready_model_of_two_is_ready_but_not_healthy() -> None:
    bad = FakeEngine(saying("a"))
    bad.state = EngineState.FAILED
    registry = FakeRegistry(served(FakeEngine(saying("a"))), served(bad, name="bad"))
    app = create_app(registry)
    assert send(app, "GET", "/ready").status_code == 200
    assert send(app, "GET", "/health").status_code == 503


def test_models_are_listed_with_the_context_that_is_enforced() -> None:
    app = app_of(FakeEngine(saying("a")))
    listed = send(app, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"] == [
        {
            "id": "fake/model",
            "object": "model",
            "created": 1_700_000_000,
            "owned_by": "hexlm",
            "kind": "generation",
            "max_model_len": INFO.max_model_len,
            "aliases": ["gpt-4o"],
            "quantization": "q4",
            "device": "cpu",
            "kv_format": "int8",
            "dimensions": None,
        }
    ]
    assert send(app, "GET", "/v1/models/fake/model").json() == listed["data"][0]
    assert send(app, "GET", "/v1/models/gpt-4o").json()["id"] == "fake/model"
    missing = send(app, "GET", "/v1/models/no/such")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


def test_tokenize_tells_what_the_model_sees() -> None:
    app = app_of(FakeEngine(saying("a")))
    text = post(app, "/tokenize", {"prompt": "a<|im_end|>", "return_token_strs": True}).json()
    assert text == {
        "count": 2, "max_model_len": 512, "tokens": [97, IM_END], "token_strs": ["a", "<|im_end|>"]
    }  # fmt: skip
    talk = post(app, "/tokenize", {"messages": HI}).json()
    assert talk["tokens"][0] == IM_START
    assert talk["count"] == chat(app).json()["usage"]["prompt_tokens"]
    assert post(app, "/detokenize", {"tokens": [97, IM_END]}).json() == {"prompt": "a<|im_end|>"}


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": HI}])
def test_tokenize_takes_a_prompt_or_messages(body: dict[str, object]) -> None:
    assert post(app_of(FakeEngine(saying("a"))), "/tokenize", body).status_code == 400


def test_detokenize_refuses_ids_outside_the_vocabulary() -> None:
    response = post(app_of(FakeEngine(saying("a"))), "/detokenize", {"tokens": [9999]})
    assert error_of(response)["param"] == "tokens"


def sample(text: str, name: str, **labels: str) -> float:
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        series, _, rest = head.partition("{")
        if series == f"hexlm:{name}" and wanted == set(rest.rstrip("}").split(",")):
            return float(value)
    raise AssertionError(f"no sample {name} {labels}")


def test_metrics_count_what_engine_and_clients_saw() -> None:
    metrics = Metrics()
    app = create_app(FakeRegistry(served(FakeEngine(saying("abc")))), metrics=metrics)
    chat(app)
    metrics.observe_step("fake/model", StepStats(
        num_running=2, num_waiting=1, num_blocks=10, num_free_blocks=4, total_prompt_tokens=7,
        total_generated_tokens=3, total_preemptions=1, execute_s=0.5, queue_times_s=(0.1, 0.2),
    ))  # fmt: skip
    text = send(app, "GET", "/metrics").text
    model = {"model_name": "fake/model"}
    assert sample(text, "num_requests_running", **model) == 2
    assert sample(text, "num_requests_waiting", **model) == 1
    assert sample(text, "kv_cache_usage_perc", **model) == 0.6
    assert sample(text, "kv_blocks_free", **model) == 4
    assert sample(text, "prompt_tokens_total", **model) == 7
    assert sample(text, "num_preemptions_total", **model) == 1
    assert sample(text, "request_queue_time_seconds_count", **model) == 2
    assert sample(text, "step_time_seconds_sum", phase="execute", **model) == 0.5
    assert sample(text, "request_success_total", finished_reason="stop", **model) == 1
    assert sample(text, "time_to_first_token_seconds_count", **model) == 1
    assert sample(text, "inter_token_latency_seconds_count", **model) == 3
    assert sample(text, "e2e_request_latency_seconds_count", **model) == 1


REPORT = DeviceReport(
    "npu",
    "a Hexagon was found",
    (LaneReport("npu", "closed", "SSR; tried again in 4 s"), LaneReport("cpu", "open")),
    "middle: npu from 8",
)


def test_health_says_what_each_device_does_and_why() -> None:
    engine = FakeEngine(saying("a"))
    assert send(app_of(engine), "GET", "/health").json()["models"]["fake/model"]["devices"] is None
    engine.devices = REPORT
    engine.stats = StepStats(lanes=(LaneUsage("npu", 5, 40, 1, 900), LaneUsage("cpu", 2, 3)))
    health = send(app_of(engine), "GET", "/health").json()["models"]["fake/model"]
    assert health["devices"]["lanes"][0] == {
        "name": "npu", "state": "closed", "detail": "SSR; tried again in 4 s"
    }  # fmt: skip
    assert health["devices"]["plan"] == "middle: npu from 8"
    assert health["lanes"][0] == {
        "name": "npu", "num_steps": 5, "num_tokens": 40, "num_faults": 1, "copied_bytes": 900
    }  # fmt: skip


def test_metrics_count_what_each_device_did() -> None:
    metrics, engine = Metrics(), FakeEngine(saying("a"))
    engine.devices = REPORT
    app = create_app(FakeRegistry(served(engine)), metrics=metrics)
    for steps in (3, 7, 2):  # the third is of an engine that was started again
        lanes = (LaneUsage("npu", steps, 10 * steps, 1, 100 * steps), LaneUsage("cpu", 1, 1))
        metrics.observe_step("fake/model", StepStats(total_steps=steps, lanes=lanes))
    text = send(app, "GET", "/metrics").text
    npu = {"model_name": "fake/model", "lane": "npu"}
    assert sample(text, "lane_steps_total", **npu) == 9
    assert sample(text, "lane_tokens_total", **npu) == 90
    assert sample(text, "lane_faults_total", **npu) == 2
    assert sample(text, "lane_copied_bytes_total", **npu) == 900
    assert sample(text, "lane_open", **npu) == 0
    assert sample(text, "lane_open", model_name="fake/model", lane="cpu") == 1


@pytest.mark.parametrize(
    ("state", "used", "whole", "stream"),
    [
        ("open", ("npu", "cpu"), "npu,cpu", "npu"),
        ("closed", ("cpu",), "cpu", "cpu"),
        ("opening", ("cpu", "npu"), "cpu,npu", "cpu"),
        ("open", (), "npu", "npu"),
    ],
)
def test_the_header_names_the_devices_that_ran_the_request(
    state: str, used: tuple[str, ...], whole: str, stream: str
) -> None:
    engine = FakeEngine(saying("abc"))
    lanes = (LaneReport("npu", state), LaneReport("cpu", "open"))
    engine.devices, engine.used_devices = DeviceReport("npu", "found", lanes), used
    app = app_of(engine)
    assert chat(app).headers["x-hexlm-device"] == whole
    assert chat(app, stop="b").headers["x-hexlm-device"] == whole
    assert chat(app, stream=True).headers["x-hexlm-device"] == stream
    response = post(app, "/v1/responses", {"model": "fake/model", "input": "hi"})
    assert response.headers["x-hexlm-device"] == whole


def test_a_request_without_its_only_device_is_a_503_with_the_reason() -> None:
    engine = FakeEngine(saying("abc"))
    engine.fail_after, engine.ends_early = 1, FinishReason.UNAVAILABLE
    response = chat(app_of(engine))
    assert response.status_code == 503
    assert error_of(response)["message"] == "the scripted error."
    assert int(response.headers["retry-after"]) > 0


def test_totals_of_a_restarted_engine_are_added_to_the_old_ones() -> None:
    metrics = Metrics()
    for total in (5, 8, 2, 3):
        metrics.observe_step("m", StepStats(total_generated_tokens=total))
    assert sample(metrics.render().decode(), "generation_tokens_total", model_name="m") == 11


def test_the_root_says_what_this_is_and_every_address_in_it_works() -> None:
    app = app_of(FakeEngine(saying("a")))
    root = send(app, "GET", "/").json()
    assert (root.pop("name"), root.pop("version")) == ("hexlm", own_version())
    assert root.pop("api") == "/v1"
    assert {send(app, "GET", path).status_code for path in root.values()} == {200}
