from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from memagent_integrations import UsageError, files


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder of a user without privileges, as whom the test runs."""
    with tempfile.TemporaryDirectory() as name:
        root = os.geteuid() == 0
        if root:
            os.chown(name, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            Path(name).chmod(0o700)
            if root:
                os.seteuid(0)


def test_a_file_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ("é" * 127)
    files.write(file, "old")
    file.chmod(0o600)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UsageError, match="No space left"):
            files.write(file, "new")
    assert file.read_text() == "old"
    files.write(file, "new")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o600)
    assert list(tmp_path.iterdir()) == [file]


def test_links_are_followed(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("file")
    for text in ("one", "two"):
        files.write(link, text)
        assert (link.is_symlink(), (tmp_path / "file").read_text()) == (True, text)
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(UsageError, match="cannot write"):
        files.write(loop, "text")
    assert loop.is_symlink()


def test_an_open_file_stays_the_one_that_is_open(tmp_path: Path) -> None:
    """What goes to /dev/stdout must not cut standard output off from the file that it is redirected to."""
    with (tmp_path / "output").open("ab", buffering=0) as output:
        output.write(b"before\n")
        files.write(f"/dev/fd/{output.fileno()}", "page\n")
        output.write(b"after\n")
    assert (tmp_path / "output").read_text() == "page\nafter\n"


def test_a_file_in_a_read_only_folder(folder: Path) -> None:
    file = folder / "file"
    file.write_text("old")
    folder.chmod(0o500)
    files.write(file, "new")
    assert file.read_text() == "new"
    with pytest.raises(UsageError, match="Permission denied"):
        files.write(folder / "other", "new")


def test_a_file_that_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("old")

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "replace", busy)
    files.write(file, "new")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_protected_file_is_left_alone(folder: Path) -> None:
    file = folder / "file"
    file.write_text("old")
    file.chmod(0o400)
    with pytest.raises(UsageError, match="Permission denied"):
        files.write(file, "new")
    assert file.read_text() == "old"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    os.chown(file, 65534, 65533)
    files.write(file, "new")
    assert (file.stat().st_uid, file.stat().st_gid, file.read_text()) == (65534, 65533, "new")
