"""The boundary to the native core. Every call that can take over 10 us releases the GIL.

No native thread ever calls into Python: results come through `TransferEngine.poll_events`
after `TransferEngine.event_fd` became readable. Calls marked *blocking* may wait for the kernel,
a peer or a thread, and belong on an executor thread; all others return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Attributes = dict[str, int | str | bytes | list[str]]
"""What one queue pair tells its peer; also holds "rail": int, the rail it belongs to."""

# Access bits of regions, as in the MR table (docs/handshake.md).
ACCESS_REMOTE_READ: Final[int]
ACCESS_REMOTE_WRITE: Final[int]

OP_WRITE: Final[int]
OP_READ: Final[int]

# TransferEvent.status
STATUS_DONE: Final[int]
STATUS_CANCELLED: Final[int]  # by Task.cancel or Task.abort
STATUS_REMOTE_ACCESS: Final[int]  # the peer refused a slice: key, bounds or access
STATUS_RETRY_EXCEEDED: Final[int]  # endpoints failed more often than retry_count
STATUS_LOCAL: Final[int]  # a local verbs error (protection, queue pair, device)
STATUS_LOST: Final[int]  # Session.fail

class NativeError(RuntimeError):
    """A failed system or verbs call."""

    call: str
    errno: int  # 0 when no system call failed
    detail: str

class AddressMiss(LookupError):
    """A piece lies in no single region that grants the access."""

    index: int
    address: int
    length: int

class LocalMiss(AddressMiss): ...
class RemoteMiss(AddressMiss): ...

class RegionRecord(NamedTuple):
    id: int
    addr: int
    size: int
    access: int  # ACCESS_* bits
    name: str | None

class Epoch(NamedTuple):
    """The unit of failure: one rail's queue pairs of one attempt to connect it."""

    attempt: int
    rail: int

class TransferEvent(NamedTuple):
    """A transfer that did not succeed, now locally quiet: nothing of it is posted or copied."""

    id: int
    status: int
    unknown_epochs: list[Epoch]
    """On these, slices ended with unknown outcome: the peer may still write (or read) for them
    until it has fenced those epochs. Empty: remotely quiet already."""
    cause: str  # "IBV_WC_REM_ACCESS_ERR" and so on, or ""
    vendor_err: int
    rail: str  # "local->remote" device names of a slice that ended badly, or ""
    address: int  # remote address of the slice that failed, 0 when none
    length: int

class EndpointDown(NamedTuple):
    """A rail failed: its queue pairs are in ERR and flushed. Waiting slices go to other rails that
    are up, or stay queued until one is."""

    session: int
    epoch: Epoch
    cause: str
    vendor_err: int
    rail: str
    path: bool  # the path is at fault, not one request, and not Task.abort

class KeepaliveLost(NamedTuple):
    owner: int  # Session.id or Responder.id
    reason: str

class Immediates(NamedTuple):
    """All immediates that Responder.expect asked for have come."""

    responder: int
    imm: int

class PathNote(NamedTuple):
    """Why a rail takes `path` and not a better one that both sides allow."""

    session: int
    rail: str
    path: str
    note: str

class DeviceNote(NamedTuple):
    """What a device of ours reports by itself."""

    device: int  # index in TransferEngine.devices
    name: str
    text: str
    bad: bool  # its rails have been taken down
    back: bool  # its rails can be connected again

Event = TransferEvent | EndpointDown | KeepaliveLost | Immediates | PathNote | DeviceNote

