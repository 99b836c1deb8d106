"""The machine's roofline as the benchmark's file keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.roofline import Roofline


def roofline_record(roofline: Roofline) -> dict[str, Any]:
    return {
        "num_threads": roofline.num_threads,
        "buffer_bytes": roofline.buffer_bytes,
        "bandwidth_bytes_per_s": roofline.bandwidth_bytes_per_s,
        "operations_per_s": {
            f"{bits} bits, {rows} rows": rate
            for (bits, rows), rate in roofline.operations_per_s.items()
        },
    }


def read_roofline(record: Mapping[str, Any]) -> Roofline:
    """Raises KeyError, TypeError or ValueError for anything else than `roofline_record` gave."""
    rates = {}
    for name, rate in record["operations_per_s"].items():
        bits, _, rows, _ = name.split()
        rates[int(bits), int(rows)] = float(rate)
    return Roofline(
        int(record["num_threads"]),
        int(record["buffer_bytes"]),
        float(record["bandwidth_bytes_per_s"]),
        rates,
    )


def better_of(first: Roofline, second: Roofline) -> Roofline:
    """The higher of each figure: a limit is what the machine can do, not what it did once."""
    rates = {
        key: max(rate, second.operations_per_s.get(key, 0.0))
        for key, rate in first.operations_per_s.items()
    }
    bandwidth = max(first.bandwidth_bytes_per_s, second.bandwidth_bytes_per_s)
    return Roofline(first.num_threads, first.buffer_bytes, bandwidth, rates)


def recorded_roofline(records: Mapping[str, Any]) -> Roofline | None:
    """Of a run's `begin` and `end`; None if it has neither."""
    found = [read_roofline(records[name]) for name in ("begin", "end") if name in records]
    if not found:
        return None
    return found[0] if len(found) == 1 else better_of(*found)


def roofline_lines(roofline: Roofline) -> list[str]:
    rates = [
        f"{bits}-bit weights, {rows} {'row' if rows == 1 else 'rows'} a load: "
        f"{rate / 1e9:,.0f} G operations/s"
        for (bits, rows), rate in roofline.operations_per_s.items()
    ]
    return [
        f"{roofline.num_threads} threads, a buffer of {roofline.buffer_bytes / 2**20:,.0f} MiB",
        f"memory, read: {roofline.bandwidth_bytes_per_s / 1e9:.1f} GB/s",
        *rates,
    ]
