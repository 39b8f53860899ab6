"""Our connector on an engine with faults."""

from __future__ import annotations

from typing import Any

from faults import fault, flip

import aioflagcx
from aioflagcx.errors import AioFlagcxError
from aioflagcx.integrations.vllm import AioFlagcxConnector, worker

__all__ = ["AioFlagcxConnector"]


class FaultyEngine(aioflagcx.Engine):
    def _submit_blocks(
        self, session: Any, layouts: Any, src: Any, dst: Any, *rest: Any, **options: Any
    ) -> Any:
        what = fault()
        if what == "nothing":
            src = dst = [[] for _ in layouts]
        elif what == "fail":
            raise AioFlagcxError("this engine fails")
        else:
            assert what == "flip"
            for layout, blocks in zip(layouts, src, strict=True):
                for span in layout.spans:
                    flip(span.src + int(blocks[0]) * span.src_stride)
        return super()._submit_blocks(session, layouts, src, dst, *rest, **options)


worker.Engine = FaultyEngine
