"""Every tunable of the library, as one frozen object that is read once.

A field's unit, its reason and the values it accepts are kept with the field, as dataclass
metadata; docs/configuration.md shows the same table.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import ConfigError

__all__ = ["ENVIRONMENT_PREFIX", "SOFT_PATHS", "Config", "accepted_values", "format_size"]

ENVIRONMENT_PREFIX = "AIOFLAGCX_"
"""Every environment variable that starts with this must name a field of :class:`Config`."""

SOFT_PATHS = ("process", "local", "tcp")
"""What ``soft_paths`` may hold, in the order in which the soft device prefers them."""

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_KiB = 1024
_MiB = 1024 * _KiB
_GiB = 1024 * _MiB
_DAY = 86_400.0
_SIZE = re.compile(r"([0-9]+)\s*(B|KiB|MiB|GiB)?", re.ASCII)
_FLAGS = dict.fromkeys(("yes", "true", "on", "1"), True) | dict.fromkeys(
    ("no", "false", "off", "0"), False
)
_SIZE_FACTORS = {"B": 1, "KiB": _KiB, "MiB": _MiB, "GiB": _GiB}
_MAX_SOFT_DEVICES = 16
_SOFT_DEVICES = re.compile(r"soft:([1-9][0-9]?)", re.ASCII)
_DEVICE_NAME = re.compile(r"[A-Za-z0-9*?\[][A-Za-z0-9_.:*?\[\]-]*", re.ASCII)


def _setting(
    default: object,
    kind: str,
    unit: str,
    reason: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    optional: bool = False,
    secret: bool = False,
) -> Any:
    """A dataclass field whose metadata says how it is parsed, checked and documented.

    ``kind`` is "size", "count", "seconds", "flag", "text" or "names"; ``optional`` admits None.
    """
    metadata = {
        "kind": kind,
        "unit": unit,
        "reason": reason,
        "min": minimum,
        "max": maximum,
        "optional": optional,
        "secret": secret,
    }
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of an engine. Immutable; :meth:`replace` gives a changed copy.

    Raises :class:`~aioflagcx.errors.ConfigError` when a value has the wrong type, is out of
    range, or contradicts another field.
    """

    slice_size: int = _setting(
        64 * _KiB,
        "size",
        "bytes",
        "Most bytes of one work request: large enough that per-request cost vanishes, small "
        "enough that transfers take turns and a failed slice is cheap to repeat.",
        minimum=64,
        maximum=_GiB,
    )
    workers_per_device: int | None = _setting(
        None,
        "count",
        "threads",
        "Native threads that post and poll for one device; none: one for a NIC, which it "
        "saturates, and one for each core, at most 4, for the soft device, whose data they copy.",
        minimum=1,
        maximum=64,
        optional=True,
    )
    qps_per_endpoint: int | None = _setting(
        None,
        "count",
        "queue pairs",
        "Queue pairs between one local and one remote device; more spread one peer's traffic "
        "over threads, NIC processing units and network paths. None: one for each worker.",
        minimum=1,
        maximum=64,
        optional=True,
    )
    max_wr_per_qp: int = _setting(
        256,
        "count",
        "work requests",
        "Send queue depth of a queue pair: enough to cover the round trip, and what a device "
        "must flush when the queue pair fails.",
        minimum=1,
        maximum=32_768,
    )
    max_inflight_bytes_per_endpoint: int = _setting(
        8 * _MiB,
        "size",
        "bytes",
        "Bytes posted but not completed per endpoint: above the bandwidth-delay product of "
        "400 Gb/s, and a bound on how long draining a cancelled transfer takes.",
        minimum=64,
        maximum=64 * _GiB,
    )
    post_batch: int = _setting(
        16,
        "count",
        "work requests",
        "Work requests posted per endpoint per round of a worker; bounds how long one peer "
        "holds a worker.",
        minimum=1,
        maximum=4_096,
    )
    spin_us: int = _setting(
        20,
        "count",
        "microseconds",
        "How long a worker polls before it sleeps on the completion channel: saves the wake-up "
        "between back-to-back transfers; 0 sleeps at once.",
        minimum=0,
        maximum=1_000_000,
    )
    connect_timeout: float = _setting(
        5.0,
        "seconds",
        "seconds",
        "Time for TCP connect, hello, authentication and connect; also how long a server keeps "
        "a connection that has not authenticated.",
        minimum=0.001,
        maximum=_DAY,
    )
    transfer_timeout: float | None = _setting(
        30.0,
        "seconds",
        "seconds",
        "Default timeout of a transfer from call to completion; none: no limit.",
        minimum=0.001,
        maximum=_DAY,
        optional=True,
    )
    drain_timeout: float = _setting(
        1.0,
        "seconds",
        "seconds",
        "How long a stopped transfer waits for its posted slices, and for the peer's fence, "
        "before the queue pair is put into the error state.",
        minimum=0.001,
        maximum=3_600.0,
    )
    keepalive_interval: float = _setting(
        1.0,
        "seconds",
        "seconds",
        "Longest pause between two signs of life to a peer, in both directions; those to all peers "
        "go out together.",
        minimum=0.01,
        maximum=3_600.0,
    )
    keepalive_timeout: float = _setting(
        5.0,
        "seconds",
        "seconds",
        "Silence after which a peer counts as lost: several intervals, so that one lost packet "
        "and its retransmission do not end a session.",
        minimum=0.02,
        maximum=_DAY,
    )
    retry_count: int = _setting(
        3,
        "count",
        "times",
        "How often a transfer tries again on a rail that failed under it; it fails when that is "
        "used up and no other rail that is up has tries left.",
        minimum=0,
        maximum=255,
    )
    rnr_retry: int = _setting(
        7,
        "count",
        "times",
        "Repeats after receiver-not-ready, as in verbs: 7 means no limit, since a peer that is "
        "merely slow is not a failure.",
        minimum=0,
        maximum=7,
    )
    handshake_max_frame: int = _setting(
        16 * _MiB,
        "size",
        "bytes",
        "Largest control frame: room for the table of 200,000 regions, and a bound on what one "
        "peer can make us buffer.",
        minimum=4 * _KiB,
        maximum=_GiB,
    )
    handshake_max_frame_unauthenticated: int = _setting(
        4 * _KiB,
        "size",
        "bytes",
        "Largest control frame before authentication: a stranger costs next to no memory.",
        minimum=_KiB,
        maximum=_MiB,
    )
    auth_secret: str | None = _setting(
        None,
        "text",
        "text",
        "Secret that both engines must share, 32 or more random characters; none: no "
        "authentication. Never shown by repr().",
        optional=True,
        secret=True,
    )
    notification_queue_length: int = _setting(
        65_536,
        "count",
        "notifications",
        "Notifications waiting to be consumed; beyond it senders get NotifyRefused instead of "
        "the process growing.",
        minimum=1,
        maximum=2**31 - 1,
    )
    notification_queue_bytes: int = _setting(
        64 * _MiB,
        "size",
        "bytes",
        "Names and payloads waiting to be consumed, as a second bound for large ones.",
        minimum=1,
        maximum=64 * _GiB,
    )
    notification_max_payload: int = _setting(
        _MiB,
        "size",
        "bytes",
        "Largest payload of one notification: what is larger belongs into a transfer.",
        minimum=0,
        maximum=_GiB,
    )
    devices: str = _setting(
        "auto",
        "text",
        "names",
        "Devices to open, comma separated: auto takes every active RDMA port or, without any, the "
        "soft device; names and patterns of RDMA ports; soft, or soft:N for N soft devices.",
    )
    soft_paths: tuple[str, ...] = _setting(
        SOFT_PATHS,
        "names",
        "names",
        "Ways the soft device may reach a peer, any of process, local, tcp; fewer for tests "
        "and diagnosis.",
    )
    soft_streams: int = _setting(
        2,
        "count",
        "TCP streams",
        "TCP streams per queue pair of the soft device: one core copies for each, and a lost "
        "packet stalls only one.",
        minimum=1,
        maximum=64,
    )
    allow_ptrace: bool = _setting(
        False,
        "flag",
        "yes or no",
        "Lets every process of the same user copy into this one, for hosts where Yama's "
        "ptrace_scope is 1 and the same-host path would be refused; for the whole process, for "
        "good (prctl PR_SET_PTRACER_ANY).",
    )
    gid_index: int | None = _setting(
        None,
        "count",
        "index",
        "Entry of the RDMA port's GID table that queue pairs use; none: RoCE v2 with an IPv4 "
        "address, else with a global IPv6 address, link-local only when nothing else exists.",
        minimum=0,
        maximum=255,
        optional=True,
    )
    traffic_class: int = _setting(
        0,
        "count",
        "traffic class",
        "Of RDMA packets with a global header: for RoCE v2 the IP header's DSCP and ECN bits, by "
        "which switches tell lossless traffic.",
        minimum=0,
        maximum=255,
    )
    service_level: int = _setting(
        0,
        "count",
        "service level",
        "Of RDMA packets: chooses the InfiniBand virtual lane, or the Ethernet priority.",
        minimum=0,
        maximum=15,
    )
    qp_timeout: int = _setting(
        16,
        "count",
        "exponent",
        "How long a NIC waits for an acknowledgement, 4.096 us * 2**qp_timeout, as in "
        "ibv_modify_qp(3): 16 is 0.27 s, beyond a short loss of the link.",
        minimum=1,
        maximum=31,
    )
    qp_retry_count: int = _setting(
        6,
        "count",
        "times",
        "How often a NIC repeats a request that is not acknowledged before the queue pair fails; "
        "Soft-RoCE takes 7 for no limit.",
        minimum=0,
        maximum=7,
    )
    relaxed_ordering: bool = _setting(
        False,
        "flag",
        "yes or no",
        "Lets NICs store what peers write in any order (IBV_ACCESS_RELAXED_ORDERING), which some "
        "hosts need for full speed; each write without a notification then ends with a small read "
        "on each queue pair it used.",
    )
    bind_address: str | None = _setting(
        None,
        "text",
        "IP address",
        "Address that native listeners (data streams, keepalive) bind; none: the engine's host.",
        optional=True,
    )
    log_level: str | None = _setting(
        None,
        "text",
        "level name",
        "Level of the aioflagcx logger, set only when given, since logging belongs to the "
        "application.",
        optional=True,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, _checked(field, value))
            except ValueError:
                raise ConfigError(_rejected(field, field.name, value)) from None
        self._check_together()

    def _check_together(self) -> None:
        """Raise when two fields, each fine by itself, contradict each other."""
        self._require_at_most("slice_size", "max_inflight_bytes_per_endpoint")
        self._require_at_most("handshake_max_frame_unauthenticated", "handshake_max_frame")
        self._require_at_most("notification_max_payload", "notification_queue_bytes")
        if self.keepalive_timeout <= self.keepalive_interval:
            raise ConfigError(
                f"keepalive_timeout={self.keepalive_timeout} must be greater than "
                f"keepalive_interval={self.keepalive_interval}, else a healthy peer counts as lost"
            )
        if self.notification_max_payload + 2 * _KiB > self.handshake_max_frame:
            raise ConfigError(
                f"notification_max_payload={self.notification_max_payload} does not fit into a "
                f"control frame: it must be at least 2 KiB less than "
                f"handshake_max_frame={self.handshake_max_frame}"
            )
        queue_depth = self.max_wr_per_qp * (self.qps_per_endpoint or 1)
        if self.post_batch > queue_depth:
            raise ConfigError(
                f"post_batch={self.post_batch} must not be greater than "
                f"max_wr_per_qp * qps_per_endpoint = {queue_depth}"
            )

    def _require_at_most(self, smaller: str, larger: str) -> None:
        low, high = getattr(self, smaller), getattr(self, larger)
        if low > high:
            raise ConfigError(f"{smaller}={low} must not be greater than {larger}={high}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """The settings in the ``AIOFLAGCX_*`` variables of ``environ``, defaults for the rest.

        The variable of a field is its name in upper case behind the prefix. Sizes take bytes
        or a suffix KiB, MiB or GiB; "none" stands for None; lists are comma separated.

        Raises :class:`~aioflagcx.errors.ConfigError` naming the variable for an unknown one
        with the prefix and for a value that cannot be parsed or is out of range.
        """
        known = {ENVIRONMENT_PREFIX + f.name.upper(): f for f in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        for variable in sorted(environ):
            if not variable.startswith(ENVIRONMENT_PREFIX):
                continue
            field = known.get(variable)
            if field is None:
                raise ConfigError(_unknown(variable, known, "environment variable"))
            text = environ[variable]
            try:
                values[field.name] = _checked(field, _parsed(field, text))
            except ValueError:
                raise ConfigError(_rejected(field, variable, text)) from None
        try:
            return cls(**values)  # type: ignore[arg-type]
        except ConfigError as error:
            # Each value was accepted by itself, so two of them contradict each other.
            given = ", ".join(ENVIRONMENT_PREFIX + name.upper() for name in values)
            raise ConfigError(f"{error.message} (set by {given})") from None

    def replace(self, **changes: Any) -> Config:
        """A copy with ``changes``, checked like a new one; an unknown name is a ConfigError."""
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                raise ConfigError(_unknown(name, names, "Config field"))
        return dataclasses.replace(self, **changes)


def accepted_values(field: dataclasses.Field[Any]) -> str:
    """In words, what a field of :class:`Config` accepts; used by errors and by the docs."""
    meta = field.metadata
    special = {
        "devices": '"auto", or names such as mlx5_0, patterns such as mlx5_*, soft, or soft:N '
        f"with N from 1 to {_MAX_SOFT_DEVICES}",
        "soft_paths": f"one or more of {', '.join(SOFT_PATHS)}",
        "bind_address": "an IPv4 or IPv6 address",
        "log_level": f"one of {', '.join(_LOG_LEVELS)}",
        "auth_secret": "a non-empty text",
    }.get(field.name)
    if special is not None:
        words = special
    else:
        low, high = meta["min"], meta["max"]
        if meta["kind"] == "flag":
            words = "True or False; yes, true, on, 1, no, false, off or 0"
        elif meta["kind"] == "size":
            words = f"{format_size(low)} to {format_size(high)}, in bytes or with KiB, MiB, GiB"
        else:
            words = f"{low:g} to {high:g}" if meta["kind"] == "seconds" else f"{low} to {high}"
    return words + (', or "none"' if meta["optional"] else "")


def format_size(size: int) -> str:
    """``size`` in the largest unit that divides it: 65536 is "64 KiB", 1000 is "1000"."""
    for suffix in ("GiB", "MiB", "KiB"):
        factor = _SIZE_FACTORS[suffix]
        if size and size % factor == 0:
            return f"{size // factor} {suffix}"
    return str(size)


def _unknown(name: str, known: Iterable[str], what: str) -> str:
    """The message for a name that is not known, with the nearest one that is."""
    # Compared without the prefix, which would make every variable look alike.
    names = {k.removeprefix(ENVIRONMENT_PREFIX): k for k in known}
    nearest = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), names, n=1)
    hint = f'did you mean "{names[nearest[0]]}"?' if nearest else f"known are {', '.join(known)}"
    return f'unknown {what} "{name}": {hint}'


def _rejected(field: dataclasses.Field[Any], label: str, value: object) -> str:
    """The message for a value that is not accepted; a secret is not shown."""
    shown = "" if field.metadata["secret"] else f"={value!r}"
    return f"{label}{shown}: accepted is {accepted_values(field)}"


def _parsed(field: dataclasses.Field[Any], text: str) -> object:
    """What an environment variable's text stands for, not yet checked; or ValueError."""
    meta = field.metadata
    if meta["optional"] and text.strip().lower() == "none":
        return None
    if meta["kind"] == "names":
        return tuple(name.strip() for name in text.split(","))
    if meta["kind"] == "text":
        return text if meta["secret"] else text.strip()
    if meta["kind"] == "flag":
        return _FLAGS.get(text.strip().lower(), text)
    if meta["kind"] == "seconds":
        return float(text)
    if meta["kind"] == "size":
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise ValueError(text)
        return int(match[1]) * _SIZE_FACTORS[match[2] or "B"]
    return int(text)


def _checked(field: dataclasses.Field[Any], value: object) -> object:
    """``value`` in the field's own type; ValueError when the field does not accept it."""
    meta = field.metadata
    if value is None and meta["optional"]:
        return None
    if meta["kind"] == "names":
        return _checked_paths(value)
    if meta["kind"] == "text":
        return _checked_text(field.name, value)
    if meta["kind"] == "flag":
        if type(value) is not bool:
            raise ValueError(value)
        return value
    # Exact types: bool is an int, and "True seconds" is a mistake worth telling.
    if type(value) is not int and not (meta["kind"] == "seconds" and type(value) is float):
        raise ValueError(value)
    if not meta["min"] <= value <= meta["max"]:  # also false for NaN
        raise ValueError(value)
    return float(value) if meta["kind"] == "seconds" else value


def _checked_paths(value: object) -> tuple[str, ...]:
    if not isinstance(value, tuple | list) or not all(path in SOFT_PATHS for path in value):
        raise ValueError(value)
    if not value or len(set(value)) != len(value):
        raise ValueError(value)
    return tuple(value)


def _checked_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(value)
    value.encode()  # UnicodeEncodeError, a ValueError, for what the environment cannot decode
    if name == "bind_address":
        ipaddress.ip_address(value)
    elif name == "log_level":
        value = value.upper()
        if value not in _LOG_LEVELS:
            raise ValueError(value)
    elif name == "devices":
        names = [part.strip() for part in value.split(",")]
        if not all(_DEVICE_NAME.fullmatch(part) for part in names):
            raise ValueError(value)
        if len(set(names)) != len(names) or ("auto" in names and len(names) > 1):
            raise ValueError(value)
        for count in (part for part in names if part.startswith("soft:")):
            match = _SOFT_DEVICES.fullmatch(count)
            if match is None or int(match[1]) > _MAX_SOFT_DEVICES:
                raise ValueError(value)
        value = ",".join(names)
    return value
