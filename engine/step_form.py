"""A step form: a way to compute a whole step, attention and all, from batch to logits.

Declared here for the dispatcher, which chooses among them. The runner over one lane is one; a lane
with attention inside its graphs, or kernels that do the whole step, are others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.batch import Batch, Float32Array
from engine.lane import Lane, LaneCounters
from engine.recorder import Recorder


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

    def record(self, recorder: Recorder) -> None:
        """From now on tells the recorder what happens in its steps."""
        ...

    def interrupt(self) -> None:
        """From any thread: the step that runs now, if one does, may raise StepInterrupted soon.

        What it was to compute is not computed then; a form that cannot stop goes on.
        """
        ...

    def close(self) -> None:
        """Gives the device's memory back."""
        ...


class CallProfile(Protocol):
    """What a device itself measures of its calls."""

    def beside(self, recorder: Recorder) -> Recorder:
        """One that tells `recorder` everything, and after each call what the device measured."""
        ...

    def close(self) -> None: ...


class NoProfile:
    def beside(self, recorder: Recorder) -> Recorder:
        return recorder

    def close(self) -> None:
        pass


NO_PROFILE = NoProfile()


@dataclass(frozen=True, slots=True)
class NpuForms:
    """What an opened NPU offers: a lane for the segments, and forms that run whole steps on it."""

    lane: Lane
    whole: tuple[StepForm, ...] = ()
    profile: CallProfile = NO_PROFILE

    def record(self, recorder: Recorder) -> None:
        """From now on tells it of all calls, with what the device says of them itself."""
        recorder = self.profile.beside(recorder)
        for form in self.whole:
            form.record(recorder)
        self.lane.record(recorder)

    def close(self) -> None:
        for form in self.whole:
            form.close()
        self.lane.close()
        self.profile.close()
