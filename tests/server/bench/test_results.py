"""The file that a run leaves, the tables that are shown, and two runs against each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.bench.comparison import compare
from server.bench.plots import Point, draw, plots_of
from server.bench.report import fact_lines, number, suite_tables, to_markdown
from server.bench.results import (
    FigureKey,
    NotABenchFile,
    Note,
    Results,
    from_json,
    read_results,
    to_json,
)
from tests.server.bench.bench_rig import empty_results

TTFT = FigureKey("prefill", "512 tokens", "TTFT", "ms", True, 512, "prompt tokens")
LONGER = FigureKey("prefill", "1024 tokens", "TTFT", "ms", True, 1024, "prompt tokens")
RATE = FigureKey("decode", "context 64", "rate", "tokens/s", is_lower_better=False)


def make_results(ttft: list[float], rate: list[float], peer: bool = True) -> Results:
    results = empty_results()
    results.machine = {"cpu": "an abacus", "cores": 2, "memory_bytes": 4 * 1024**3, "os": "none"}
    results.targets["hexlm"] = {"kind": "hexlm", "kv_format": "int8", "cost": {"weight_bytes": 1}}
    results.power = {"mean_package_power_w": "not available", "clock_end_mhz": 2000.0}
    results.add(TTFT, "hexlm", 99.0, is_warm_up=True)
    for value in ttft:
        results.add(TTFT, "hexlm", value, is_warm_up=False)
    for value in rate:
        results.add(RATE, "hexlm", value, is_warm_up=False)
    if peer:
        results.targets["peer"] = {"kind": "OpenAI-compatible"}
        results.add(TTFT, "peer", 30.0, is_warm_up=False)
        results.note(Note("peer", "decode", "context 64", "HTTP 500: no"))
    results.is_complete = True
    return results


def test_a_file_holds_everything() -> None:
    results = make_results([10.0, 12.0, 11.0], [100.0])
    text = to_json(results)
    document = json.loads(text)
    assert (document["format"], document["version"]) == ("hexlm-bench", 1)
    first = document["figures"][0]
    assert first["targets"]["hexlm"] == {
        "samples": [10.0, 12.0, 11.0],
        "warm_up": [99.0],
        "spread": {
            "count": 3,
            "median": 11.0,
            "q1": 10.5,
            "q3": 11.5,
            "minimum": 10.0,
            "maximum": 12.0,
        },
    }
    assert from_json(text) == results
    assert to_json(from_json(text)) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not what `hexlm bench --out` writes"),
        ('{"format": "hexlm-bench", "version": 2}', "its version is 2, and this hexlm reads 1"),
        ('{"format": "hexlm-bench", "version": 1}', "damaged: KeyError"),
    ],
)
def test_what_is_no_benchmark_is_refused_in_one_line(
    text: str, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(NotABenchFile, match=reason) as refused:
        read_results(path)
    assert "old.json" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_table_has_medians_spreads_and_the_ratio_of_two_servers() -> None:
    prefill, decode = suite_tables(make_results([10.0, 12.0, 11.0], [100.0]))
    assert prefill.columns == (
        *("case", "figure", "unit", "hexlm", "peer", "warm-up", "hexlm is better by"),
    )
    assert prefill.rows == (("512 tokens", "TTFT", "ms", "11 (10–12)", "30", "99", "2.73 x"),)
    assert decode.rows == (("context 64", "rate", "tokens/s", "100", "–", "–", "–"),)


def test_of_several_others_the_best_one_counts() -> None:
    results = make_results([10.0], [100.0])
    results.targets["third"] = {}
    results.add(TTFT, "third", 25.0, is_warm_up=False)
    results.add(RATE, "third", 200.0, is_warm_up=False)
    prefill, decode = suite_tables(results)
    assert prefill.columns[3:] == ("hexlm", "peer", "third", "warm-up", "hexlm is better by")
    assert (prefill.rows[0][-1], decode.rows[0][-1]) == ("2.5 x", "0.5 x")


def test_runs_are_put_together_and_the_later_figure_counts() -> None:
    results = make_results([10.0], [100.0])
    other = empty_results()
    other.targets["third"] = {"kind": "OpenAI-compatible"}
    other.roofline["begin"] = {"num_threads": 2}
    other.add(TTFT, "hexlm", 8.0, is_warm_up=False)
    other.add(LONGER, "third", 50.0, is_warm_up=False)
    other.note(Note("peer", "decode", "context 64", "HTTP 500: no"))
    results.merge(other)
    assert list(results.targets) == ["hexlm", "peer", "third"]
    assert results.figures[TTFT]["hexlm"].rounds == [8.0]
    assert results.figures[TTFT]["peer"].rounds == [30.0]
    assert results.figures[LONGER]["third"].rounds == [50.0]
    assert (len(results.notes), results.roofline["begin"]) == (1, {"num_threads": 2})


def test_one_server_has_no_ratio() -> None:
    prefill, _ = suite_tables(make_results([10.0], [100.0], peer=False))
    assert prefill.columns == ("case", "figure", "unit", "hexlm", "warm-up")


def test_the_markdown_is_exactly_this() -> None:
    assert to_markdown(make_results([10.0, 12.0, 11.0], [100.0])) == EXPECTED_MARKDOWN


EXPECTED_MARKDOWN = """\
# hexlm bench

