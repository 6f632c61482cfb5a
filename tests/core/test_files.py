"""What a cache reads can only have been written by this user: folders, files and JSON that anybody left there."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from tests.processes import holds_in_forked_child
from warploom.core.files import make_private_folder, open_private, parse_json, require_private_folder

posix = pytest.mark.skipif(sys.platform == "win32", reason="owners and permission bits")
STRANGER = 54321


@pytest.fixture
def umask_0():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def give_away(monkeypatch):
    """Let a file belong to somebody else: root may really do that, others take on another user's number."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, STRANGER, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: STRANGER)

    return give


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@posix
@pytest.mark.usefixtures("umask_0")
def test_what_is_made_is_private_whatever_the_umask(tmp_path):
    folder = tmp_path / "home" / ".cache" / "warploom" / "kernels"
    make_private_folder(folder)
    make_private_folder(folder)
    made = [folder, *folder.parents][:4]
    assert [mode(path) for path in made] == [0o700] * 4
    with open(folder / "file", "xb", opener=open_private) as file:
        file.write(b"\r\n\x1a")
    assert mode(folder / "file") == 0o600
    with open(folder / "file", "rb", opener=open_private) as file:
        assert file.read() == b"\r\n\x1a"


@posix
@pytest.mark.parametrize("bits", [stat.S_IWGRP, stat.S_IWOTH])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, bits):
    folder = tmp_path / "around" / "folder"
    make_private_folder(folder)
    for path in (folder, folder.parent):
        path.chmod(0o755 | bits)
        with pytest.raises(PermissionError, match="other users can write to it") as raised:
            make_private_folder(folder)
        assert raised.value.filename == str(path)
        path.chmod(0o755)
    folder.parent.chmod(0o1777)  # as /tmp: nobody can put another folder in its place
    make_private_folder(folder)
    folder.chmod(0o1777)
    with pytest.raises(PermissionError, match="mode 1777"):
        make_private_folder(folder)


@posix
@pytest.mark.parametrize("whose", ["folder", "around"])
def test_a_folder_of_another_user_is_refused(tmp_path, give_away, whose):
    folder = tmp_path / "around" / "folder"
    make_private_folder(folder)
    give_away(folder if whose == "folder" else folder.parent)
    with pytest.raises(PermissionError, match="it belongs to another user"):
        require_private_folder(folder)


def test_a_folder_behind_a_link(tmp_path):
    (tmp_path / "elsewhere" / "kernels").mkdir(parents=True)
    make_private_folder(tmp_path / "elsewhere" / "kernels")
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    make_private_folder(tmp_path / "cache" / "kernels")  # the cache folder is the user's own choice
    (tmp_path / "tuned").symlink_to(tmp_path / "elsewhere" / "kernels")
    with pytest.raises(PermissionError, match="symbolic link"):
        make_private_folder(tmp_path / "tuned")


def test_what_is_no_folder_and_what_is_missing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        make_private_folder(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        make_private_folder(tmp_path / "file" / "below")
    with pytest.raises(FileNotFoundError):
        require_private_folder(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


@posix
def test_files_that_others_can_have_written_are_refused(tmp_path, give_away):
    path = tmp_path / "entry"
    path.write_bytes(b"content")
    path.chmod(0o644)
    os.close(open_private(path, os.O_RDONLY))
    for bits in (0o664, 0o646):
        path.chmod(bits)
        with pytest.raises(PermissionError, match="other users can write to it"):
            open_private(path, os.O_RDONLY)
    path.chmod(0o644)
    give_away(path)
    with pytest.raises(PermissionError, match="another user"):
        open_private(path, os.O_RDONLY)


@posix
def test_links_folders_and_devices_are_no_files(tmp_path):
    (tmp_path / "target").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "folder").mkdir()
    for path, why in ((tmp_path / "link", "link"), (tmp_path / "folder", "regular"), (Path(os.devnull), "regular")):
        with pytest.raises(PermissionError, match=why):
            open_private(path, os.O_RDONLY)


@posix
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT | os.O_APPEND])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, flags):
    os.mkfifo(tmp_path / "pipe")

    def refused() -> bool:
        try:
            open_private(tmp_path / "pipe", flags)
        except PermissionError as error:
            return "regular" in str(error)
        return False

    assert holds_in_forked_child(refused)


@posix
def test_nothing_stays_open(tmp_path):
    (tmp_path / "folder").mkdir()
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        with pytest.raises(PermissionError):
            open_private(tmp_path / "folder", os.O_RDONLY)
    assert len(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe\x00", b"[Infinity]", b"-Infinity", b"NaN", b"1" * 10_000, b"[" * 10**5 + b"]" * 10**5],
    ids=lambda text: repr(text[:12]),
)
def test_whatever_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_json_is_read():
    assert parse_json(b'{"a": [1, 2.5, null, "\xc3\x97"]}') == {"a": [1, 2.5, None, "×"]}
