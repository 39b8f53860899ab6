"""What ``TransferEngine.initialize`` is told, as settings of the engine."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
from collections.abc import Mapping

from ... import _native
from ...config import Config
from ...errors import ConfigError

__all__ = ["METADATA_SERVER", "Settings"]

METADATA_SERVER = "P2PHANDSHAKE"
"""The one metadata server there can be: none, as the engines tell each other where memory is."""

_MIN_TIMEOUT = 5
"""Seconds that Mooncake takes for any shorter MC_TRANSFER_TIMEOUT."""

_MAX_PORT = 65_535

_ALL_ADDRESSES = ("0.0.0.0", "::")
"""What a host may be told to listen at, and no peer can be told to connect to."""

_WITHOUT_RDMA = 'use protocol "tcp", or set MC_FORCE_TCP=1, to move data without an RDMA device'

_ELSEWHERE = (
    "if peers reach this host by an address that is not its own, set MC_TCP_BIND_ADDRESS to one "
    "that is, or to 0.0.0.0"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the engine is made."""

    host: str
    """What to listen at."""

    advertise: str | None
    """What peers use to reach it; None: the host's primary address."""

    port: int
    """Of the handshake server; 0 takes a free one."""

    devices: str
    """As ``Config.devices``."""

    config: Config
    """Everything else."""

    @classmethod
    def from_arguments(
        cls,
        local_hostname: object,
        metadata_server: object,
        protocol: object,
        device_name: object,
        environ: Mapping[str, str] = os.environ,
    ) -> Settings:
        """From the arguments of ``initialize``; ConfigError says which of them cannot be."""
        if metadata_server != METADATA_SERVER:
            raise ConfigError(
                f"metadata_server {metadata_server!r}: accepted is {METADATA_SERVER!r} only, with "
                "which engines need no metadata server: address peers by host:get_rpc_port()"
            )
        if not isinstance(local_hostname, str):
            raise ConfigError(
                f"local_hostname {local_hostname!r}: accepted is the name or address by which "
                "peers reach this host"
            )
        if device_name is not None and not isinstance(device_name, str):
            raise ConfigError(f"device_name {device_name!r}: accepted are names, comma separated")
        host, port = _split(local_hostname or _ALL_ADDRESSES[0])
        config = _with_timeout(Config.from_env(environ), environ)
        return cls(
            host=environ.get("MC_TCP_BIND_ADDRESS") or host,
            advertise=None if host in _ALL_ADDRESSES else host,
            # Mooncake takes a free port, too, unless it is told to take this one.
            port=port if environ.get("MC_LEGACY_RPC_PORT_BINDING") else 0,
            devices=_devices(protocol, device_name or "", config, environ),
            config=config,
        )

    def explained(self, error: ConfigError) -> ConfigError:
        """Why the engine could not be started, with what to do about it."""
        cause = error.cause
        if isinstance(cause, socket.gaierror) or (
            isinstance(cause, OSError | _native.NativeError) and cause.errno == errno.EADDRNOTAVAIL
        ):
            return ConfigError(f"{error.message}; {_ELSEWHERE}", cause=cause)
        if self.devices.startswith("soft") or not isinstance(cause, _native.NativeError):
            return error
        return ConfigError(f'protocol "rdma": {error.message}; {_WITHOUT_RDMA}')


def _split(local_hostname: str) -> tuple[str, int]:
    """Host, without brackets, and port, 0 if none is given."""
    host, colon, port = local_hostname.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")) or local_hostname.endswith("]"):
        return local_hostname.strip("[]"), 0  # a name, or an address without a port
    if not port.isdecimal() or int(port) > _MAX_PORT:
        raise ConfigError(f"local_hostname {local_hostname!r}: {port!r} is no port")
    return host.strip("[]"), int(port)


def _with_timeout(config: Config, environ: Mapping[str, str]) -> Config:
    text = environ.get("MC_TRANSFER_TIMEOUT")
    if text is None or "AIOFLAGCX_TRANSFER_TIMEOUT" in environ:
        return config
    try:
        seconds = max(int(text), _MIN_TIMEOUT)
    except ValueError:
        raise ConfigError(f"MC_TRANSFER_TIMEOUT={text!r}: accepted are whole seconds") from None
    return config.replace(transfer_timeout=float(seconds))


def _devices(protocol: object, names: str, config: Config, environ: Mapping[str, str]) -> str:
    if protocol == "tcp" or (protocol == "rdma" and environ.get("MC_FORCE_TCP", "0") != "0"):
        # Mooncake's TCP transport looks at no device name either.
        return config.devices if config.devices.startswith("soft") else "soft"
    if protocol != "rdma":
        raise ConfigError(f'protocol {protocol!r}: accepted are "rdma" and "tcp"')
    if not names:
        return "*" if config.devices == "auto" else _rdma(config.devices)
    return _rdma(",".join(name.strip() for name in names.split(",")))


def _rdma(names: str) -> str:
    for name in names.split(","):
        if name == "auto" or name.startswith("soft"):
            raise ConfigError(
                f'protocol "rdma": device {name!r} is no RDMA device; {_WITHOUT_RDMA}'
            )
    return names
