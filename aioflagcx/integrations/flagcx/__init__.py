"""FlagCX's Python wrapper, ``plugin.interservice.flagcx_wrapper``, with this engine in it.

:class:`FLAGCXLibrary` has the point-to-point engine; beside it are the engine's calls that the
original has in C only. Every other name is that of the original wrapper: see :mod:`.original`.
"""

from __future__ import annotations

from typing import Any

from .calls import (
    FlagcxP2pNotifyMsg,
    flagcxP2pEngineGetMetadata,
    flagcxP2pEngineGetNotifs,
    flagcxP2pEngineMakeDesc,
    flagcxP2pEnginePrepareDesc,
    flagcxP2pEngineReadVector,
    flagcxP2pEngineSendNotif,
    flagcxP2pEngineUpdateDesc,
    flagcxP2pEngineWriteVector,
    flagcxP2pEngineWriteVectorSync,
    flagcxP2pEngineXferStatus,
)
from .engine import P2pConn, P2pEngine
from .library import FLAGCXLibrary
from .original import resolve

__all__ = [
    "FLAGCXLibrary",
    "FlagcxP2pNotifyMsg",
    "P2pConn",
    "P2pEngine",
    "flagcxP2pEngineGetMetadata",
    "flagcxP2pEngineGetNotifs",
    "flagcxP2pEngineMakeDesc",
    "flagcxP2pEnginePrepareDesc",
    "flagcxP2pEngineReadVector",
    "flagcxP2pEngineSendNotif",
    "flagcxP2pEngineUpdateDesc",
    "flagcxP2pEngineWriteVector",
    "flagcxP2pEngineWriteVectorSync",
    "flagcxP2pEngineXferStatus",
]


def __getattr__(name: str) -> Any:
    return resolve(name)
