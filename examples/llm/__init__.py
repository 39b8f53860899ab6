"""The parts of examples/disaggregated_llm.py."""

from __future__ import annotations
