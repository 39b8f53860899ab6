"""The blocking engine has what the asyncio engine has, with the same arguments and promises."""

from __future__ import annotations

import inspect
import re
import types
from typing import Any

import pytest

import aioflagcx
import aioflagcx.sync

CLASSES = ["Engine", "Session", "Transfer"]
ONLY_ASYNC = {"Engine": {"__aenter__", "__aexit__"}, "Transfer": {"__await__"}}
ONLY_SYNC = {
    "Engine": {"__enter__", "__exit__", "host", "rpc_port"},  # the latter two are attributes there
    "Transfer": {"result", "wait"},
}
DIFFERENT = {"Transfer.exception"}  # waits, as that of concurrent.futures does
NOT_PUBLIC = {("__init__", "Session"), ("__init__", "Transfer")}
DUNDERS = {"__init__", "__enter__", "__exit__", "__aenter__", "__aexit__", "__await__"}


def public(cls: type) -> dict[str, Any]:
    """Public members by name; inherited ones, too."""
    return {
        name: inspect.getattr_static(cls, name)
        for name in dir(cls)
        if not name.startswith("_") or name in DUNDERS
    }


def pairs_of(*kinds: type) -> list[Any]:
    """Members of these kinds that both have, except for constructors that are not public."""
    found = []
    for name in CLASSES:
        ours = public(getattr(aioflagcx, name))
        theirs = public(getattr(aioflagcx.sync, name))
        for member in sorted(ours.keys() & theirs.keys()):
            full = f"{name}.{member}"
            if isinstance(ours[member], kinds) and (member, name) not in NOT_PUBLIC:
                found.append(pytest.param(full, ours[member], theirs[member], id=full))
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_both_have_the_same_members(name: str) -> None:
    ours = set(public(getattr(aioflagcx, name)))
    theirs = set(public(getattr(aioflagcx.sync, name)))
    assert ours - theirs == ONLY_ASYNC.get(name, set())
    assert theirs - ours == ONLY_SYNC.get(name, set())


@pytest.mark.parametrize(("name", "ours", "theirs"), pairs_of(types.FunctionType))
def test_methods_take_the_same_arguments(name: str, ours: Any, theirs: Any) -> None:
    if name in DIFFERENT:
        return
    wanted, given = inspect.signature(ours), inspect.signature(theirs)
    assert list(given.parameters.values()) == list(wanted.parameters.values())
    assert not inspect.iscoroutinefunction(theirs)
    if name != "Engine.notifications":
        assert given.return_annotation == wanted.return_annotation


def promises(docstring: str | None) -> set[str]:
    """Errors and parameters that a docstring speaks of."""
    return set(re.findall(r":class:`~aioflagcx\.errors\.(\w+)`|``(\w+)``", docstring or ""))


@pytest.mark.parametrize(("name", "ours", "theirs"), pairs_of(types.FunctionType, property))
def test_docstrings_speak_of_the_same_errors_and_arguments(
    name: str, ours: Any, theirs: Any
) -> None:
    assert theirs.__doc__
    if name not in DIFFERENT:
        assert promises(ours.__doc__) <= promises(theirs.__doc__)