class Allocation:
    """A memfd of fixed size, mapped shared. Exports `size` bytes by the buffer protocol; memory
    and file go with the object and the last buffer, on a thread of their own.

    Regions registered inside it tell their devices the file, so that peers may map it."""

    size: int  # bytes asked for
    mapped: int  # bytes of whole pages
    page: int  # bytes of one

    def __init__(self, size: int, huge_pages: bool) -> None:
        """*Blocking*: waits until earlier ones have given their pages back. Has no pages of its
        own yet. NativeError."""

    def populate(self, offset: int, length: int) -> None:
        """*Blocking.* Make that part's pages exist, zero-filled; `offset` begins a page.
        NativeError with ENOSPC or ENOMEM when there are none."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

class TransferEngine:
    event_fd: int
    devices: list[str]
    device_descriptions: list[Attributes]  # what peers match theirs with: name, kind, subnet
    device_choice: str  # why these, for the log
    takes_device_memory: bool
    """Whether memory of GPUs can be registered."""
    keepalive_port: int
    generation: int
    """Of the MR table: grows with every registration and deregistration."""

    def __init__(
        self,
        *,
        devices: Sequence[str],  # as in Config.devices
        bind_address: str,  # numeric
        advertise_address: str,  # numeric; what peers are told to connect data streams to
        soft_paths: Sequence[str],
        soft_streams: int,
        allow_ptrace: bool,
        gid_index: int | None,
        traffic_class: int,
        service_level: int,
        qp_timeout: int,
        qp_retry_count: int,
        relaxed_ordering: bool,
        slice_size: int,
        workers_per_device: int,  # 0: what the device asks for
        qps_per_endpoint: int,  # 0: one for each worker
        max_wr_per_qp: int,
        max_inflight_bytes_per_endpoint: int,
        post_batch: int,
        spin_us: int,
        retry_count: int,
        rnr_retry: int,
        keepalive_interval: float,
        keepalive_timeout: float,
    ) -> None: ...
    def close(self) -> list[int]:
        """*Blocking.* Joins every thread and frees everything; idempotent. No other *blocking*
        call of this engine may be under way; later calls raise NativeError. The ids of regions
        that a peer, stopped inside a copy, may still touch: their memory must not be freed."""

    def device_down(self, device: int) -> bool:
        """Whether nothing gets through by it until a DeviceNote says that it is back."""

    def poll_events(self) -> tuple[list[int], list[Event]]:
        """Clears the wake-up; (ids of transfers that succeeded, everything else), in order."""

    # Memory ---------------------------------------------------------------------------------
    def check_mapped(
        self, addrs: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int8]:
        """*Blocking.* For each range: 0 not mapped as a whole, 1 readable, 2 readable and
        writable, by /proc/self/maps; 3 memory of a GPU, by the CUDA driver."""

    def register(
        self,
        addrs: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        access: int,  # ACCESS_* bits, of all of them
        writable: npt.NDArray[np.bool_],  # locally
        names: Sequence[str | None],
        nearest: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.uint64]:
        """*Blocking.* Region ids of that many ranges. All or nothing; NativeError names the
        range. `nearest`: the devices next to each, by bits of their indices; 0: any. Transfers
        take these as long as one of them is up."""

    def revoke(self, region_ids: Sequence[int]) -> None:
        """Leave the tables: no new transfer finds these regions."""

    def deregister(self, region_ids: Sequence[int], timeout: float | None) -> bool:
        """*Blocking.* revoke, wait for own transfers that use the regions, then invalidate the
        keys and wait until no peer touches them. False: timed out, call again to go on. Done
        regions stay done; unknown ids are ignored."""

    def table_since(self, generation: int) -> tuple[bool, int, int, bytes, bytes]:
        """(full, base, generation, table, removed) for a metadata message; 0 gives the whole."""

    def region(self, region_id: int) -> RegionRecord | None: ...
    def rkey(self, region_id: int, addr: int) -> int | None:
        """The first device's key for the region's byte at `addr`."""

    # Peers ----------------------------------------------------------------------------------
    def create_session(self, peer: str) -> Session: ...
    def create_responder(
        self, peer: str, keepalive_interval: float, keepalive_timeout: float
    ) -> Responder:
        """Both of the initiator, in seconds: how often it wants to hear from us, and how long it
        may be silent before it is lost."""

    def stats(self) -> dict[str, int]:
        """Counters and gauges: bytes_written, bytes_read, slices_posted, slices_reposted,
        transfers_submitted, transfers_done, transfers_failed, transfers_inflight,
        bytes_inflight, regions, sessions, responders, wakeups, worker_sleeps,
        keepalive_wakeups, endpoints_failed."""

    def rail_bytes(self) -> dict[str, int]:
        """Bytes moved by each rail, by "local->remote" device names, over all sessions."""

class BlockLayout:
    """How the blocks of pools lie on both sides."""

    block_bytes: int  # that are moved for one block

    def __init__(self, spans: npt.NDArray[np.uint64], src_blocks: int, dst_blocks: int) -> None:
        """`spans`: the fields of aioflagcx.BlockSpan in their order, shape (n, 8). ValueError names
        the index of one that cannot be."""

class Request:
    """One transfer's pieces: checked, copied, resolved locally; holds its local regions."""

    bytes_total: int
    pieces: int  # after dropping zero lengths; of blocks, how many spans

    @staticmethod
    def blocks(
        engine: TransferEngine,
        layouts: list[BlockLayout],
        src: list[npt.NDArray[np.int64] | npt.NDArray[np.uint64]],
        dst: list[npt.NDArray[np.int64] | npt.NDArray[np.uint64]],
    ) -> Request:
        """A write of the blocks `src` to `dst`, for each layout.

        ValueError naming the index: no block of the pool, unequal lengths. LocalMiss: of a span's
        whole pool here."""

    def __init__(
        self,
        engine: TransferEngine,
        op: int,
        local: npt.NDArray[np.int64] | npt.NDArray[np.uint64],
        remote: npt.NDArray[np.int64] | npt.NDArray[np.uint64],
        lens: npt.NDArray[np.int64] | npt.NDArray[np.uint64],
    ) -> None:
        """1-D arrays of one shape; `lens` may have shape (1,) and then holds for all pieces.

        ValueError naming the index: negative, over 2**63, past 2**64, unequal lengths.
        LocalMiss: see AddressMiss (a read needs locally writable memory)."""

    def release(self) -> None:
        """Let go of the local regions; only for a request that was never submitted."""

