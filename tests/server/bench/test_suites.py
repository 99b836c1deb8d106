"""Every suite against a server whose times are known: the figures are exactly those."""

from __future__ import annotations

from typing import Any

import pytest

from server.bench.errors import RequestFailed
from server.bench.run import Case, Plan
from server.bench.suites import prefixes
from server.bench.suites.table import SUITES, cases_of
from server.bench.timing import Objectives
from tests.server.bench.bench_rig import measure, run_suites
from tests.server.bench.scripted_server import ScriptedServer

QUICK = Plan(1024, is_quick=True)
STEP_S, PREFILL_S = 0.01, 0.001


def case(suite: str, index: int = 0, plan: Plan = QUICK) -> Case:
    return SUITES[suite](plan)[index]


def hexlm() -> ScriptedServer:
    return ScriptedServer(PREFILL_S, STEP_S, is_hexlm=True)


def test_prefill_is_the_time_to_the_first_text() -> None:
    figures = measure(case("prefill", 1), ScriptedServer(PREFILL_S))
    assert figures == {"TTFT": pytest.approx(512.0), "rate": pytest.approx(1000.0)}


def test_decode_counts_hexlms_steps() -> None:
    figures = measure(case("decode"), hexlm())
    assert figures["rate"] == pytest.approx(100)
    assert figures["TPOT"] == pytest.approx(10)
    assert figures["step: execute"] == pytest.approx(8)
    assert figures["step: own work"] == pytest.approx(1)
    assert (figures["tokens a step"], figures["rows a step"]) == (1, 1)


def test_wrong_guesses_are_rows_and_no_tokens() -> None:
    server = hexlm()
    server.tokens_per_chunk, server.drafts_per_step = 2, 3
    figures = measure(case("decode"), server)
    assert (figures["tokens a step"], figures["rows a step"]) == (2, 4)


def test_decode_of_another_server_has_no_steps() -> None:
    assert set(measure(case("decode"), ScriptedServer())) == {"rate", "TPOT", "answer"}


def test_latency_has_all_percentiles() -> None:
    figures = measure(case("latency"), ScriptedServer(PREFILL_S, STEP_S))
    names = [f"{what} p{p}" for what in ("TTFT", "ITL", "TPOT", "total") for p in (50, 95, 99)]
    assert list(figures) == names
    assert figures["ITL p99"] == pytest.approx(10)
    assert figures["TTFT p50"] == pytest.approx(96)


def test_long_context_goes_to_the_limit() -> None:
    figures = measure(case("long-context"), ScriptedServer(PREFILL_S, STEP_S))
    assert figures == {"TTFT": pytest.approx(992), "decode rate": pytest.approx(100)}


def test_streams_together_add_up() -> None:
    figures = measure(case("concurrency", 1), hexlm())
    wall_s = 64 * PREFILL_S + 15 * STEP_S
    assert figures["rate, all"] == pytest.approx(4 * 16 / wall_s)
    assert figures["ITL p95"] == pytest.approx(10)


def test_arrivals_that_keep_the_objectives_are_goodput() -> None:
    kept = measure(case("arrivals"), ScriptedServer(PREFILL_S, STEP_S))
    assert kept["kept objectives"] == 100
    assert kept["goodput"] > 0
    strict = Plan(1024, is_quick=True, objectives=Objectives(ttft_s=0.2))
    missed = measure(case("arrivals", plan=strict), ScriptedServer(PREFILL_S, STEP_S))
    assert (missed["kept objectives"], missed["goodput"]) == (0, 0)
    assert kept["TTFT p50"] == pytest.approx(256)


def test_a_shared_prefix_saves_what_is_cached() -> None:
    figures = measure(case("prefixes", 1), hexlm())
    assert figures["TTFT, all fresh"] == pytest.approx(320)
    assert figures["TTFT, prefix known"] == pytest.approx(64)
    assert figures["TTFT saved"] == pytest.approx(80)
    assert figures["prompt tokens cached"] == pytest.approx(80)


def test_turns_of_a_chat_reuse_all_before_them() -> None:
    figures = measure(case("prefixes"), hexlm())
    assert figures["TTFT, prefix known"] == pytest.approx(128)
    assert figures["TTFT, all fresh"] == pytest.approx(704)


