"""Replace a folder as a whole: a reader finds the old one or the new one, no mixture and no part.

The new content is written to a folder beside the old one, flushed to the disk, and exchanged with
the old one by one system call, renameat2 with RENAME_EXCHANGE. File systems without it, such as
NFS, need two renames: of the old folder to `.moelora-old-*`, a name for each NAME, then of the new
one to NAME. A process that ends between them leaves the old folder under that name, where `reading`
finds it and the next `replacing` returns it to its place. What ends earlier or later leaves at most
a folder `.saving-*` beside NAME, which may be deleted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


@contextmanager
def replacing(folder: str | Path, replaced: Sequence[str]) -> Iterator[Path]:
    """A new, empty folder, which takes the place of `folder` at the end, by one rename.

    If the body raises, or the process ends, `folder` is as before.

    Parameters
    ----------
    folder : path
        Made if there is none, with its parents. A link stays, and what it leads to is replaced.
    replaced : sequence of str
        Patterns of files. What else the old folder has, and all of its folders, are in the new one
        too.

    Raises
    ------
    ValueError
        `folder` is or contains the current folder, which would be gone.
    OSError
        A file cannot be written beside `folder`, or where it has a folder of this name; or `folder`
        is no folder, or cannot be renamed as it is on a file system of its own (a mount point).
    """
    path = Path(os.path.realpath(folder))
    if Path(os.path.realpath(os.curdir)).is_relative_to(path):
        raise ValueError(f"{folder} has the current folder in it, wanted one that can be replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    _restore(path)
    new = path.parent / f".saving-{secrets.token_hex(8)}"
    try:
        new.mkdir()
        yield new
        for file in new.iterdir():
            _flush(file)
        if path.exists():
            _keep(path, new, replaced)
            shutil.copymode(path, new)
        _flush(new)
        _swap(new, path)
        _flush(path.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # after the exchange it is the old folder


def reading(folder: Path, read: Callable[[Path], T]) -> T:
    """What `read` returns for a folder, or raises; again, if it is replaced in between."""
    while True:
        there = folder
        if not folder.exists() and (aside := _aside(Path(os.path.realpath(folder)))).is_dir():
            there = aside
        with ExitStack() as opened:
            try:
                # An open folder keeps its number: no later one has the same.
                handle = os.open(there, os.O_RDONLY | os.O_DIRECTORY)
            except (OSError, ValueError):
                return read(folder)  # which says what is wrong
            opened.callback(os.close, handle)
            try:
                content = read(there)
            except Exception:
                if _is_at(handle, there):
                    raise
            else:
                if _is_at(handle, there):
                    return content


def _is_at(handle: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(folder))
    except FileNotFoundError:
        return False


def _aside(path: Path) -> Path:
    """Where the old folder is between two renames: a short name, however long that of `path` is."""
    return path.with_name(f".moelora-old-{sha256(os.fsencode(path.name)).hexdigest()[:16]}")


def _restore(path: Path) -> None:
    """Undo the first of two renames, unless the second has been made."""
    if not path.exists() and _aside(path).is_dir():
        os.rename(_aside(path), path)


def _keep(path: Path, new: Path, replaced: Sequence[str]) -> None:
    """Add what a folder has beside the files that are replaced; files are linked, not copied."""
    for entry in os.scandir(path):
        there, is_folder = new / entry.name, entry.is_dir(follow_symlinks=False)
        if there.exists():
            if is_folder:
                raise IsADirectoryError(errno.EISDIR, "is a folder, wanted a file", entry.path)
            continue
        if not entry.is_dir() and any(fnmatch(entry.name, pattern) for pattern in replaced):
            continue
        if is_folder:
            shutil.copytree(entry.path, there, symlinks=True, copy_function=_link)
        else:
            _link(entry.path, there)


def _link(source: str, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _swap(new: Path, path: Path) -> None:
    """Move `new` to `path`, and what is there to `new`, or away."""
    try:
        return os.rename(new, path)  # there is nothing, or an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    if _exchange(new, path):
        return
    aside = _aside(path)
    shutil.rmtree(aside, ignore_errors=True)  # of a process that ended after its second rename
    try:
        os.rename(path, aside)
        os.rename(new, path)
    except BaseException:
        _restore(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders at once; False if the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if rename(*paths, _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _flush(path: Path) -> None:
    """Write a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