class Waiter:
    """What a thread waits for; opens once."""

    is_open: bool

    def __init__(self) -> None: ...
    def open(self) -> None: ...
    def wait(self, timeout: float | None = None, *, signals: bool = True) -> bool:
        """*Blocking.* Until it is open, at most `timeout` seconds; whether it is. Raises what a
        Python signal handler raises meanwhile; those run as soon as their signal has come, or,
        without `signals`, afterwards."""

class Task:
    bytes_total: int
    bytes_done: int
    imm_count: int  # immediates sent; valid once done
    def cancel(self) -> None:
        """Drop what is not posted; the task ends when its posted slices have completed."""

    def abort(self) -> None:
        """cancel, and move queue pairs that hold posted slices of it to ERR: the task ends as
        soon as they are flushed. Other transfers' slices on them are re-posted after the next
        establish."""

class Session:
    """The initiator's side of one control connection."""

    id: int
    rails: int
    """Of matching devices; until `meet` one for each of ours, to one of the peer's choice."""
    generation: int  # of the peer's table as known here
    region_count: int

    def meet(self, devices: Sequence[Attributes]) -> None:
        """The peer's device_descriptions, by which rails are made; before any other call.
        NativeError (EPROTO) when they make no sense."""

    def rail_name(self, rail: int) -> str:
        """ "local->remote" device names; "device 1" and so on as long as the peer's is unknown."""

    def local_device(self, rail: int) -> int:
        """Index of the device of ours."""

    def prepare(self, attempt: int, rail: int) -> list[Attributes]:
        """*Blocking.* Fresh queue pairs in INIT of a rail that is down; an earlier attempt that
        was prepared but never established is dropped. NativeError when the device refuses."""

    def establish(
        self, attempt: int, rail: int, queue_pairs: Sequence[Attributes], timeout: float
    ) -> str:
        """*Blocking.* To RTS against the peer's reply; returns the path. NativeError when it
        fails (errno ETIMEDOUT, ECONNREFUSED, EPROTO, ..., 0 when the peer has refused the rail);
        the attempt is then dropped."""

    def watch(self, host: str, port: int, token: bytes) -> None:
        """Start the keepalive towards the peer; `host` numeric."""

    def update_table(
        self, full: bool, base: int, generation: int, table: bytes, removed: bytes
    ) -> bool:
        """*Blocking.* False: `base` is not what we have, ask for the whole. ValueError: broken."""

    def find(self, addr: int, size: int) -> RegionRecord | None:
        """The smallest region holding the whole range."""

    def rkey(self, addr: int, size: int) -> int | None:
        """The first rail's key for the byte at `addr`, in the region that `find` gives."""

    def find_name(self, name: str) -> RegionRecord | None: ...
    def region_at(self, index: int) -> RegionRecord:
        """By position, 0 <= index < region_count, in address order; IndexError."""

    def names(self) -> list[str]: ...
    def submit(
        self,
        request: Request,
        id: int,
        imm: int = 0,
        now: bool = False,
        waiter: Waiter | None = None,
    ) -> Task | None:
        """Queue it; the request is consumed. RemoteMiss and NativeError leave it usable.

        None: it is done, copied by this call, with no event to follow. `now` asks for that; it
        happens to small transfers without `imm` by a path that copies, when nothing else is under
        way.

        `imm` nonzero: after all data has landed, a zero-length WRITE_WITH_IMM on each queue pair
        used (one when there is no data); done means those have been acknowledged too.

        With a `waiter`, a fresh one, success opens it and no event tells of it; failure is told as
        without, and leaves it shut. NativeError when the waiter was taken back."""

    def take_back(self, waiter: Waiter) -> Task | None:
        """The task submitted here with `waiter`: an event tells how it ends, or did so already.
        None: it has landed; or it was not submitted yet, and `submit` refuses it from now on."""

    def fenced(self, attempt: int, rail: int) -> None:
        """The peer has confirmed the fence of this epoch: transfers whose slices were posted
        again elsewhere may now end as done. Call it before establishing the rail anew."""

    def fail(self) -> None:
        """The peer is lost: every task ends with STATUS_LOST once flushed; submit raises
        NativeError from now on; the keepalive stops."""

    def close(self) -> None:
        """*Blocking.* fail, wait until flushed, free the queue pairs. Idempotent."""

