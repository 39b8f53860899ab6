"""Everything an engine consists of while it is started, put together and taken apart in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Sequence

from . import _native
from .config import Config
from .errors import ConfigError
from .events import Events
from .flights import Flights
from .handshake import HandshakeServer, Identity, Limits, format_address
from .handshake.fields import ENGINE_ID_SIZE
from .hosts import is_wildcard, numeric, primary_address
from .notifications import NotificationQueue
from .peers import Peers
from .registry import Registry
from .runtime import Runtime
from .serving import Serving
from .threads import NativeThreads
from .topology import Topology

__all__ = ["Assembly", "check_devices"]

_logger = logging.getLogger(__name__)

_abandoned: set[asyncio.Task[None]] = set()
"""Engines that were collected without having been closed, while they close."""


def check_devices(devices: str | Sequence[str], config: Config) -> list[str]:
    """The names of the devices to open; :class:`~aioflagcx.errors.ConfigError` for others."""
    if devices == "auto":
        devices = config.devices
    if not isinstance(devices, str):
        devices = ",".join(devices)
    return config.replace(devices=devices).devices.split(",")


class Assembly:
    """From :meth:`Engine.start` to :meth:`Engine.close`; made by :meth:`open`."""

    runtime: Runtime
    registry: Registry
    peers: Peers
    serving: Serving
    server: HandshakeServer

    def __init__(self) -> None:
        self._teardown = contextlib.AsyncExitStack()
        self._native: _native.TransferEngine | None = None
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy, whose threads, sockets and peers are not its."""
        return os.getpid() != self._pid

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        advertise: str | None,
        devices: list[str],
        config: Config,
        queue: NotificationQueue,
    ) -> Assembly:
        """Open devices and sockets, in the running loop.

        Raises :class:`~aioflagcx.errors.ConfigError`; then nothing is left open.
        """
        self = cls()
        try:
            await self._open(host, port, advertise, devices, config, queue)
        except BaseException:
            await self.close()
            raise
        return self

    async def _open(
        self,
        host: str,
        port: int,
        advertise: str | None,
        devices: list[str],
        config: Config,
        queue: NotificationQueue,
    ) -> None:
        if config.log_level is not None:
            logging.getLogger("aioflagcx").setLevel(config.log_level)
        loop = asyncio.get_running_loop()
        bound = await numeric(host)
        name = advertise
        if name is None:
            name = primary_address(6 if ":" in bound else 4) if is_wildcard(bound) else host
        name = name[1:-1] if name.startswith("[") else name
        identity = Identity(secrets.token_bytes(ENGINE_ID_SIZE), format_address(name, port))

        # In order of opening: each step's undoing is done after those of all later steps.
        undo = self._teardown
        threads = NativeThreads("aioflagcx")
        undo.callback(threads.close)
        connecting = NativeThreads("aioflagcx-connect")
        undo.callback(connecting.close)
        native = self._native = await _open_native(threads, devices, config, bound, name)
        undo.push_async_callback(self._end_native, threads)
        flights = Flights(loop, config.drain_timeout)
        undo.callback(flights.close)
        events = Events(loop, native, flights)
        undo.callback(events.close)
        self.runtime = Runtime(
            loop=loop,
            config=config,
            limits=Limits.from_config(config),
            identity=identity,
            native=native,
            threads=threads,
            connecting=connecting,
            flights=flights,
            events=events,
        )
        undo.callback(queue.close)
        self.serving = Serving(self.runtime, queue)
        topology = await threads.run(Topology.read)
        self.registry = Registry(native, threads, self.serving.push_tables, topology)
        undo.push_async_callback(self.registry.close)
        self.server = HandshakeServer(
            bound,
            port,
            identity=identity,
            secret=config.auth_secret,
            limits=self.runtime.limits,
            handler=self.serving,
        )
        undo.push_async_callback(self.server.close)
        undo.push_async_callback(self.serving.close)
        undo.callback(self.server.stop)
        self.peers = Peers(self.runtime)
        undo.push_async_callback(self.peers.close)
        undo.push_async_callback(flights.stop_all)
        await self.server.bind()
        identity = Identity(identity.engine_id, format_address(name, self.server.port))
        self.runtime.identity = self.server.identity = identity
        await self.server.start()
        _logger.info(
            "engine %s listens as %s on %s (%s)",
            identity.engine_id.hex(),
            identity.session_id,
            ", ".join(native.devices),
            native.device_choice,
        )

    async def close(self) -> None:
        """Stop all transfers, say goodbye, fence the peers, free everything."""
        await self._teardown.aclose()

    async def _end_native(self, threads: NativeThreads) -> None:
        in_use = await threads.run(self._close_native)
        if hasattr(self, "registry"):  # opening may have failed before
            self.registry.closed(in_use)

    def _close_native(self) -> list[int]:
        """Blocks until no native thread touches any memory. Its caller holds this object, and
        with it the memory, until then. The ids of regions that stopped peers may still touch."""
        return [] if self._native is None else self._native.close()

    def __del__(self) -> None:
        # Not closed, as the loop ended before: registered memory must not be freed under the
        # native threads.
        in_use = self._close_native()
        if in_use:
            self.registry.closed(in_use)

    def abandon(self) -> None:
        """:meth:`close` for an engine that nobody holds any more; from any thread."""
        loop = self.runtime.loop
        try:
            loop.call_soon_threadsafe(self._close_later)
        except RuntimeError:  # the loop is closed, so only threads and memory are left
            self._close_native()
            self.runtime.threads.close()
            self.runtime.connecting.close()

    def _close_later(self) -> None:
        task = self.runtime.loop.create_task(self.close())
        _abandoned.add(task)
        task.add_done_callback(_abandoned.discard)


async def _open_native(
    threads: NativeThreads, devices: list[str], config: Config, bound: str, advertised: str
) -> _native.TransferEngine:
    bind_address = config.bind_address or bound
    if is_wildcard(bind_address):
        advertise_address = await numeric(advertised)
    else:
        advertise_address = bind_address
    opened: list[_native.TransferEngine] = []

    def open_devices() -> None:
        engine = _native.TransferEngine(
            devices=devices,
            bind_address=bind_address,
            advertise_address=advertise_address,
            soft_paths=config.soft_paths,
            soft_streams=config.soft_streams,
            allow_ptrace=config.allow_ptrace,
            gid_index=config.gid_index,
            traffic_class=config.traffic_class,
            service_level=config.service_level,
            qp_timeout=config.qp_timeout,
            qp_retry_count=config.qp_retry_count,
            relaxed_ordering=config.relaxed_ordering,
            slice_size=config.slice_size,
            workers_per_device=config.workers_per_device or 0,
            qps_per_endpoint=config.qps_per_endpoint or 0,
            max_wr_per_qp=config.max_wr_per_qp,
            max_inflight_bytes_per_endpoint=config.max_inflight_bytes_per_endpoint,
            post_batch=config.post_batch,
            spin_us=config.spin_us,
            retry_count=config.retry_count,
            rnr_retry=config.rnr_retry,
            keepalive_interval=config.keepalive_interval,
            keepalive_timeout=config.keepalive_timeout,
        )
        opened.append(engine)

    try:
        await threads.run(open_devices)
    except asyncio.CancelledError:
        for engine in opened:  # it was too late to stop it
            threads.submit(engine.close)
        raise
    except _native.NativeError as error:
        raise ConfigError(
            f"the devices {', '.join(devices)} could not be opened: {error.call}: {error.detail}",
            cause=error,
        ) from error
    return opened[0]
