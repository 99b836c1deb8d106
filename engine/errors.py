"""The errors of the engine.

EngineError
├── ImportFailed     a checkpoint cannot be read or is not supported; says which tensor or key
├── BundleError      a bundle is damaged, foreign or of another version; says how to rebuild it
├── DeviceError      the device raised while running; the step may be tried on another lane
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


class DeviceUnavailable(EngineError):
    pass


class DoesNotFit(EngineError):
    pass
