from __future__ import annotations

import struct
from pathlib import Path

import make_guest
import pytest
from make_guest import Guest, GuestError, Kernel, run_tool, unpack_kernel

ELF = b"\x7fELF" + bytes(range(256)) * 100


def image(payload: bytes) -> bytes:
    """A bzImage with two setup sectors after the first, and 40 bytes before its payload."""
    header = bytearray(3 * 512)
    header[0x1F1] = 2
    header[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", header, 0x248, 40, len(payload))
    return bytes(header) + bytes(40) + payload + b"what follows it"


@pytest.mark.parametrize("command", ["xz", "zstd"])
def test_a_kernel_is_unpacked(command: str) -> None:
    packed = run_tool(command, "--compress", "--stdout", stdin=ELF)
    assert unpack_kernel(image(packed + struct.pack("<I", len(ELF)))) == ELF


def test_what_is_no_kernel_is_an_error() -> None:
    packed = run_tool("xz", "--compress", "--stdout", stdin=ELF)
    with pytest.raises(GuestError, match="no bzImage"):
        unpack_kernel(bytes(4096))
    with pytest.raises(GuestError, match="unknown way: 42 5a 68"):
        unpack_kernel(image(b"BZh91AY"))
    with pytest.raises(GuestError, match="does not unpack"):
        unpack_kernel(image(packed + struct.pack("<I", len(ELF) + 1)))
    with pytest.raises(GuestError, match="xz --decompress"):
        unpack_kernel(image(packed[:-20] + bytes(20)))


class Archive:
    """Stands in for apt: names `kernel`, and has what is in `packages`."""

    def __init__(self, folder: Path) -> None:
        self.kernel = Kernel("linux-image-1", "1.0")
        self.packages = {self.kernel}
        self.after_update = self.kernel
        self.made: list[str] = []
        self._folder = folder

    def run_tool(self, *command: str, cwd: str | Path = "", stdin: bytes = b"") -> bytes:
        if command[:2] == ("apt-cache", "show"):
            depends = f"Depends: {self.kernel.package} (= {self.kernel.version})\n"
            return b"Package: linux-image-amd64\n" + depends.encode()
        if command[-1] == "update":
            self.kernel = self.after_update
            return b""
        assert command[-2] == "download"
        package, _, version = command[-1].partition("=")
        if Kernel(package, version) not in self.packages:
            raise GuestError(f"{package}: 404")
        Path(cwd, f"{package}.deb").touch()
        return b""

    def assemble(self, package: Path, guest: Guest, scratch: Path) -> None:
        self.made.append(package.stem)
        guest.folder.mkdir()


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    archive = Archive(tmp_path)
    monkeypatch.setenv("RXE_DIR", str(tmp_path / "work"))
    monkeypatch.setattr(make_guest, "run_tool", archive.run_tool)
    monkeypatch.setattr(make_guest, "_assemble", archive.assemble)
    return archive


def test_a_guest_is_made_once(archive: Archive, tmp_path: Path) -> None:
    assert make_guest.make_guest().folder == tmp_path / "work/guest"
    assert make_guest.make_guest().origin.read_text().startswith("linux-image-1 1.0\n")
    assert archive.made == ["linux-image-1"]


def test_another_kernel_makes_another_guest(archive: Archive) -> None:
    make_guest.make_guest()
    archive.kernel = Kernel("linux-image-2", "2.0")
    archive.packages = {archive.kernel}
    assert make_guest.make_guest().origin.read_text().startswith("linux-image-2 2.0\n")
    assert archive.made == ["linux-image-1", "linux-image-2"]


def test_other_files_make_another_guest_of_the_package_at_hand(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_guest.make_guest()
    archive.packages = set()
    monkeypatch.setattr(make_guest, "_digest", lambda: "another")
    make_guest.make_guest()
    assert archive.made == ["linux-image-1", "linux-image-1"]


def test_lists_older_than_the_archive_are_updated(archive: Archive) -> None:
    archive.after_update = Kernel("linux-image-2", "2.0")
    archive.packages = {archive.after_update}
    make_guest.make_guest()
    assert archive.made == ["linux-image-2"]


def test_a_kernel_that_cannot_be_had_is_an_error(archive: Archive) -> None:
    archive.packages = set()
    with pytest.raises(GuestError, match="404"):
        make_guest.make_guest()
    assert archive.made == []


def test_a_build_that_fails_leaves_nothing(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(package: Path, guest: Guest, scratch: Path) -> None:
        guest.folder.mkdir()
        raise GuestError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(make_guest, "_assemble", fail)
        with pytest.raises(GuestError, match="no space"):
            make_guest.make_guest()
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"lock", "package"}
    make_guest.make_guest()
    assert archive.made == ["linux-image-1"]
