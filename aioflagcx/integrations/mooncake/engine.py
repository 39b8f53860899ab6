"""Mooncake's ``TransferEngine``: calls that block and answer with codes, on the blocking engine."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Sequence

from ...errors import ConfigError, EngineClosed
from ...sync import Engine
from ...topology import Topology
from .answers import Answering, answers
from .opened import Opened, Process
from .settings import Settings
from .topology import local_topology
from .transfers import Pieces
from .types import TransferNotify
from .types import TransferOpcode as _TransferOpcode

__all__ = ["TransferEngine"]

_NO_NOTIFIES: list[TransferNotify] = []

_inherited: list[object] = []
"""What a forked child has copies of. Kept, as taking it apart is the parent's business."""


class TransferEngine(Answering):
    """Moves memory between processes, by addresses; peers are "host:port" of ``get_rpc_port``.

    Every method can be called on any thread. None raises, except for what a signal handler does
    (Ctrl-C): they answer with a code, and the reason is logged and told by :meth:`last_error`.
    Transfers are over within ``Config.transfer_timeout`` (or MC_TRANSFER_TIMEOUT) and a second for
    each GiB. They wait without the GIL.
    """

    TransferOpcode = _TransferOpcode

    def __init__(self) -> None:
        """Nothing is opened before :meth:`initialize`."""
        super().__init__()
        # By process id. No lock, which a fork could find taken: each use is one operation.
        self._processes: dict[int, Process] = {}

    # Life ------------------------------------------------------------------------------------

    @answers(-1)
    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str | None
    ) -> int:
        """Open devices and listen; 0, or -1.

        ``local_hostname``: by what peers reach this host; empty for its primary address. A port
        after it counts only when MC_LEGACY_RPC_PORT_BINDING is set. ``metadata_server``:
        "P2PHANDSHAKE". ``protocol``: "rdma" or "tcp". ``device_name``: RDMA devices, comma
        separated; empty for all.

        The same arguments again are a success, others are refused while it is open. After a
        failure it can be called again.
        """
        settings = Settings.from_arguments(local_hostname, metadata_server, protocol, device_name)
        process = self._process()
        with process.changing:
            if process.opened is not None:
                if process.opened.settings != settings:
                    raise ConfigError("the engine is initialized already, with other arguments")
                return 0
            engine = Engine(
                settings.host,
                settings.port,
                advertise=settings.advertise,
                devices=settings.devices,
                config=settings.config,
            )
            try:
                engine.start()
                process.opened = Opened(engine, settings)
            except ConfigError as error:
                raise settings.explained(error) from error
            finally:
                if process.opened is None:
                    engine.close()
        return 0

    @answers(-1)
    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str | None,
        metadata_type: str,
    ) -> int:
        """:meth:`initialize`; ``metadata_type`` tells kinds of metadata servers apart."""
        return self.initialize(local_hostname, metadata_server, protocol, device_name)

    @answers(-1)
    def get_rpc_port(self) -> int:
        """The port for peers, -1 before :meth:`initialize`."""
        return self._opened().engine.rpc_port

    @answers(-1)
    def close(self) -> int:
        """End all transfers, let nobody reach any memory here, and return when that is so.

        Mooncake has no such call: there the engine ends when it is collected. So does this one,
        but then in the background.
        """
        process = self._process()
        with process.changing:
            if process.opened is not None:
                try:
                    process.opened.engine.close()
                finally:
                    process.opened = None  # closed, too, when a signal handler has raised
        return 0

    def __del__(self) -> None:
        processes = getattr(self, "_processes", {})
        process = processes.pop(os.getpid(), None)
        if process is not None and process.opened is not None:
            process.opened.engine._abandon()
        _inherited.extend(processes.values())

    # Memory ----------------------------------------------------------------------------------

    @answers(-1)
    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Let peers read and write ``capacity`` bytes from ``buffer_addr``; 0, or -1.

        The memory must stay until it is unregistered: nothing here owns it. An address that is
        registered already is refused; ranges may overlap otherwise. ``location``: what it is next
        to, "cpu:N" or "cuda:N"; any other is taken for "*".
        """
        address, size = operator.index(buffer_addr), operator.index(capacity)
        self._opened().memory.add([address], [size], location)
        return 0

    @answers(-1)
    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """:meth:`register_memory` of all of them or none."""
        addresses, sizes = _integers(buffer_addresses), _integers(capacities)
        self._opened().memory.add(addresses, sizes, location)
        return 0

    @answers(-1)
    def unregister_memory(self, buffer_addr: int) -> int:
        """When this answers 0, no peer can reach the memory; it may be freed.

        -1 when nothing is registered at that address, or when a transfer of ours or a stopped
        peer holds it for 5 s: then it must not be freed, and another call waits again.
        """
        self._opened().memory.remove(operator.index(buffer_addr))
        return 0

    @answers(-1)
    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """:meth:`unregister_memory` for all, also after one has failed; 0 if none has."""
        self._opened().memory.remove_all(_integers(buffer_addresses))
        return 0

    @answers(0)
    def get_first_buffer_address(self, segment_name: str) -> int:
        """The address of what the peer "host:port" registered first; 0 if there is nothing, or if
        it does not answer within 5 s."""
        session = self._opened().reach(segment_name)
        first = min(session.all_regions, key=lambda region: region._id, default=None)
        return 0 if first is None else first.addr

    @answers(0)
    def allocate_managed_buffer(self, length: int) -> int:
        """The address of ``length`` bytes that peers can reach; 0 on failure."""
        return self._opened().buffers.allocate(operator.index(length))

    @answers(-1)
    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Take back what :meth:`allocate_managed_buffer` gave for that length; 0, or -1."""
        self._opened().buffers.free(operator.index(buffer_addr), operator.index(length))
        return 0

    @answers(-1)
    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes | str, length: int) -> int:
        """Copy ``length`` of the bytes into a managed buffer or registered memory; 0, or -1.

        Text is copied as UTF-8.
        """
        source = memoryview(src_ptr.encode() if isinstance(src_ptr, str) else src_ptr).cast("B")
        count = operator.index(length)
        if not 0 <= count <= len(source):
            raise ValueError(f"length {count} of {len(source)} bytes")
        self._opened().bytes_at(dest_address, count)[:] = source[:count]
        return 0

    @answers(b"")
    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """A copy of bytes of a managed buffer or registered memory; b"" on failure."""
        return bytes(self._opened().bytes_at(source_address, operator.index(length)))

    # Transfers -------------------------------------------------------------------------------

    @answers(-1)
    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Copy from our memory into the peer's. 0: it is there. -1: and nothing more will."""
        pieces = Pieces.one(buffer, peer_buffer_address, length)
        self._opened().transfers.run(_TransferOpcode.Write, target_hostname, pieces)
        return 0

    @answers(-1)
    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Copy from the peer's memory into ours. 0: it is here. -1: and nothing more will."""
        pieces = Pieces.one(buffer, peer_buffer_address, length)
        self._opened().transfers.run(_TransferOpcode.Read, target_hostname, pieces)
        return 0

    @answers(-1)
    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: _TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Either way; ``notify`` reaches the peer after the data has been moved, if it was."""
        pieces = Pieces.one(buffer, peer_buffer_address, length)
        self._opened().transfers.run(opcode, target_hostname, pieces, notify)
        return 0

    @answers(-1)
    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """:meth:`transfer_sync_write` of several pieces at once: 0 only if all are there."""
        pieces = Pieces.several(buffers, peer_buffer_addresses, lengths)
        self._opened().transfers.run(_TransferOpcode.Write, target_hostname, pieces)
        return 0

    @answers(-1)
    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """:meth:`transfer_sync_read` of several pieces at once: 0 only if all are here."""
        pieces = Pieces.several(buffers, peer_buffer_addresses, lengths)
        self._opened().transfers.run(_TransferOpcode.Read, target_hostname, pieces)
        return 0

    @answers(-1)
    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """:meth:`transfer_sync` of several pieces at once."""
        pieces = Pieces.several(buffers, peer_buffer_addresses, lengths)
        self._opened().transfers.run(opcode, target_hostname, pieces, notify)
        return 0

    @answers(0)
    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Begin a write; its id for :meth:`transfer_check_status`, 0 on failure."""
        pieces = Pieces.one(buffer, peer_buffer_address, length)
        return self._opened().transfers.submit(_TransferOpcode.Write, target_hostname, pieces)

    @answers(0)
    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Begin a write of several pieces; one id for all of them, 0 on failure."""
        pieces = Pieces.several(buffers, peer_buffer_addresses, lengths)
        return self._opened().transfers.submit(_TransferOpcode.Write, target_hostname, pieces)

    @answers(0)
    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Begin a read of several pieces; one id for all of them, 0 on failure."""
        pieces = Pieces.several(buffers, peer_buffer_addresses, lengths)
        return self._opened().transfers.submit(_TransferOpcode.Read, target_hostname, pieces)

    @answers(0)
    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _TransferOpcode,
        transport_hint: str = "",
    ) -> int:
        """Begin either; one id for all pieces, 0 on failure."""
        pieces = Pieces.several(buffers, peer_buffer_addresses, lengths)
        return self._opened().transfers.submit(opcode, target_hostname, pieces)

    @answers(-1)
    def transfer_check_status(self, batch_id: int) -> int:
        """0 pending, 1 done, -1 failed, -2 timed out; all but 0 free the id, for all its pieces.

        An id that is unknown or freed answers -1.
        """
        try:
            return int(self._opened().transfers.submitted.done(batch_id))
        except TimeoutError as error:
            self._failed("transfer_check_status", error)
            return -2

    @answers(-1)
    def get_batch_transfer_status(self, batch_ids: Iterable[int]) -> int:
        """Wait until all of them have ended, and free them; 0 if all are done, else -1."""
        self._opened().transfers.submitted.wait(batch_ids)
        return 0

    # Peers -----------------------------------------------------------------------------------

    @answers(-1)
    def send_probe(self, peer_server_name: str) -> int:
        """0 if the peer "host:port" answers within 5 s, else -1."""
        self._opened().reach(peer_server_name)
        return 0

    @answers(_NO_NOTIFIES)
    def get_notifies(self) -> list[TransferNotify]:
        """What has come from peers since the last call, in order; none before initialization."""
        return [
            TransferNotify(one.name, one.payload.decode(errors="surrogateescape"))
            for one in self._opened().engine.notifications().get_all()
        ]

    @answers("{}")
    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON: for each NUMA node "cpu:N" and GPU "cuda:N", the nearest RDMA devices and the rest.

        ``device_name``: those to look at, comma separated; all without it.
        """
        names = [name.strip() for name in (device_name or "").split(",") if name.strip()]
        return json.dumps(local_topology(Topology.read(), names))

    # For what is Mooncake's alone ------------------------------------------------------------

    def get_engine(self) -> None:
        """Mooncake's C++ engine: there is none. Its store, given this, opens one of its own."""

    @answers(-1)
    def warmup_efa_segment(self, segment_name: str) -> int:
        """0: as without AWS EFA devices, there is nothing to warm up."""
        return 0

    # State -----------------------------------------------------------------------------------

    def _process(self) -> Process:
        pid = os.getpid()
        return self._processes.get(pid) or self._processes.setdefault(pid, Process())

    def _opened(self) -> Opened:
        opened = self._process().opened
        if opened is None:
            raise EngineClosed("the engine is not initialized in this process, or closed")
        return opened


def _integers(values: Iterable[int]) -> list[int]:
    return [operator.index(value) for value in values]
