"""Folders and repositories of the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def local_folder(source: str | Path, files: list[str], **options: Any) -> Path:
    """Returns a local folder, downloaded if `source` is the id of a repository on the Hub.

    `files` are patterns of the files to download, `options` those of `snapshot_download`. Raises
    FileNotFoundError if `source` looks like an id, but the Hub has no such repository or cannot be
    reached.
    """
    folder = Path(source).expanduser()
    if folder.exists() or isinstance(source, Path) or str(source).count("/") != 1:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError as NotThere

    try:
        return Path(snapshot_download(str(source), allow_patterns=files, **options))
    except (HFValidationError, LocalEntryNotFoundError, NotThere) as error:
        raise FileNotFoundError(f"{source} is no folder, and not on the Hub: {error}") from None
