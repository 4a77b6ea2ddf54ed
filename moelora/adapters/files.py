"""Files of untrusted folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor


def file_in(folder: Path, name: str) -> Path:
    """`folder / name`, for a name from another file, or a file that may be a link.

    Links within the folder are followed, as are links of Hub cache snapshots to blobs of the same
    repository, `../../blobs`. The folder itself may be a link.

    Raises
    ------
    ValueError
        The name or the link leads out of the folder.
    """
    parts = PurePosixPath(name).parts
    if not parts or "\0" in name or parts[0] == "/" or ".." in parts:
        raise ValueError(f"{folder}: {name!r:.200} is no name of a file in the folder")
    path = folder / name
    try:
        root, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links, until Python 3.12
        raise ValueError(f"{path} cannot be found: {error}") from None
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append((root.parents[1] / "blobs").resolve())
    if not any(target.is_relative_to(home) for home in homes):
        raise ValueError(
            f"{path} is a link out of the folder, to {target}; give the folder that holds the "
            "file, or put a copy there"
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError if it contains anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is a {type(content).__name__}, wanted an object")
    return content


def host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, which shares memory with no other tensor."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. OSError if that fails, of which safetensors makes another error."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
