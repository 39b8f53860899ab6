"""Builds the guest: Debian's own kernel, unpacked, and an initramfs of busybox and modules.

    python tests/guest/make_guest.py

The kernel package is downloaded by apt-get and unpacked, never installed. What is made lies in
build/softroce/, or in the folder that the environment variable RXE_DIR names, and is made again
when apt knows of another kernel or when `init` or this file changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Guest", "GuestError", "make_guest", "run_tool", "unpack_kernel"]

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]

MODULES = (
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_console",
    "virtio_blk",
    "squashfs",
    "crc32_generic",  # rxe's checksum, which it looks up by name
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
    "veth",
)
"""Loaded at boot, after what they depend on."""

FOLDERS = (
    *("arch", "crypto", "fs", "lib", "net"),
    *("drivers/block", "drivers/char", "drivers/infiniband", "drivers/net", "drivers/virtio"),
)
"""Where those are, and what commands in the guest may load. Most of the package is elsewhere."""

DECOMPRESSORS = {b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""How a compressed kernel begins, and what unpacks it."""


class GuestError(Exception):
    """The guest cannot be built or started."""


class Kernel(NamedTuple):
    """A kernel package."""

    package: str
    version: str


class Guest(NamedTuple):
    """What QEMU boots."""

    folder: Path

    @property
    def vmlinux(self) -> Path:
        return self.folder / "vmlinux"

    @property
    def initramfs(self) -> Path:
        return self.folder / "initramfs"

    @property
    def modules(self) -> Path:
        """To be /lib/modules of the guest."""
        return self.folder / "lib/modules"

    @property
    def origin(self) -> Path:
        """Says what the guest was made from."""
        return self.folder / "origin"


def make_guest() -> Guest:
    """The guest of apt's kernel and this folder's files, made first where it is not there.

    Raises GuestError when it cannot be made on this machine.
    """
    if platform.machine() != "x86_64" or not shutil.which("apt-get"):
        raise GuestError("the guest is made of Debian's kernel for amd64: it needs apt and x86_64")
    work = Path(os.environ.get("RXE_DIR") or CHECKOUT / "build/softroce").absolute()
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work / "lock"):
        try:
            return _make(_newest_kernel(), work)
        except _ArchiveError as error:
            # apt has no lists yet, or they are older than the archive.
            print(f"{error}\nonce more after apt-get update", file=sys.stderr)
            run_tool("apt-get", "--quiet", "update")
            return _make(_newest_kernel(), work)


class _ArchiveError(GuestError):
    """apt could not name or download the kernel."""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep out other builds in the same folder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(kernel: Kernel, work: Path) -> Guest:
    guest = Guest(work / "guest")
    origin = f"{kernel.package} {kernel.version}\n{_digest()}\n"
    if guest.origin.is_file() and guest.origin.read_text() == origin:
        return guest
    package = _download(kernel, work)
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        made = Guest(Path(scratch, "guest"))
        _assemble(package, made, Path(scratch, "package"))
        made.origin.write_text(origin)
        shutil.rmtree(guest.folder, ignore_errors=True)
        made.folder.rename(guest.folder)
    print(f"made a guest of {kernel.package} {kernel.version}", file=sys.stderr)
    return guest


def _digest() -> str:
    """Changes with whatever the guest is made from besides the kernel."""
    inputs = (Path(__file__), HERE / "init", _busybox())
    return hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()


def _busybox() -> Path:
    path = shutil.which("busybox")
    if not path:
        raise GuestError("no busybox: scripts/system-deps softroce installs what is missing")
    return Path(path)


def _newest_kernel() -> Kernel:
    """What Debian's package of the current kernel depends on."""
    try:
        shown = run_tool("apt-cache", "show", "--no-all-versions", "linux-image-amd64").decode()
    except GuestError as error:
        raise _ArchiveError(*error.args) from None
    found = re.search(r"^Depends: (linux-image-\S+) \(= (\S+)\)", shown, re.MULTILINE)
    if not found:
        raise _ArchiveError("apt knows no kernel that linux-image-amd64 depends on")
    return Kernel(*found.groups())


def _download(kernel: Kernel, work: Path) -> Path:
    """The kernel's package file, which is kept: only another kernel is downloaded again."""
    folder = work / "package" / f"{kernel.package}_{kernel.version}"
    if not folder.is_dir():
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.parent.mkdir()
        with tempfile.TemporaryDirectory(dir=work) as partial:
            # As root, apt would download as a user of its own, who may not reach this folder.
            options = ("--quiet", "-o", "APT::Sandbox::User=root")
            package = f"{kernel.package}={kernel.version}"
            try:
                run_tool("apt-get", *options, "download", package, cwd=partial)
            except GuestError as error:
                raise _ArchiveError(*error.args) from None
            shutil.copytree(partial, folder)
    (path,) = folder.glob("*.deb")
    return path


