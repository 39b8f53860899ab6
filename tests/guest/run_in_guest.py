"""Runs one command in the guest, on this machine's files and with Soft-RoCE devices.

    python tests/guest/run_in_guest.py -- ibv_devinfo
    python tests/guest/run_in_guest.py --shell

The command starts in the folder it is called from, as root, with an empty standard input. It can
read what this user can read; what it writes is gone with the guest, except below the folders named
by --writable. Its output appears as it is written. The exit status is the command's, 124 after
--timeout, 125 if the guest came to an end without one.

Opening a file takes a round trip to this machine, and a Python program opens thousands: with
--python, the files of the interpreter that runs this script are there as disk images.

RXE_KEEP=DIR keeps what the guest leaves behind in a new folder there: `console`, and `dmesg`, the
kernel's log at the end of the command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from make_guest import GuestError, make_guest, run_tool

__all__ = ["NO_STATUS", "TIMED_OUT", "main"]

TIMED_OUT, NO_STATUS = 124, 125

# Without "erms" and "fsrm", and with "rep_good" (112) cleared, the kernel copies memory by plain
# moves, which QEMU emulates faster than the string instructions that it would take else.
MACHINE = (
    *("-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot"),
    *("-machine", "q35,hpet=off,vmport=off,i8042=off"),
    *("-accel", "tcg,thread=multi,tb-size=512"),
    *("-cpu", "max,erms=off,fsrm=off,smap=off,smep=off"),
    *("-smp", "2"),  # a CPU for each end of a pair
    *("-m", "2G"),
    *("-device", "virtio-serial-pci"),
)
KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet clearcpuid=112"
    " init_on_alloc=0 mitigations=off audit=0"  # for speed
    " nokaslr random.trust_cpu=on tsc=reliable"  # nothing to collect or to calibrate
    " oops=panic panic=-1 reboot=t"  # all of which end QEMU, by -no-reboot
)

# Set here, lest a version manager's wrappers in this machine's PATH run in the guest.
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TMPDIR": "/run/tmp",
}


def main() -> int:
    arguments = _parse()
    environment = dict(ENVIRONMENT)
    for variable in arguments.env:
        name, given, value = variable.partition("=")
        if given or name in os.environ:
            environment[name] = value if given else os.environ[name]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        guest = make_guest()
        with contextlib.ExitStack() as stack:
            run = stack.enter_context(_run_folder())
            options = ["-kernel", str(guest.vmlinux), "-initrd", str(guest.initramfs)]
            options += _share("root", Path("/"), "readonly=on")
            options += _share("guest", run)
            writable = [path.absolute() for path in arguments.writable]
            for index, path in enumerate(writable):
                path.mkdir(parents=True, exist_ok=True)
                options += _share(f"writable{index}", path)
            packed = _python_folders() if arguments.python else []
            if packed:
                images = stack.enter_context(tempfile.TemporaryDirectory(dir=guest.folder.parent))
                for index, path in enumerate(packed):
                    options += _disk(path, Path(images, str(index)))

            shutil.copy(Path(__file__).with_name("setup"), run)
            settings = [f"export {name}={shlex.quote(to)}" for name, to in environment.items()]
            settings += [
                f"guest_modules={shlex.quote(str(guest.modules))}",
                f"guest_cwd={shlex.quote(os.getcwd())}",
                f"guest_pairs={arguments.pairs}",
                f"guest_shell={'yes' if arguments.shell else ''}",
                f"guest_packed=({_words(packed)})",
                f"guest_writable=({_words(writable)})",
            ]
            (run / "settings").write_text("".join(f"{line}\n" for line in settings))
            (run / "command").write_text(_script(arguments.command))
            return _boot(run, options, None if arguments.shell else arguments.timeout)
    except GuestError as error:
        _report(str(error))
        return NO_STATUS


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--timeout", type=float, default=300, metavar="SECONDS",
        help="of the guest's whole life; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--pairs", type=int, default=1, choices=range(5), metavar="N",
        help="cables, each with two devices; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--writable", action="append", default=[], type=Path, metavar="DIR",
        help="a folder of this machine that the command may write to; made if it is not there",
    )  # fmt: skip
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="a variable for the command; by its name alone: as it is set here, if it is",
    )  # fmt: skip
    parser.add_argument("--python", action="store_true", help="the command runs this Python")
    parser.add_argument("--shell", action="store_true", help="be in the guest, without --timeout")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    if arguments.shell == bool(arguments.command):
        parser.error("give either a command or --shell")
    return arguments


def _report(text: str) -> None:
    print(f"{Path(__file__).name}: {text}", file=sys.stderr)


def _end(number: int, _: FrameType | None) -> None:
    """End this process by an exception, so that the guest is ended and cleaned up after."""
    sys.exit(128 + number)


@contextlib.contextmanager
def _run_folder() -> Iterator[Path]:
    """What this machine and the guest tell each other by: a new folder, removed unless kept."""
    if keep := os.environ.get("RXE_KEEP"):
        os.makedirs(keep, exist_ok=True)
        folder = tempfile.mkdtemp(prefix="guest.", dir=keep)
        _report(f"what the guest leaves is in {folder}")
        yield Path(folder)
    else:
        with tempfile.TemporaryDirectory(prefix="guest.") as folder:
            yield Path(folder)


def _script(command: list[str]) -> str:
    """What the guest's bash runs: `command`, or itself on the terminal."""
    if command:
        return f"exec {shlex.join(command)}\n"
    columns, rows = shutil.get_terminal_size()
    return f"stty rows {rows} columns {columns}\nPS1='guest:\\w# ' exec bash --norc -i\n"


