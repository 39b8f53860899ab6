from __future__ import annotations

import pickle

import pytest

from aioflagcx import errors
from aioflagcx.errors import (
    AioFlagcxError,
    ConnectError,
    ConnectRefused,
    HandoverError,
    PeerLost,
    RemoteAddressError,
    TransferError,
    TransferTimeout,
)

ALL = [getattr(errors, name) for name in errors.__all__]

PARENTS = {
    AioFlagcxError: {
        "ConfigError",
        "RegistrationError",
        "DeregisterTimeout",
        "QuiesceTimeout",
        "EngineClosed",
        "LocalAddressError",
        "RemoteAddressError",
        "ConnectError",
        "TransferError",
        "HandoverError",
    },
    HandoverError: {"HandoverTimeout"},
    ConnectError: {
        "ConnectRefused",
        "HostUnreachable",
        "HandshakeRejected",
        "ProtocolError",
        "AuthenticationError",
        "ConnectTimeout",
    },
    TransferError: {
        "TransferTimeout",
        "TransferCancelled",
        "RemoteAccessError",
        "RetryExceeded",
        "PeerLost",
        "PeerRestarted",
        "NotifyRefused",
    },
}


def test_the_tree_is_the_documented_one() -> None:
    named = {"AioFlagcxError"}.union(*PARENTS.values())
    assert set(errors.__all__) == named
    for parent, children in PARENTS.items():
        for child in children:
            kind = getattr(errors, child)
            assert issubclass(kind, parent)
            others = set(PARENTS) - {AioFlagcxError, parent, kind}
            assert not any(issubclass(kind, other) for other in others)


@pytest.mark.parametrize("kind", ALL)
def test_the_timeouts_and_only_they_are_timeout_errors(kind: type[AioFlagcxError]) -> None:
    expected = kind.__name__ in {
        "DeregisterTimeout",
        "QuiesceTimeout",
        "ConnectTimeout",
        "TransferTimeout",
        "HandoverTimeout",
    }
    assert issubclass(kind, TimeoutError) == expected


@pytest.mark.parametrize("kind", ALL)
def test_every_class_says_when_it_is_raised_and_the_remedy(kind: type[AioFlagcxError]) -> None:
    assert kind.__doc__
    if kind is not AioFlagcxError and kind is not TransferError:
        assert "Remedy:" in kind.__doc__


@pytest.mark.parametrize("kind", ALL)
def test_every_class_survives_pickling_with_its_attributes(kind: type[AioFlagcxError]) -> None:
    error = kind("broke", peer="b:2", rail="a->b", address=0x1000, cause=OSError(5, "I/O"))
    if isinstance(error, RemoteAddressError | errors.LocalAddressError):
        error.index, error.length = 3, 10
    if isinstance(error, TransferError):
        error.remote_quiet, error.notify_delivered = True, None
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert repr(copy.cause) == repr(error.cause)
    same = {name: value for name, value in vars(error).items() if name != "cause"}
    assert {name: value for name, value in vars(copy).items() if name != "cause"} == same


def test_str_names_what_the_message_does_not() -> None:
    error = PeerLost("gone", peer="b:2", rail="a->b", address=4096, cause="no probe answered")
    assert str(error) == "gone (peer=b:2, rail=a->b, address=0x1000, cause=no probe answered)"


def test_str_does_not_repeat_what_the_message_names() -> None:
    refused = OSError(111, "Connection refused")
    error = ConnectRefused(f"nothing at b:2: {refused}", peer="b:2", cause=refused)
    assert str(error) == "nothing at b:2: [Errno 111] Connection refused"


def test_a_cause_that_is_an_exception_is_shown_in_tracebacks() -> None:
    cause = OSError(111, "Connection refused")
    assert ConnectRefused("no", cause=cause).__cause__ is cause


def test_address_errors_carry_the_piece() -> None:
    error = RemoteAddressError("outside", index=7, address=0x10, length=32)
    assert (error.index, error.address, error.length) == (7, 0x10, 32)


def test_a_transfer_error_does_not_claim_quiet_unless_told() -> None:
    assert TransferError("x").remote_quiet is False
    assert TransferError("x").notify_delivered is False
    assert TransferTimeout("x", remote_quiet=True, notify_delivered=None).remote_quiet is True