def _assemble(package: Path, guest: Guest, scratch: Path) -> None:
    """Make the guest of a kernel package."""
    run_tool("dpkg-deb", "--extract", str(package), str(scratch))
    (image,) = (scratch / "boot").glob("vmlinuz-*")
    (unpacked,) = (scratch / "lib/modules").iterdir()
    modules = guest.modules / unpacked.name
    for folder in FOLDERS:
        target = modules / "kernel" / folder
        target.parent.mkdir(parents=True, exist_ok=True)
        (unpacked / "kernel" / folder).rename(target)
    for path in unpacked.glob("modules.*"):  # which are built in, and in which order others load
        path.rename(modules / path.name)
    run_tool("depmod", "--basedir", str(guest.folder), unpacked.name)
    guest.vmlinux.write_bytes(unpack_kernel(image.read_bytes()))
    guest.initramfs.write_bytes(_initramfs(scratch / "initramfs", guest.folder, unpacked.name))


def unpack_kernel(image: bytes) -> bytes:
    """The ELF file inside of a bzImage.

    QEMU starts it without the decompression, which takes seconds under emulation. The offsets are
    those of the real-mode kernel header, see the kernel's Documentation/arch/x86/boot.rst.
    """
    if image[0x202:0x206] != b"HdrS":
        raise GuestError("the kernel is no bzImage")
    setup_sectors = image[0x1F1]
    payload_offset, payload_length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + payload_offset
    payload = image[start : start + payload_length]
    # The size of the ELF file follows the compressed data.
    compressed, (size,) = payload[:-4], struct.unpack("<I", payload[-4:])
    for magic, command in DECOMPRESSORS.items():
        if compressed.startswith(magic):
            kernel = run_tool(command, "--decompress", "--stdout", stdin=compressed)
            if len(kernel) != size or not kernel.startswith(b"\x7fELF"):
                raise GuestError(f"the kernel does not unpack to an ELF file of {size} bytes")
            return kernel
    raise GuestError(f"the kernel is compressed in an unknown way: {compressed[:6].hex(' ')}")


def _initramfs(root: Path, base: Path, release: str) -> bytes:
    """An archive of `init`, busybox and MODULES, put together in `root`."""
    for folder in ("bin", "dev", "host", "modules", "proc", "root", "sys", "writes"):
        (root / folder).mkdir(parents=True)
    for program, name in ((_busybox(), "bin/busybox"), (HERE / "init", "init")):
        shutil.copy(program, root / name)
        (root / name).chmod(0o755)
    order: list[str] = []
    for module in MODULES:
        find = ("modprobe", "--dirname", str(base), "--set-version", release, "--show-depends")
        for line in run_tool(*find, module).decode().splitlines():
            kind, path, *_ = line.split()
            name = Path(path).name.removesuffix(".xz")
            if kind == "insmod" and name not in order:
                order.append(name)
                packed = path.endswith(".xz")
                content = run_tool("xz", "-dc", path) if packed else Path(path).read_bytes()
                (root / "modules" / name).write_bytes(content)
    (root / "modules/order").write_text("".join(f"{name}\n" for name in order))
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    make = ("cpio", "--create", "--quiet", "--format=newc", "--owner=0:0")
    return run_tool(*make, cwd=root, stdin="\n".join(names).encode())


def run_tool(*command: str, cwd: str | Path | None = None, stdin: bytes = b"") -> bytes:
    """What `command` prints. Raises GuestError with its errors when it fails."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # depmod, also for ordinary users
    try:
        done = subprocess.run(
            command, cwd=cwd, input=stdin, capture_output=True, env={**os.environ, "PATH": path}
        )
    except FileNotFoundError:
        raise GuestError(
            f"no {command[0]}: scripts/system-deps softroce installs what is missing"
        ) from None
    if done.returncode != 0:
        errors = done.stderr.decode(errors="replace").strip()
        raise GuestError(f"{shlex.join(command)}: exit status {done.returncode}\n{errors}")
    return done.stdout


if __name__ == "__main__":
    try:
        make_guest()
    except GuestError as error:
        sys.exit(f"{sys.argv[0]}: {error}")
