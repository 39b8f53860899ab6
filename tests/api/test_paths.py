"""Engines that may not take the same paths."""

from __future__ import annotations

import pytest
from conformance.pair import until

from aioflagcx import Config, Engine
from aioflagcx.errors import ConnectError


async def test_no_path_in_common() -> None:
    process, tcp = Config(soft_paths=("process",)), Config(soft_paths=("tcp",))
    async with Engine(config=process) as ours, Engine(config=tcp) as theirs:
        with pytest.raises(ConnectError):
            await ours.connect(theirs.session_id)
        await until(lambda: not ours.stats().sessions and not theirs.stats().responders)
