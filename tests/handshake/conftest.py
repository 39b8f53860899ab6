from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import uvloop
from hypothesis import settings
from peers import Runner

# How long one example takes says more about the machine's load than about the code.
settings.register_profile("without_deadline", deadline=None)
settings.load_profile("without_deadline")

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Runs a coroutine on each kind of event loop, which has to be left clean."""
    loop = LOOPS[request.param]()
    complaints: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return loop.run_until_complete(asyncio.wait_for(coroutine, timeout=60))

    yield run
    left = asyncio.all_tasks(loop)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    gc.collect()
    assert not complaints
    assert not left