def test_a_batch_tells_the_blocks_it_held() -> None:
    figures = measure(case("prefixes", 3), hexlm())
    alone = 10 * -(-(256 + 32 + prefixes.BATCH_NEW) // 16)
    assert figures["KV against no sharing"] == pytest.approx(100 * 50 / alone)
    assert "KV against no sharing" not in measure(case("prefixes", 3), ScriptedServer())


def test_parallel_answers_are_one_request() -> None:
    server = hexlm()
    measure(case("prefixes", 2), server)
    assert server.bodies[0]["n"] == 4
    assert [body.get("n") for body in server.bodies[1:]] == [None] * 4


def test_high_is_measured_idle_and_among_low_streams() -> None:
    server = hexlm()
    figures = measure(case("priority"), server)
    assert figures["TTFT p95, high, idle"] == pytest.approx(128)
    assert figures["under load / idle"] == pytest.approx(1, rel=0.01)
    assert figures["rate, low"] > 0
    low = [body for body in server.bodies if body["priority"] == "low"]
    assert len(low) >= 6
    assert server.num_running == 0


def test_a_low_load_that_fails_is_a_failure_of_the_case() -> None:
    server = hexlm()
    server.refuses = lambda body: body.get("priority") == "low"
    with pytest.raises(RequestFailed, match="HTTP 400"):
        measure(case("priority"), server)


def test_interference_compares_gaps_with_and_without_a_prompt() -> None:
    figures = measure(case("interference"), hexlm())
    assert figures["ITL p99, quiet"] == pytest.approx(10)
    assert figures["ITL p99, beside"] == pytest.approx(10)
    assert figures["TTFT of the prompt, beside"] == pytest.approx(256)


def test_after_a_storm_of_cancels_nothing_is_left() -> None:
    server = hexlm()
    figures = measure(case("cancels"), server)
    assert server.num_left == 8
    assert figures["blocks lost"] == 0
    assert figures["TTFT right after"] == pytest.approx(256)


def test_names_choose_suites_and_a_short_model_has_fewer_cases() -> None:
    assert {case.suite for case in cases_of(["decode", "prefill"], QUICK)} == {"prefill", "decode"}
    assert {case.suite for case in cases_of([], QUICK)} == SUITES.keys()
    short = cases_of([], Plan(128))
    assert all(case.x is None or case.x <= 128 or case.suite == "concurrency" for case in short)


def test_the_same_prompt_again_is_told_as_a_share_of_the_fresh_one() -> None:
    again = SUITES["prefixes"](QUICK)[-1]
    assert again.name == "200 tokens again"
    figures = measure(again, CachingAllButOne(PREFILL_S, STEP_S, is_hexlm=True))
    assert figures["TTFT, known of fresh"] == pytest.approx(100 * 1 / 200)
    assert SUITES["prefixes"](Plan(2304))[-1].name == "1000 tokens again"


class CachingAllButOne(ScriptedServer):
    """Computes the last token again, as servers must."""

    def cached_tokens(self, prompt: Any) -> int:
        return min(super().cached_tokens(prompt), len(prompt) - 1)


def test_memory_goes_as_far_as_the_model_does() -> None:
    names = [case.name for case in SUITES["memory"](Plan(8192))]
    assert "all processes, 8184 tokens" in names and "KV of 8184 tokens" in names
    short = [case.name for case in SUITES["memory"](Plan(1000))]
    assert [name for name in short if name.startswith("all")] == ["all processes, 992 tokens"]


def test_requests_come_for_as_long_as_the_plan_says() -> None:
    server = hexlm()
    plan = Plan(1024, rates=(2.0,), arrivals_s=5.0)
    measure(SUITES["arrivals"](plan)[0], server)
    assert len(server.bodies) == 10


def test_names_of_cases_are_unique_and_so_are_their_figures() -> None:
    for plan in (QUICK, Plan(16_384)):
        cases = cases_of([], plan)
        assert len({(each.suite, each.name) for each in cases}) == len(cases)


def test_all_suites_run_in_one_go() -> None:
    results = run_suites([hexlm(), ScriptedServer()], rounds=1)
    assert {key.suite for key in results.figures} >= SUITES.keys() - {"memory"}
    assert results.targets["hexlm"]["prompts"] == "token ids"
