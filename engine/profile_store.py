"""Cost profiles on disk: one file for each model on each machine with each version of the software.

The key is made of all that the costs depend on; a file of another key is another file, so nothing
stale is ever read. What cannot be read is measured again. Lies beside the models, in the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import platformdirs

from engine.cost_profile import CostProfile, profile_from_json

logger = logging.getLogger(__name__)

_PROVIDERS = ("onnxruntime", "onnxruntime-qnn")
_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """`bundle_digest` of the model's weights; `num_threads` and `kv_format` of the engine."""

    bundle_name: str
    bundle_digest: str
    device: str
    num_threads: int
    kv_format: str

    @property
    def file_name(self) -> str:
        parts = (self.bundle_digest, self.device, self.num_threads, self.kv_format, machine())
        versions = (f"{name} {_version(name)}" for name in _PROVIDERS)
        text = "\n".join((*map(str, parts), *versions))
        return f"{self.bundle_name}-{hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]}.json"


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """`origin` says who measured it; `created` is Unix time in seconds."""

    profile: CostProfile
    origin: str
    created: float


class ProfileStore:
    def __init__(self, folder: Path | None = None) -> None:
        cache = platformdirs.user_cache_dir("hexlm", appauthor=False)
        self._folder = folder or Path(cache) / "profiles"

    def path(self, key: ProfileKey) -> Path:
        return self._folder / key.file_name

    def load(self, key: ProfileKey) -> StoredProfile | None:
        path = self.path(key)
        try:
            value = json.loads(path.read_text("utf-8"))
            profile = profile_from_json(value["profile"])
            return StoredProfile(profile, str(value["origin"]), float(value["created"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is not a usable profile and is measured again: %s", path, error)
            return None

    def save(self, key: ProfileKey, profile: CostProfile, origin: str) -> Path:
        """Whole or not at all. Raises OSError."""
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        value = {
            "origin": origin,
            "created": time.time(),
            "machine": machine(),
            "versions": {name: _version(name) for name in _PROVIDERS},
            "profile": profile.as_json(),
        }
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(value, indent=1), "utf-8")
        temporary.replace(path)
        return path


def machine() -> str:
    """What kind of computer this is, as far as the standard library tells."""
    return f"{platform.system()} {platform.machine()} {platform.processor()} {os.cpu_count()} CPUs"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