- an abacus, 2 cores, 4 GiB, none
- hexlm: kind hexlm, kv_format int8
- peer: kind OpenAI-compatible
- rounds: 2, after 1 of warm-up; shown are medians (quartiles, or extremes of fewer than 4 rounds)
- mean package power w: not available
- clock end mhz: 2,000
- peer: decode: context 64: HTTP 500: no

## prefill

| case | figure | unit | hexlm | peer | warm-up | hexlm is better by |
| --- | --- | --- | --- | --- | --- | --- |
| 512 tokens | TTFT | ms | 11 (10–12) | 30 | 99 | 2.73 x |

## decode

| case | figure | unit | hexlm | peer | warm-up | hexlm is better by |
| --- | --- | --- | --- | --- | --- | --- |
| context 64 | rate | tokens/s | 100 | – | – | – |
"""


def test_numbers_have_three_digits_and_no_exponents() -> None:
    shown = [number(value) for value in (0.0, 0.01234, 1.5, 123.4, 999.7, 12345.6, -3.0)]
    assert shown == ["0", "0.0123", "1.5", "123", "1000", "12,346", "-3"]


def test_a_change_counts_only_outside_the_spread() -> None:
    old = make_results([10.0, 12.0, 11.0], [100.0, 104.0])
    new = make_results([5.0, 5.5, 6.0], [103.0, 99.0])
    ttft, rate = compare(old, new).changes
    assert (ttft.key, ttft.is_outside, ttft.gain, ttft.verdict) == (TTFT, True, 2.0, "better")
    assert (rate.is_outside, rate.verdict) == (False, "within the spread")
    worse, _ = compare(new, old).changes
    assert (worse.gain, worse.verdict) == (0.5, "worse")
    assert compare(empty_results(), new).changes == ()


def test_a_comparison_says_what_else_differs() -> None:
    old, new = make_results([10.0], [100.0]), make_results([10.0], [100.0])
    new.machine = {**new.machine, "cores": 4}
    new.targets["hexlm"]["kv_format"] = "int4"
    new.is_complete = False
    assert compare(old, new).differences == (
        "machine: cores: 2 → 4",
        "server: kv_format: int8 → int4",
        "one of the runs was ended early",
    )
    assert compare(old, old).differences == ()


def test_an_ended_run_says_so() -> None:
    results = make_results([1.0], [1.0])
    results.is_complete = False
    assert "the run was ended early" in list(fact_lines(results))


def test_figures_along_an_axis_become_a_plot(tmp_path: Path) -> None:
    results = make_results([10.0, 12.0, 11.0], [100.0])
    assert plots_of(results) == []
    results.add(LONGER, "hexlm", 20.0, is_warm_up=False)
    (plot,) = plots_of(results)
    assert (plot.title, plot.x_label, plot.y_label) == ("prefill: TTFT", "prompt tokens", "ms")
    assert plot.lines["hexlm"] == (Point(512, 11.0, 10.0, 12.0), Point(1024, 20.0, 20.0, 20.0))
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    (path,) = draw([plot], tmp_path / "plots")
    assert path.name == "prefill-ttft-prompt-tokens.png"
    assert path.read_bytes().startswith(b"\x89PNG")
