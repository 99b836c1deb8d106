"""A step form: a way to compute a whole step, attention and all, from batch to logits.

Declared here for the dispatcher, which chooses among them. The runner over one lane is one; a lane
with attention inside its graphs, or kernels that do the whole step, are others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.batch import Batch, Float32Array
from engine.lane import Lane, LaneCounters


class StepForm(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def counters(self) -> LaneCounters: ...

    def fits(self, batch: Batch) -> bool:
        """Whether this form can run such a batch at all."""
        ...

    def execute(self, batch: Batch) -> Float32Array:
        """Logits [R, V] float32 of `batch.logits_rows`, valid until the next call.

        Writes keys and values of all tokens to their slots. Raises DeviceError; the slots then
        hold garbage, and executing the batch again, on any form, mends that.
        """
        ...

    def close(self) -> None:
        """Gives the device's memory back."""
        ...


@dataclass(frozen=True, slots=True)
class NpuForms:
    """What an opened NPU offers: a lane for the segments, and forms that run whole steps on it."""

    lane: Lane
    whole: tuple[StepForm, ...] = ()

    def close(self) -> None:
        for form in self.whole:
            form.close()
        self.lane.close()
