"""Segments that overflow in half precision go to the CPU; a device on which many do is useless."""

from __future__ import annotations

from engine.npu.overflow_ledger import WHOLE_STEP, OverflowLedger


def test_a_segment_is_banned_when_it_overflows_again() -> None:
    ledger = OverflowLedger(32)
    assert not ledger.record(5) and ledger.banned == frozenset()
    assert not ledger.record(6)
    assert ledger.record(5) and ledger.banned == {5}
    assert not ledger.record(5), "it is banned already"
    assert not ledger.is_hopeless


def test_forms_of_whole_steps_count_apart_and_it_is_all_told_in_words() -> None:
    ledger = OverflowLedger(4)
    assert ledger.in_words() == ""
    for segment in (WHOLE_STEP, WHOLE_STEP):
        ledger.record(segment)
    assert ledger.banned == {WHOLE_STEP} and not ledger.is_hopeless
    assert ledger.in_words() == "no whole steps on it, since fp16 overflowed"
    for _ in range(2):
        ledger.record(1)
    both = "segments 1 on the CPU and no whole steps on it, since fp16 overflowed"
    assert ledger.in_words() == both and not ledger.is_hopeless


def test_many_banned_segments_are_too_many() -> None:
    ledger = OverflowLedger(8)
    for segment in range(3):
        assert not ledger.is_hopeless
        ledger.record(segment)
        ledger.record(segment)
    assert ledger.is_hopeless
