from __future__ import annotations

import pytest

from aioflagcx import _native
from aioflagcx.errors import RemoteAccessError, RetryExceeded, TransferError
from aioflagcx.outcomes import failure


def event(status: int, **fields: object) -> _native.TransferEvent:
    all_fields: dict[str, object] = {
        "id": 1,
        "status": status,
        "unknown_epochs": [],
        "cause": "",
        "vendor_err": 0,
        "rail": "",
        "address": 0,
        "length": 0,
    }
    return _native.TransferEvent(**(all_fields | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (_native.STATUS_REMOTE_ACCESS, RemoteAccessError),
        (_native.STATUS_RETRY_EXCEEDED, RetryExceeded),
        (_native.STATUS_LOCAL, TransferError),
    ],
)
def test_a_failure_tells_status_vendor_error_rail_and_slice(
    status: int, kind: type[TransferError]
) -> None:
    told = event(
        status,
        cause="IBV_WC_REM_ACCESS_ERR",
        vendor_err=0x88,
        rail="mlx5_0->mlx5_1",
        address=0x7F00,
        length=65_536,
    )
    error = failure(told, "10.0.0.2:1", quiet=False)
    assert type(error) is kind
    assert (error.peer, error.rail, error.address) == ("10.0.0.2:1", "mlx5_0->mlx5_1", 0x7F00)
    for words in ("IBV_WC_REM_ACCESS_ERR (vendor error 0x88)", "mlx5_0->mlx5_1", "0x7f00+65536"):
        assert words in str(error)
    assert error.remote_quiet is False


def test_what_is_not_known_is_left_out() -> None:
    error = failure(event(_native.STATUS_RETRY_EXCEEDED), "10.0.0.2:1", quiet=True)
    assert (error.rail, error.address, error.cause) == (None, None, None)
    assert "vendor" not in str(error) and "0x0" not in str(error)
