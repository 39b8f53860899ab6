"""The drop-in, with faults."""

from __future__ import annotations

from faults import fault, flip

from aioflagcx.integrations import mooncake


class TransferEngine(mooncake.TransferEngine):
    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: list[int],
        peer_buffer_addresses: list[int],
        lengths: list[int],
        transport_hint: str = "",
    ) -> int:
        what = fault()
        if what == "nothing":
            return 0
        if what == "fail":
            return -1
        assert what == "flip"
        for buffer in buffers:
            flip(buffer)
        return super().batch_transfer_sync_write(
            target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint
        )
