"""Fetches a model of a Hugging Face repository, through huggingface-hub and its own cache.

That is one GGUF with all its parts, or the safetensors with the texts around them. The client
resumes, checks and shows its own progress; this module picks the files and turns the client's
errors into one line. Does not know which models exist.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path

from engine.importers.source_files import TEXT_FILES, split_parts
from server.sources.errors import BadSource, DiskFull, FetchFailed
from server.sources.local import find_safetensors, whole_ggufs
from server.sources.spec import HfSource

MAX_LISTED = 10
SAFETENSORS_PATTERNS = (
    *TEXT_FILES, "*.safetensors", "*.safetensors.index.json", "README.md", "vocab.txt",
    "modules.json", "sentence_bert_config.json", "1_Pooling/config.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
"""What of a repository with safetensors is fetched: weights, and the texts that importers read."""


def fetch_from_hugging_face(source: HfSource) -> Path:
    """The path of the file in the client's cache. Raises BadSource, FetchFailed or DiskFull."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity(logging.ERROR)  # its retries would bury our one line
    with translated(source):
        file = source.file
        if file is None:
            file = pick_file(source.repository, HfApi().list_repo_files(source.repository))
        if file.lower().endswith(".gguf"):
            parts = split_parts(Path(file))
            paths = [hf_hub_download(source.repository, part.as_posix()) for part in parts]
            return Path(paths[0])
        folder = snapshot_download(source.repository, allow_patterns=list(SAFETENSORS_PATTERNS))
        return Path(folder) / file


def pick_file(repository: str, files: list[str]) -> str:
    """The only .gguf, else the safetensors, else BadSource that lists the choices."""
    names = [path.as_posix() for path in whole_ggufs([Path(name) for name in files])]
    if len(names) == 1:
        return names[0]
    if not names and (safetensors := find_safetensors(files)) is not None:
        return safetensors
    if not names:
        raise BadSource(
            f"hf:{repository} holds neither a .gguf file nor safetensors; choose another version "
            "of the model"
        )
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    raise BadSource(
        f"hf:{repository} holds {len(names)} .gguf files; write hf:{repository}:<file> with one "
        f"of: {', '.join(names[:MAX_LISTED])}{more}"
    )


@contextlib.contextmanager
def translated(source: HfSource) -> Iterator[None]:
    from huggingface_hub import errors

    name = f"hf:{source.repository}"
    try:
        yield
    except errors.GatedRepoError as exc:
        raise FetchFailed(
            f"{name} asks for an accepted licence; accept it on its page and run `hf auth login`"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise FetchFailed(
            f"{name} does not exist or is private; check the name or run `hf auth login`"
        ) from exc
    except errors.LocalEntryNotFoundError as exc:
        raise FetchFailed(unreachable(name)) from exc
    except errors.EntryNotFoundError as exc:
        raise BadSource(f"{name} has no file {source.file!r}; check the file's name") from exc
    except (errors.HfHubHTTPError, errors.HFValidationError) as exc:
        reason = str(exc).strip().splitlines()
        raise FetchFailed(f"cannot fetch {name}: {reason[0] if reason else 'refused'}") from exc
    # The base of what its HTTP client raises; which client that is depends on its version.
    except (errors.OfflineModeIsEnabled, errors.HTTPError, ConnectionError) as exc:  # type: ignore[attr-defined]
        raise FetchFailed(unreachable(name)) from exc
    except OSError as exc:
        if exc.errno == errno.ENOSPC:
            raise DiskFull(
                f"cannot store {name}: the disk is full; make room and pull again"
            ) from exc
        raise FetchFailed(f"cannot fetch {name}: {exc}") from exc


def unreachable(name: str) -> str:
    return f"cannot fetch {name}: Hugging Face does not answer; check the network and pull again"