def _words(paths: Iterable[Path]) -> str:
    return shlex.join(map(str, paths))


def _share(tag: str, folder: Path, *options: str) -> list[str]:
    """QEMU's options that let the guest mount `folder` by `tag`."""
    words = (f"local,id={tag},path={_quoted(folder)},security_model=none,multidevs=remap", *options)
    return ["-fsdev", ",".join(words), "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]


def _disk(folder: Path, image: Path) -> list[str]:
    """Pack `folder`, in about a second, for the next of the guest's disks vda, vdb, and so on."""
    options = ["-noI", "-noD", "-noF", "-noX", "-no-xattrs", "-no-progress", "-quiet"]
    if not (folder / "pyvenv.cfg").exists():
        # Hundreds of megabytes of a standard library that nothing here imports.
        options += ["-wildcards", "-e", "test", "site-packages", "config-*"]
    run_tool("mksquashfs", str(folder), str(image), *options)
    return ["-drive", f"file={_quoted(image)},if=virtio,format=raw,readonly=on"]


def _quoted(path: Path) -> str:
    """As a value of one of QEMU's options."""
    return str(path).replace(",", ",,")


def _python_folders() -> list[Path]:
    """Where this interpreter has its modules: the standard library, and its virtual environment."""
    folders = [Path(sysconfig.get_path("stdlib"))]
    if sys.prefix != sys.base_prefix:
        folders.append(Path(sys.prefix))
    return folders


def _boot(run: Path, options: list[str], timeout: float | None) -> int:
    """Run the guest to its end; what to exit with. Without `timeout` it is on the terminal."""
    command = [
        # The guest must not outlive this process, however that ends.
        *("setpriv", "--pdeathsig", "KILL", "--", "qemu-system-x86_64", *MACHINE, *options),
        *("-append", KERNEL_ARGUMENTS, "-serial", f"file:{_quoted(run / 'console')}"),
    ]
    if timeout is None:
        command += ["-chardev", "stdio,id=terminal,signal=off"]
        command += ["-device", "virtconsole,chardev=terminal"]
        source, output = None, None
    else:
        for name, descriptor in (("out", 1), ("err", 2)):
            command += ["-chardev", f"file,id={name},path=/dev/fd/{descriptor},append=on"]
            command += ["-device", f"virtserialport,chardev={name},name={name}"]
        source, output = subprocess.DEVNULL, subprocess.PIPE

    started = time.monotonic()
    timed_out = False
    try:
        qemu = subprocess.Popen(command, stdin=source, stdout=output, stderr=output)
    except FileNotFoundError:
        raise GuestError("no setpriv: util-linux has it") from None
    pumps = [
        threading.Thread(target=_pump, args=(pipe.fileno(), stream.fileno()))
        for pipe, stream in ((qemu.stdout, sys.stdout), (qemu.stderr, sys.stderr))
        if pipe
    ]
    try:
        for pump in pumps:
            pump.start()
        qemu.wait(timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        qemu.kill()
        qemu.wait()
        for pump in pumps:
            if pump.ident is not None:
                pump.join()
    return _outcome(run, timed_out, time.monotonic() - started)


def _pump(source: int, target: int) -> None:
    """Write to `target` what comes from `source`, until that ends."""
    wanted = True
    while data := os.read(source, 1 << 16):
        try:
            while wanted and data:
                data = data[os.write(target, data) :]
        except OSError:
            wanted = False  # nobody reads it any more, and the guest goes on


def _outcome(run: Path, timed_out: bool, seconds: float) -> int:
    """What to exit with, now that QEMU has ended after `seconds`. Says what went wrong."""

    def left(name: str) -> str:
        path = run / name
        return path.read_text(errors="replace").strip() if path.exists() else ""

    ready = left("ready")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    up = f"up after {float(ready):.0f} s" if ready else "never up"
    cpu = usage.ru_utime + usage.ru_stime
    _report(f"{up}, ended after {seconds:.0f} s, {cpu:.0f} s of CPU")
    if not timed_out and (status := left("status")):
        return int(status)
    what = "did not end in time" if timed_out else "ended without a status"
    console = "\n".join(left("console").splitlines()[-100:])  # two stack traces
    _report(f"the guest {what}; the end of its console:\n{console}")
    return TIMED_OUT if timed_out else NO_STATUS


if __name__ == "__main__":
    sys.exit(main())