class Responder:
    """The target's side of one control connection."""

    id: int
    keepalive_token: bytes  # 16 bytes, for the reply
    path: str  # the first that the latest accept holds possible; the initiator has the last word

    def accept(self, attempt: int, rails: Sequence[Attributes]) -> list[Attributes]:
        """*Blocking.* Queue pairs for the initiator's, in RTS with receives posted; fences
        earlier attempts of the same rails first. A rail that cannot be is refused as a whole, by
        "refused" in place of attributes. NativeError when the request makes no sense."""

    def fence(self, attempt: int, rail: int, timeout: float) -> bool:
        """*Blocking.* True: this epoch can touch no memory here any more. False after `timeout`
        seconds: the peer, on this host, is stopped inside a copy; call again to wait on."""

    def fence_all(self, timeout: float) -> bool:
        """*Blocking.* The same for all there are. The keepalive goes on."""

    def expect(self, imm: int, count: int) -> bool:
        """True: `count` immediates `imm` have come (and are forgotten). Else an Immediates
        event follows when they have."""

    def forget(self, imm: int) -> None:
        """Drop an expectation."""

    def close(self, timeout: float) -> bool:
        """*Blocking.* Fence everything, end the keepalive; False as for `fence`. Idempotent. The
        native keepalive thread fences by itself as soon as the initiator is lost, before
        KeepaliveLost is seen."""

# For tests only ---------------------------------------------------------------------------------
def testing_unplug(engine: TransferEngine, device: int) -> None:
    """As if a NIC were taken out of the host while it works: the listeners of this soft device, by
    its index in `devices`, close, its queue pairs go to ERR, and it makes no new ones (ENODEV)."""

def testing_plug(engine: TransferEngine, device: int) -> None:
    """It is back; sessions find that out by themselves."""
