"""The errors of the engine.

EngineError
├── ImportFailed     a checkpoint cannot be read or is not supported; says which tensor or key
├── BundleError      a bundle is damaged, foreign or of another version; says how to rebuild it
├── DeviceError      the device raised while running; the step may be tried on another lane
│   ├── DeviceLost       it is gone or was reset (driver, SSR); its sessions must be opened anew
│   ├── DeviceFull       its memory does not hold what was to be loaded
│   ├── DeviceOverflow   rows that went in finite came out as NaN or Inf
│   ├── DeviceHang       a call did not come back in time
│   ├── ContextRejected  a compiled context is not accepted: foreign or damaged; compile it again
│   └── GraphRefused     the provider does not take all nodes of a graph; says which and why
├── CompileFailed    contexts for the NPU could not be made; names the graph
├── DeviceUnavailable  the device that was asked for is not there; says what was found
└── DoesNotFit       the memory budget is too small for what was asked; has the numbers
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose. The message is one line."""


class ImportFailed(EngineError):
    pass


class BundleError(EngineError):
    pass


class DeviceError(EngineError):
    pass


class DeviceLost(DeviceError):
    pass


class DeviceFull(DeviceError):
    pass


class DeviceOverflow(DeviceError):
    pass


class DeviceHang(DeviceError):
    pass


class ContextRejected(DeviceError):
    pass


class GraphRefused(DeviceError):
    pass


class CompileFailed(EngineError):
    pass


class DeviceUnavailable(EngineError):
    pass


class DoesNotFit(EngineError):
    pass


class StepInterrupted(EngineError):
    """A step was given up for something more urgent. Nothing is wrong with it or the device."""
