"""Power and heat, where the platform tells: battery, RAPL energy counters, clock, temperatures.

RAPL: Linux' powercap interface, energy in microjoules that wraps around at `max_energy_range_uj`.
Each reading that is not there is "not available", never 0.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

POWERCAP = Path("/sys/class/powercap")
NOT_AVAILABLE = "not available"


@dataclass(frozen=True, slots=True)
class PowerReading:
    """`energy_uj` and `energy_range_uj` by package; None: the platform does not tell."""

    time_s: float
    energy_uj: Mapping[str, int] = field(default_factory=dict)
    energy_range_uj: Mapping[str, int] = field(default_factory=dict)
    battery_percent: float | None = None
    is_plugged: bool | None = None
    clock_mhz: float | None = None
    hottest_c: float | None = None


def read_power(powercap: Path = POWERCAP) -> PowerReading:
    energy, ranges = _read_rapl(powercap)
    battery = _battery()
    return PowerReading(
        time.monotonic(),
        energy,
        ranges,
        None if battery is None else float(battery.percent),
        None if battery is None else battery.power_plugged,
        _clock_mhz(),
        _hottest_c(),
    )


def _read_rapl(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Whole packages only: their parts are counted in them."""
    energy: dict[str, int] = {}
    ranges: dict[str, int] = {}
    for zone in sorted(folder.glob("*-rapl:*")):
        if zone.name.count(":") != 1:
            continue
        try:
            energy[zone.name] = int((zone / "energy_uj").read_text())
            ranges[zone.name] = int((zone / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            energy.pop(zone.name, None)  # Only root may read it on many systems.
    return energy, ranges


def _battery() -> Any:
    try:
        return psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError):
        return None


def _clock_mhz() -> float | None:
    try:
        frequency = psutil.cpu_freq()
    except (AttributeError, OSError, RuntimeError, NotImplementedError):
        return None
    return float(frequency.current) if frequency and frequency.current else None


def _hottest_c() -> float | None:
    if not hasattr(psutil, "sensors_temperatures"):
        return None
    try:
        sensors = psutil.sensors_temperatures()
    except (OSError, RuntimeError):
        return None
    found = [float(each.current) for group in sensors.values() for each in group if each.current]
    return max(found, default=None)


def power_summary(before: PowerReading, after: PowerReading) -> dict[str, Any]:
    """As it is shown and recorded; "not available" for what the platform did not tell."""
    power_w = mean_power_w(before, after)
    charge = None
    if before.battery_percent is not None and after.battery_percent is not None:
        charge = after.battery_percent - before.battery_percent
    known = {
        "mean_package_power_w": power_w,
        "battery_change_percent": charge,
        "is_plugged": after.is_plugged,
        "clock_begin_mhz": before.clock_mhz,
        "clock_end_mhz": after.clock_mhz,
        "hottest_begin_c": before.hottest_c,
        "hottest_end_c": after.hottest_c,
    }
    return {name: NOT_AVAILABLE if value is None else value for name, value in known.items()}


def mean_power_w(before: PowerReading, after: PowerReading) -> float | None:
    """Of all packages. A counter that is lower than before has wrapped around once."""
    shared = before.energy_uj.keys() & after.energy_uj.keys()
    if not shared or after.time_s <= before.time_s:
        return None
    used_uj = 0
    for name in shared:
        change = after.energy_uj[name] - before.energy_uj[name]
        used_uj += change if change >= 0 else change + after.energy_range_uj[name]
    return used_uj / 1e6 / (after.time_s - before.time_s)
