from __future__ import annotations

import hashlib
import hmac

import pytest

from aioflagcx.errors import (
    AuthenticationError,
    ConnectError,
    HandshakeRejected,
    PeerLost,
    ProtocolError,
)
from aioflagcx.handshake.authentication import (
    INITIATOR_LABEL,
    RESPONDER_LABEL,
    Identity,
    Initiator,
    Responder,
    error_from_reply,
    error_to_reply,
    proof,
)
from aioflagcx.handshake.codec import UnknownKind
from aioflagcx.handshake.messages import Auth, AuthReply, Error, Fence, Hello, HelloReply

ALICE = Identity(b"a" * 16, "alice:1")
BOB = Identity(b"b" * 16, "bob:2")


def exchange(initiator: Initiator, responder: Responder) -> Error | None:
    """Let both talk; the responder's refusal of auth, if that is how it ends."""
    reply = responder.receive(initiator.start())
    auth = initiator.receive(reply)
    assert auth is not None
    answer = responder.receive(auth)
    if isinstance(answer, Error):
        return answer
    assert initiator.receive(answer) is None
    return None


@pytest.mark.parametrize("secret", [None, "s", "päss wörd"])
def test_the_same_secret_or_none_on_both_sides_is_accepted(secret: str | None) -> None:
    initiator, responder = Initiator(ALICE, secret), Responder(BOB, secret)
    assert exchange(initiator, responder) is None
    assert initiator.done
    assert responder.done
    assert initiator.peer == BOB
    assert responder.peer == ALICE


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ("a", "b", "different values"),
        ("a", None, "other engine has none"),
        (None, "b", "we have none"),
    ],
)
def test_secrets_that_differ_fail_at_the_initiator(
    ours: str | None, theirs: str | None, words: str
) -> None:
    initiator = Initiator(ALICE, ours)
    reply = Responder(BOB, theirs).receive(initiator.start())
    with pytest.raises(AuthenticationError, match=words):
        initiator.receive(reply)
    assert not initiator.done
    assert initiator.peer is None


@pytest.mark.parametrize("mac", [b"", b"x", bytes(32)])
def test_a_wrong_proof_of_the_initiator_is_refused(mac: bytes) -> None:
    initiator, responder = Initiator(ALICE, "s"), Responder(BOB, "s")
    responder.receive(initiator.start())
    answer = responder.receive(Auth(mac=mac))
    assert isinstance(answer, Error)
    assert answer.code == "authentication"
    assert not responder.done


def test_a_proof_where_none_is_wanted_is_refused() -> None:
    responder = Responder(BOB, None)
    responder.receive(Initiator(ALICE, None).start())
    answer = responder.receive(Auth(mac=bytes(32)))
    assert isinstance(answer, Error)
    assert answer.code == "authentication"


def test_the_responders_own_proof_sent_back_is_refused() -> None:
    responder = Responder(BOB, "s")
    reply = responder.receive(Initiator(ALICE, "s").start())
    assert isinstance(reply, HelloReply)
    assert isinstance(responder.receive(Auth(mac=reply.mac)), Error)


def test_a_recorded_exchange_cannot_be_replayed() -> None:
    initiator, responder = Initiator(ALICE, "s"), Responder(BOB, "s")
    hello = initiator.start()
    auth = initiator.receive(responder.receive(hello))
    assert auth is not None
    again = Responder(BOB, "s")
    again.receive(hello)
    assert isinstance(again.receive(auth), Error)


def test_the_proof_is_the_documented_hmac() -> None:
    nonces = {"initiator_nonce": b"1" * 32, "responder_nonce": b"2" * 32}
    ids = {"initiator_engine_id": b"3" * 16, "responder_engine_id": b"4" * 16}
    for label in (INITIATOR_LABEL, RESPONDER_LABEL):
        assert len(label) == 32
        text = label + b"1" * 32 + b"2" * 32 + b"3" * 16 + b"4" * 16
        expected = hmac.new("ä".encode(), text, hashlib.sha256).digest()
        assert proof("ä", label, **nonces, **ids) == expected
        assert proof(None, label, **nonces, **ids) == b""


def test_no_common_version_is_unsupported() -> None:
    hello = Hello(versions=[7], engine_id=bytes(16), session_id="a:1", nonce=bytes(32))
    answer = Responder(BOB, None).receive(hello)
    assert isinstance(answer, Error)
    assert answer.code == "unsupported"
    with pytest.raises(ProtocolError, match="not 7"):
        Initiator(ALICE, None).receive(answer)


def test_of_several_versions_the_best_common_one_is_chosen() -> None:
    hello = Hello(versions=[9, 1, 7], engine_id=bytes(16), session_id="a:1", nonce=bytes(32))
    reply = Responder(BOB, None).receive(hello)
    assert isinstance(reply, HelloReply)
    assert reply.version == 1


def test_a_version_that_was_not_offered_is_refused() -> None:
    reply = HelloReply(version=9, engine_id=bytes(16), session_id="b:2", nonce=bytes(32), mac=b"")
    with pytest.raises(ProtocolError, match="version 9"):
        Initiator(ALICE, None).receive(reply)


@pytest.mark.parametrize("message", [Auth(mac=b""), Fence(attempt=1, rail=0), UnknownKind("x\n")])
def test_anything_before_hello_is_refused(message: Auth | Fence | UnknownKind) -> None:
    answer = Responder(BOB, None).receive(message)
    assert isinstance(answer, Error)
    assert answer.code == "protocol"
    assert "\n" not in answer.message


def test_a_second_hello_or_auth_is_refused() -> None:
    initiator, responder = Initiator(ALICE, None), Responder(BOB, None)
    assert exchange(initiator, responder) is None
    for message in (initiator.start(), Auth(mac=b"")):
        assert isinstance(responder.receive(message), Error)


def test_replies_out_of_turn_are_refused() -> None:
    with pytest.raises(ProtocolError):
        Initiator(ALICE, None).receive(AuthReply())
    initiator, responder = Initiator(ALICE, None), Responder(BOB, None)
    reply = responder.receive(initiator.start())
    initiator.receive(reply)
    with pytest.raises(ProtocolError):
        initiator.receive(reply)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("rejected", HandshakeRejected),
        ("authentication", AuthenticationError),
        ("protocol", ProtocolError),
        ("unsupported", ProtocolError),
        ("internal", ConnectError),
        ("from version 9\n", ConnectError),
    ],
)
def test_error_codes_become_exceptions(code: str, kind: type[ConnectError]) -> None:
    error = error_from_reply(Error(code=code, message="why\nnot"), "b:2")
    assert type(error) is kind
    assert "why" in str(error)
    assert "\n" not in str(error)
    assert error.peer == "b:2"


@pytest.mark.parametrize("kind", [HandshakeRejected, AuthenticationError, ProtocolError])
def test_exceptions_come_back_as_what_they_were(kind: type[ConnectError]) -> None:
    assert type(error_from_reply(error_to_reply(kind("no")), None)) is kind


def test_other_exceptions_are_internal_errors() -> None:
    assert error_to_reply(PeerLost("x" * 5000)).code == "internal"


def test_an_engine_id_has_16_bytes() -> None:
    with pytest.raises(ValueError, match="16"):
        Identity(b"short", "a:1")
