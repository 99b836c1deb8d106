"""Profiles are found again by all that they depend on, and by nothing else."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from engine import profile_store
from engine.profile_store import ProfileKey, ProfileStore
from tests.simulated_lane import profile

KEY = ProfileKey("tiny", "abc int8", "npu", 8, "int8")


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "profiles")
    assert store.load(KEY) is None
    path = store.save(KEY, profile(4), "a test")
    found = store.load(KEY)
    assert found is not None and found.profile == profile(4) and found.origin == "a test"
    assert list(path.parent.iterdir()) == [path], "nothing half written is left"
    assert json.loads(path.read_text())["versions"]["onnxruntime"] != "none"


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, bundle_digest="abd int8"),
        replace(KEY, device="npu-emulated"),
        replace(KEY, num_threads=4),
        replace(KEY, kv_format="int4"),
    ],
)
def test_another_model_device_or_setting_has_another_profile(
    tmp_path: Path, other: ProfileKey
) -> None:
    store = ProfileStore(tmp_path)
    store.save(KEY, profile(4), "a test")
    assert store.load(other) is None


def test_another_machine_or_provider_has_another_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ProfileStore(tmp_path)
    store.save(KEY, profile(4), "a test")
    monkeypatch.setattr(profile_store, "machine", lambda: "another")
    assert store.load(KEY) is None
    monkeypatch.undo()
    monkeypatch.setattr(profile_store, "_version", lambda name: "9.9")
    assert store.load(KEY) is None


@pytest.mark.parametrize("content", ["", "{", "{}", '{"profile": {"format": 1}}', "[]"])
def test_a_damaged_profile_is_measured_again(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = ProfileStore(tmp_path)
    store.path(KEY).write_text(content)
    with caplog.at_level(logging.WARNING):
        assert store.load(KEY) is None
    assert "is measured again" in caplog.text
