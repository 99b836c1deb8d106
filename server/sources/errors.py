"""What can go wrong while a model is found and fetched. Every message is one line with the remedy.

StoreError
├── BadModelName   a name that cannot be a model's, or is taken
├── UnknownModel   no registered model, no imported one and no file of that name
├── BadSource      a source that cannot be understood, or does not hold what it should
├── FetchFailed    the network, the index or the archive failed
└── DiskFull       not enough room, with the numbers
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors of the model store."""


class BadModelName(StoreError):
    pass


class UnknownModel(StoreError):
    pass


class BadSource(StoreError):
    pass


class FetchFailed(StoreError):
    pass


class DiskFull(StoreError):
    pass
