"""The messages of the control plane, one frozen dataclass for each, without any I/O.

Every field is checked when a message is made, be it here or from a peer's bytes: exact type
and bounds, else :class:`ValueError` naming the field. docs/handshake.md has the same in prose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

from . import fields
from .fields import ENGINE_ID_SIZE, NONCE_SIZE, TOKEN_SIZE, Rail

__all__ = [
    "PUSHES",
    "REPLIES",
    "REQUESTS",
    "Auth",
    "AuthReply",
    "Connect",
    "ConnectReply",
    "Devices",
    "DevicesReply",
    "Error",
    "Fence",
    "FenceReply",
    "Goodbye",
    "Hello",
    "HelloReply",
    "Message",
    "Metadata",
    "MetadataUpdate",
    "Notify",
    "NotifyReply",
    "Request",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """Base of all messages."""

    KIND: ClassVar[str]
    """The name of the message on the wire; a request and its reply share it."""

    def __post_init__(self) -> None:
        for name, check in self.checks().items():
            try:
                object.__setattr__(self, name, check(getattr(self, name)))
            except ValueError as error:
                raise ValueError(f"{self.KIND}.{name}: {error}") from None

    @classmethod
    def checks(cls) -> Mapping[str, fields.Check]:
        """The fields of the body, each with the function that checks and converts its value."""
        cached = cls.__dict__.get("_checks")
        if cached is None:
            cached = {field.name: field.metadata["check"] for field in dataclasses.fields(cls)}
            cls._checks = cached  # type: ignore[attr-defined]
        checks: Mapping[str, fields.Check] = cached
        return checks

    @classmethod
    def from_body(cls, body: Mapping[str, object]) -> Message:
        """The message with this body; unknown fields are ignored, a missing one is an error."""
        for name in cls.checks():
            if name not in body:
                raise ValueError(f"{cls.KIND}.{name}: missing")
        return cls(**{name: body[name] for name in cls.checks()})

    def body(self) -> dict[str, object]:
        """The fields, ready to be packed."""
        return {name: getattr(self, name) for name in self.checks()}


R = TypeVar("R", bound=Message)


class Request(Message, Generic[R]):
    """A message that its receiver answers with a reply of one type, or with :class:`Error`."""

    REPLY: ClassVar[type[Message]]
    """The type of the reply."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HelloReply(Message):
    """The responder introduces itself and proves that it knows the secret."""

    KIND = "hello"

    version: int = fields.uint(16, minimum=1)
    """The version that both sides use from here on."""

    engine_id: bytes = fields.binary(ENGINE_ID_SIZE)
    """The responder's engine id."""

    session_id: str = fields.session_id()
    """The responder's session id."""

    nonce: bytes = fields.binary(NONCE_SIZE)
    """The responder's nonce."""

    mac: bytes = fields.binary(maximum=fields.MAX_MAC_SIZE, show=False)
    """The responder's proof; empty when it has no secret."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello(Request[HelloReply]):
    """The first message on a connection: who the initiator is and what it speaks."""

    KIND = "hello"
    REPLY = HelloReply

    versions: tuple[int, ...] = fields.versions()
    """The protocol versions the initiator speaks."""

    engine_id: bytes = fields.binary(ENGINE_ID_SIZE)
    """The initiator's engine id: random, new at every start."""

    session_id: str = fields.session_id()
    """The initiator's session id: where its own handshake server listens."""

    nonce: bytes = fields.binary(NONCE_SIZE)
    """The initiator's nonce: random, for this connection only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuthReply(Message):
    """The responder accepts the initiator; every other message is allowed from here on."""

    KIND = "auth"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auth(Request[AuthReply]):
    """The initiator proves that it knows the secret."""

    KIND = "auth"
    REPLY = AuthReply

    mac: bytes = fields.binary(maximum=fields.MAX_MAC_SIZE, show=False)
    """The initiator's proof; empty when it has no secret."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicesReply(Message):
    """What there is to make rails of on the responder's side."""

    KIND = "devices"

    devices: tuple[Rail, ...] = fields.rails()
    """The responder's devices, in the order of its MR table's keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices(Request[DevicesReply]):
    """The initiator asks for the responder's devices, to match its own with them."""

    KIND = "devices"
    REPLY = DevicesReply


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectReply(Message):
    """The responder's half of rails: its queue pairs wait for this attempt."""

    KIND = "connect"

    attempt: int = fields.uint(64)
    """The attempt this answers."""

    rails: tuple[Rail, ...] = fields.rails()
    """The responder's attributes of each of them, or why it refuses it."""

    path: str = fields.text(fields.MAX_CODE)
    """How data moves: "process", "local", "tcp" or "ibverbs"."""

    table: bytes = fields.binary(show=False)
    """The responder's whole MR table, or empty: it is still that of ``since``."""

    generation: int = fields.uint(64)
    """The generation of the responder's MR table."""

    keepalive_port: int = fields.uint(16)
    """TCP port of the responder's keepalive listener."""

    keepalive_token: bytes = fields.binary(TOKEN_SIZE, show=False)
    """What the initiator presents on that port."""

    notification_max_payload: int = fields.uint(32)
    """Largest notification payload the responder takes, in bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Connect(Request[ConnectReply]):
    """The initiator asks for a session, or to connect some of its rails anew."""

    KIND = "connect"
    REPLY = ConnectReply

    attempt: int = fields.uint(64)
    """Counts the attempts of this session; a reply to an older one is dropped."""

    rails: tuple[Rail, ...] = fields.rails()
    """The initiator's attributes of each queue pair it proposes."""

    since: int = fields.uint(64)
    """The generation of the responder's MR table that the initiator has; 0 for none."""

    keepalive_interval: float = fields.seconds()
    """Seconds that may pass between two keepalive beats, of either side."""

    keepalive_timeout: float = fields.seconds()
    """Seconds of silence after which either side gives the other up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetadataUpdate(Message):
    """The sender's MR table or what changed in it: a reply to Metadata, or a push."""

    KIND = "metadata"

    full: bool = fields.boolean()
    """True: ``table`` replaces all; False: it adds to generation ``base``."""

    base: int = fields.uint(64)
    """The generation the change starts from; 0 when full."""

    generation: int = fields.uint(64)
    """The generation the table has with this change."""

    table: bytes = fields.binary(show=False)
    """All regions, or those added, in the MR table format."""

    removed: bytes = fields.binary(multiple=8, show=False)
    """Ids of the regions removed since ``base``, u64 little-endian each; empty when full."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata(Request[MetadataUpdate]):
    """Asks for what changed in the receiver's MR table."""

    KIND = "metadata"
    REPLY = MetadataUpdate

    since: int = fields.uint(64)
    """The generation the sender has; 0 for none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotifyReply(Message):
    """Whether the application on the other side will see the notification."""

    KIND = "notify"

    accepted: bool = fields.boolean()
    """True: delivered to the notification queue."""

    reason: str = fields.text(fields.MAX_REASON)
    """Why not; empty when accepted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notify(Request[NotifyReply]):
    """A message from application to application, optionally after data."""

    KIND = "notify"
    REPLY = NotifyReply

    name: str = fields.text(fields.MAX_NAME)
    """What it is about."""

    payload: bytes = fields.binary(show=False)
    """The content."""

    imm: int = fields.uint(32)
    """Immediate value to wait for before delivery; 0 when there is none."""

    imm_count: int = fields.uint(32)
    """How many completions with that immediate to wait for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FenceReply(Message):
    """Confirms that a rail's queue pairs of an attempt can no longer touch the sender's memory."""

    KIND = "fence"

    attempt: int = fields.uint(64)
    """The attempt that is fenced."""

    rail: int = fields.uint(32)
    """The rail of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fence(Request[FenceReply]):
    """Asks to make a rail's responder queue pairs of an attempt harmless and to confirm it."""

    KIND = "fence"
    REPLY = FenceReply

    attempt: int = fields.uint(64)
    """The attempt that is meant."""

    rail: int = fields.uint(32)
    """The rail that is meant; other rails of the attempt go on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goodbye(Message):
    """The sender closes the connection on purpose; nothing follows it."""

    KIND = "goodbye"

    reason: str = fields.text(fields.MAX_REASON)
    """Why, for a human."""

    fenced: bool = fields.boolean()
    """True: none of the receiver's queue pairs can touch the sender's memory any more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Error(Message):
    """The reply to a request that failed; with request id 0, to the connection as a whole."""

    KIND = "error"

    code: str = fields.text(fields.MAX_CODE)
    """"rejected", "authentication", "protocol", "unsupported" or "internal"."""

    message: str = fields.text(fields.MAX_REASON)
    """What happened, for a human."""


def _by_kind(classes: Sequence[type[Message]]) -> dict[str, type[Message]]:
    return {message.KIND: message for message in classes}


REQUESTS: Mapping[str, type[Message]] = _by_kind(
    [Hello, Auth, Devices, Connect, Metadata, Notify, Fence]
)
"""Messages that have a request id and want a reply, by kind."""

REPLIES: Mapping[str, type[Message]] = _by_kind(
    [
        HelloReply,
        AuthReply,
        DevicesReply,
        ConnectReply,
        MetadataUpdate,
        NotifyReply,
        FenceReply,
        Error,
    ]
)
"""Messages that answer a request, by kind."""

PUSHES: Mapping[str, type[Message]] = _by_kind([MetadataUpdate, Goodbye])
"""Messages without a request id, which nobody answers, by kind."""
