"""A folder is replaced as a whole: a reader finds the old one or the new one at every moment."""

import os
import shutil

import pytest
from covering import extent
from interrupts import interrupted, killed

from moelora.adapters import folders
from moelora.adapters.folders import reading, replacing

# Nightly at each instruction, in CI at every eleventh.
EVERY = extent(nightly=1, ci=11)
PARTS = ("config", "weights")


def put(folder, text):
    with replacing(folder, ("config", "weights*")) as new:
        for part in PARTS:
            (new / part).write_text(text)


def content(folder):
    return [(folder / part).read_text() for part in PARTS]


@pytest.fixture(params=["exchange", "two-renames"])
def swap(request, monkeypatch):
    """With one system call, and as on file systems that lack it."""
    if request.param == "two-renames":
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)


@pytest.mark.parametrize("end", [interrupted, killed])
@pytest.mark.parametrize("before", ["absent", "empty", "full"])
@pytest.mark.usefixtures("swap")
def test_a_reader_finds_the_old_or_the_new_folder(end, before, tmp_path):
    points = 0
    while True:
        folder = tmp_path / "house" / "law"
        shutil.rmtree(folder.parent, ignore_errors=True)
        if before != "absent":
            folder.mkdir(parents=True)
        if before == "full":
            put(folder, "old")
            (folder / "README.md").write_text("kept")
        came = end(lambda: put(folder, "new"), {folders.__file__}, 1 + points * EVERY)  # noqa: B023
        if before == "full":
            assert reading(folder, content) in (["old"] * 2, ["new"] * 2)
            assert reading(folder, lambda f: (f / "README.md").read_text()) == "kept"
            assert folder.exists() or end is killed
        else:
            there = list(folder.iterdir()) if folder.exists() else []
            assert not there or content(folder) == ["new"] * 2
        put(folder, "next")
        assert reading(folder, content) == ["next"] * 2
        assert not list(folder.parent.glob(".moelora-old-*"))
        if not came:
            break
        points += 1
    assert points * EVERY > 50
    assert os.listdir(folder.parent) == ["law"]


@pytest.mark.usefixtures("swap")
def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    folder = tmp_path / ("é" * 127 + "n")
    for text in ("old", "new"):
        put(folder, text)
        assert reading(folder, content) == [text] * 2
    assert os.listdir(tmp_path) == [folder.name]


@pytest.mark.usefixtures("swap")
def test_what_else_is_in_the_folder_stays(tmp_path):
    """Other files, folders (with whatever name) and links; the mode; and a link to the folder."""
    folder = tmp_path / "law"
    put(folder, "old")
    (folder / "weights.bin").write_text("old")
    (folder / "README.md").write_text("kept")
    (folder / "logs" / "deep").mkdir(parents=True)
    (folder / "logs" / "deep" / "events").write_text("kept")
    (folder / "latest").symlink_to("logs/deep")
    (folder / "weights-v2").mkdir()
    (folder / "weights-v2" / "weights").write_text("kept")
    folder.chmod(0o750)
    log = (folder / "README.md").open("a")
    (tmp_path / "link").symlink_to("law")
    put(tmp_path / "link", "new")
    log.write(", and open")
    log.close()
    assert content(folder) == ["new"] * 2
    names = ["README.md", "config", "latest", "logs", "weights", "weights-v2"]
    assert sorted(os.listdir(folder)) == names
    assert (folder / "weights-v2" / "weights").read_text() == "kept"
    assert (folder / "README.md").read_text() == "kept, and open"
    assert (folder / "latest" / "events").read_text() == "kept"
    assert folder.stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["law", "link"]


def test_a_link_leads_to_the_folder_between_two_renames(tmp_path):
    put(tmp_path / "law", "old")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "now").symlink_to("../law")
    os.rename(tmp_path / "law", folders._aside(tmp_path / "law"))
    assert reading(tmp_path / "served" / "now", content) == ["old"] * 2


def test_what_cannot_be_replaced_is_left(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match="file"):
        put(tmp_path / "file", "new")
    monkeypatch.chdir(tmp_path)
    for folder in (".", tmp_path, tmp_path.parent):
        with pytest.raises(ValueError, match="has the current folder in it"):
            put(folder, "new")
    assert (tmp_path / "file").read_text() == "kept"
    (tmp_path / "law" / "config").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match="is a folder, wanted a file: .*law/config"):
        put(tmp_path / "law", "new")
    assert os.listdir(tmp_path / "law") == ["config"]
    assert sorted(os.listdir(tmp_path)) == ["file", "law"]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.usefixtures("swap")
def test_a_reader_takes_all_of_one_folder(times, tmp_path):
    """Although it is replaced, and removed, between the reader's first file and its second."""
    put(tmp_path / "law", "0")
    number = 0

    def read(folder):
        nonlocal number
        first = (folder / "config").read_text()
        if number < times:
            number += 1
            put(tmp_path / "law", str(number))
        if number == 2 and first == "1":
            raise ValueError("a mixture may look damaged")
        return first, (folder / "weights").read_text()

    assert reading(tmp_path / "law", read) == (str(times),) * 2
    with pytest.raises(FileNotFoundError):
        reading(tmp_path / "none", content)
