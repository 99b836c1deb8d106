"""Which bars are met: the best peer, ratios in either direction, what is missing."""

from __future__ import annotations

import pytest

from server.bench.report import markdown_table
from server.bench.results import FigureKey, Results
from server.bench.run import Plan
from server.bench.suites.table import cases_of
from tests.bench import bars
from tests.bench.bars import BARS, OWN, Bar, Found, Kind, Setup
from tests.bench.kv_capacity import sequences_of_f32
from tests.bench.saturation import Held, highest_held, saturating_rate
from tests.model_configs import make_config
from tests.server.bench.bench_rig import empty_results

DECODE = FigureKey("decode", "context 64, 128 new", "rate", "tokens/s", is_lower_better=False)
PREFILL = FigureKey("prefill", "512 tokens", "TTFT", "ms")
START = FigureKey("start", "again", "first token", "s")


def results_of(figures: dict[FigureKey, dict[str, list[float]]]) -> Results:
    results = empty_results()
    for key, targets in figures.items():
        for name, values in targets.items():
            for value in values:
                results.add(key, name, value, is_warm_up=False)
    return results


def found(name: str, figures: dict[FigureKey, dict[str, list[float]]]) -> Found:
    (only,) = bars.find(bars.chosen([name]), results_of(figures))
    return only


def test_the_best_peer_is_the_fastest_one_in_either_direction() -> None:
    decode = found("decode-64", {DECODE: {OWN: [100, 160, 150], "a": [100.0], "b": [75.0]}})
    assert (decode.best_peer, decode.ratio, decode.is_met) == (100, 1.5, True)
    prefill = found("prefill-512", {PREFILL: {OWN: [100.0], "a": [310.0], "b": [290.0]}})
    assert (prefill.best_peer, prefill.is_met) == (290, False)
    assert prefill.ratio == pytest.approx(2.9)


def test_a_bar_of_ones_own_does_not_look_at_peers() -> None:
    slow = found("start", {START: {OWN: [4.1], "a": [9.0]}})
    assert slow.is_met is False
    assert slow.ratio == pytest.approx(9 / 4.1)
    assert found("start", {START: {OWN: [4.0]}}).is_met is True


def test_at_least_is_met_from_the_limit_on() -> None:
    key = FigureKey("KV capacity", "1024 tokens", "int4 of f32", "x", is_lower_better=False)
    assert found("kv-int4", {key: {OWN: [6.5]}}).is_met is True
    assert found("kv-int4", {key: {OWN: [6.49]}}).is_met is False


def test_without_a_peers_figure_or_an_own_one_nothing_is_said() -> None:
    alone = found("decode-64", {DECODE: {OWN: [100.0]}})
    assert (alone.ratio, alone.is_met) == (None, None)
    assert found("start", {START: {"a": [1.0]}}).is_met is None


def test_bars_that_were_not_measured_have_no_row() -> None:
    assert bars.find(BARS, results_of({})) == []


def test_the_table_is_exactly_this() -> None:
    figures = {DECODE: {OWN: [150.0], "a": [100.0]}, START: {OWN: [5.0], "a": [2.0], "b": [3.0]}}
    table = bars.bar_table(bars.find(BARS, results_of(figures)), ["a", "b"])
    assert list(markdown_table(table)) == [
        "| figure | unit | hexlm | a | b | ratio to the best | bar | met |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| decode, context 64 | tokens/s | 150 | 100 | – | 1.5 x | >= 1.5 x | yes |",
        "| start to first token, again | s | 5 | 2 | 3 | 0.4 x | <= 4 | NO |",
    ]


def test_a_figure_without_a_bar_is_only_shown() -> None:
    key = FigureKey("goodput", "highest rate held", "rate", "/s", is_lower_better=False)
    (shown,) = bars.find(BARS, results_of({key: {OWN: [4.0], "a": [1.0]}}))
    assert (shown.bar.kind, shown.is_met, shown.ratio) == (Kind.SHOWN, None, 4.0)


def test_a_name_that_no_bar_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="no bar 'decode-1'; the bars are decode-64, decode-2k"):
        bars.chosen(["decode-1"])
    assert bars.chosen([]) == list(BARS)


@pytest.mark.parametrize(
    ("setup", "length"), [(Setup.LONG, 8192), (Setup.SERVING, 2304), (Setup.MEMORY, 8192)]
)
def test_every_bar_is_about_a_case_that_there_is(setup: Setup, length: int) -> None:
    there = {case.full_name for case in cases_of([], Plan(length))}
    wanted = bars.cases_for(BARS, setup)
    assert wanted and set(wanted) <= there


def test_figures_of_the_limit_come_from_the_case_that_is_measured() -> None:
    chosen = bars.chosen(["roofline-8"])
    assert [bar.figure for bar in chosen] == [bars.OF_LIMIT, bars.SEEN_OF_LIMIT]
    assert bars.cases_for(chosen, Setup.SERVING) == ("concurrency: 8 streams",)
    both = bars.chosen(["roofline-1", "decode-64"])
    assert bars.cases_for(both, Setup.LONG) == ("decode: context 64, 128 new",)
    goodput: list[Bar] = bars.chosen(["goodput"])
    assert bars.cases_for(goodput, Setup.SERVING) == ()


class Server:
    """Keeps its objectives up to a rate; counts how often it is asked."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.rates: list[float] = []

    def kept(self, rate: float) -> float:
        self.rates.append(rate)
        return min(1.0, self.capacity / rate)


def test_the_rate_is_raised_until_it_is_not_held() -> None:
    server = Server(1.0)
    assert highest_held(server.kept) == Held(0.5 * 1.5, 0.5 * 1.5**2)
    assert server.rates == [0.5, 0.75, 1.125]


def test_a_server_that_holds_nothing_and_one_that_holds_everything() -> None:
    assert highest_held(Server(0.1).kept) == Held(0.0, 0.5)
    held = highest_held(Server(1e9).kept)
    assert held.rate <= 200 < held.lost_at


def test_nine_answers_of_ten_are_enough() -> None:
    assert highest_held(lambda rate: 0.9 if rate < 1 else 0.89) == Held(0.75, 1.125)


def test_the_best_peer_decides_what_saturates() -> None:
    assert saturating_rate({"a": Held(0.5, 0.75), "b": Held(1.0, 1.5)}) == 1.5


def test_sequences_are_counted_from_the_real_pages() -> None:
    """A head of 64: 256 + 4 bytes in f32, 64 + 4 in int8, 32 + 2 x 4 in int4."""
    factors = sequences_of_f32(make_config(num_layers=2, head_size=64))
    assert factors == {"f32": 1.0, "int8": 3.82, "int8k4v": 4.81, "int4": 6.5}
