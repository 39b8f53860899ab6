"""Hello and authentication, as one state machine for each side and without any I/O.

Both sides prove that they know the secret by an HMAC-SHA256 over both nonces and both engine
ids. The label keeps one side's proof from being sent back as the other's. Without a secret
the proofs are empty and the messages are the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets

from ..errors import (
    AioFlagcxError,
    AuthenticationError,
    ConnectError,
    HandshakeRejected,
    ProtocolError,
)
from .codec import UnknownKind
from .fields import ENGINE_ID_SIZE, NONCE_SIZE, clip, printable
from .messages import Auth, AuthReply, Error, Hello, HelloReply, Message

__all__ = [
    "INITIATOR_LABEL",
    "PROTOCOL_VERSIONS",
    "RESPONDER_LABEL",
    "Identity",
    "Initiator",
    "Responder",
    "error_from_reply",
    "error_to_reply",
    "proof",
]

PROTOCOL_VERSIONS = (1,)
"""The versions spoken here, best last."""

INITIATOR_LABEL = b"aioflagcx handshake 1 initiator\0"
"""What the initiator's proof starts with."""

RESPONDER_LABEL = b"aioflagcx handshake 1 responder\0"
"""What the responder's proof starts with."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """Who an engine is."""

    engine_id: bytes
    """Random, new at every start."""

    session_id: str
    """Where its handshake server listens."""

    def __post_init__(self) -> None:
        if len(self.engine_id) != ENGINE_ID_SIZE:
            raise ValueError(f"engine_id has {len(self.engine_id)} bytes, not {ENGINE_ID_SIZE}")


def proof(
    secret: str | None,
    label: bytes,
    *,
    initiator_nonce: bytes,
    responder_nonce: bytes,
    initiator_engine_id: bytes,
    responder_engine_id: bytes,
) -> bytes:
    """HMAC-SHA256 (RFC 2104) that shows knowledge of ``secret``; empty when there is none."""
    if secret is None:
        return b""
    text = label + initiator_nonce + responder_nonce + initiator_engine_id + responder_engine_id
    return hmac.new(secret.encode(), text, hashlib.sha256).digest()


def error_from_reply(error: Error, peer: str | None) -> ConnectError:
    """The exception that an error reply stands for."""
    kinds: dict[str, tuple[type[ConnectError], str]] = {
        "rejected": (HandshakeRejected, "the peer rejected the request"),
        "authentication": (AuthenticationError, "the peer refused our authentication"),
        "protocol": (ProtocolError, "the peer could not make sense of what we sent"),
        "unsupported": (ProtocolError, "the peer does not support what we sent"),
    }
    kind, words = kinds.get(error.code, (ConnectError, "the peer failed to handle the request"))
    return kind(
        f"{words}: {printable(error.message)}",
        peer=peer,
        cause=f"error code {printable(error.code)}",
    )


def error_to_reply(error: AioFlagcxError) -> Error:
    """The error reply that makes the peer raise the same type, as far as there is a code."""
    if isinstance(error, HandshakeRejected):
        code = "rejected"
    elif isinstance(error, AuthenticationError):
        code = "authentication"
    elif isinstance(error, ProtocolError):
        code = "protocol"
    else:
        code = "internal"
    return Error(code=code, message=clip(error.message))


class Initiator:
    """The side that opened the connection: hello, then auth."""

    def __init__(
        self, identity: Identity, secret: str | None, *, nonce: bytes | None = None
    ) -> None:
        self._secret = secret
        self._hello = Hello(
            versions=PROTOCOL_VERSIONS,
            engine_id=identity.engine_id,
            session_id=identity.session_id,
            nonce=secrets.token_bytes(NONCE_SIZE) if nonce is None else nonce,
        )
        self.peer: Identity | None = None
        """The responder, once it has introduced itself."""
        self.done = False
        """Both sides have accepted each other."""

    def start(self) -> Hello:
        """The first message to send."""
        return self._hello

    def receive(self, message: Message | UnknownKind) -> Auth | None:
        """Take a reply, give the next request or None when done.

        Raises :class:`~aioflagcx.errors.ConnectError` or a subclass; the connection is then of
        no more use.
        """
        if isinstance(message, Error):
            raise error_from_reply(message, self.peer.session_id if self.peer else None)
        if isinstance(message, HelloReply) and self.peer is None:
            return self._receive_hello(message)
        if isinstance(message, AuthReply) and self.peer is not None and not self.done:
            self.done = True
            return None
        raise ProtocolError(f"the peer sent {_name(message)} instead of the reply that was due")

    def _receive_hello(self, reply: HelloReply) -> Auth:
        if reply.version not in PROTOCOL_VERSIONS:
            raise ProtocolError(f"the peer chose version {reply.version}, which we did not offer")
        nonces_and_ids = {
            "initiator_nonce": self._hello.nonce,
            "responder_nonce": reply.nonce,
            "initiator_engine_id": self._hello.engine_id,
            "responder_engine_id": reply.engine_id,
        }
        _verify(reply.mac, proof(self._secret, RESPONDER_LABEL, **nonces_and_ids), reply.session_id)
        self.peer = Identity(reply.engine_id, reply.session_id)
        return Auth(mac=proof(self._secret, INITIATOR_LABEL, **nonces_and_ids))


class Responder:
    """The side that accepted the connection: answers hello, then auth."""

    def __init__(
        self, identity: Identity, secret: str | None, *, nonce: bytes | None = None
    ) -> None:
        self._identity = identity
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_SIZE) if nonce is None else nonce
        self._expected: bytes | None = None
        self.peer: Identity | None = None
        """The initiator as it introduced itself; proven only when ``done``."""
        self.done = False
        """Both sides have accepted each other."""

    def receive(self, message: Message | UnknownKind) -> HelloReply | AuthReply | Error:
        """Take a request, give its reply; after an Error the connection is to be closed."""
        if isinstance(message, Hello) and self._expected is None:
            return self._receive_hello(message)
        if isinstance(message, Auth) and self._expected is not None and not self.done:
            try:
                _verify(message.mac, self._expected, None)
            except AuthenticationError as error:
                return error_to_reply(error)
            self.done = True
            return AuthReply()
        return Error(code="protocol", message=f"{_name(message)} before authentication")

    def _receive_hello(self, hello: Hello) -> HelloReply | Error:
        common = set(hello.versions) & set(PROTOCOL_VERSIONS)
        if not common:
            ours = ", ".join(map(str, PROTOCOL_VERSIONS))
            theirs = ", ".join(map(str, hello.versions))
            return Error(
                code="unsupported", message=f"no common version: we speak {ours}, not {theirs}"
            )
        self.peer = Identity(hello.engine_id, hello.session_id)
        nonces_and_ids = {
            "initiator_nonce": hello.nonce,
            "responder_nonce": self._nonce,
            "initiator_engine_id": hello.engine_id,
            "responder_engine_id": self._identity.engine_id,
        }
        self._expected = proof(self._secret, INITIATOR_LABEL, **nonces_and_ids)
        return HelloReply(
            version=max(common),
            engine_id=self._identity.engine_id,
            session_id=self._identity.session_id,
            nonce=self._nonce,
            mac=proof(self._secret, RESPONDER_LABEL, **nonces_and_ids),
        )


def _verify(mac: bytes, expected: bytes, peer: str | None) -> None:
    """Raise AuthenticationError, saying which side lacks the secret, unless the proof is right."""
    if hmac.compare_digest(mac, expected):
        return
    if not mac:
        words = "we require auth_secret and the other engine has none"
    elif not expected:
        words = "the other engine requires auth_secret and we have none"
    else:
        words = "the two engines have different values of auth_secret"
    raise AuthenticationError(f"{words}: set AIOFLAGCX_AUTH_SECRET alike on both", peer=peer)


def _name(message: Message | UnknownKind) -> str:
    return printable(message.kind if isinstance(message, UnknownKind) else message.KIND)
