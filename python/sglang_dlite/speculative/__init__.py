"""DLITE in SGLang's runtime."""

from __future__ import annotations

from typing import Any

from sglang_dlite import ALGORITHM


def is_dlite(options: Any) -> bool:
    """Whether server options, as typed or resolved, ask for DLITE."""
    return (options.speculative_algorithm or "").upper() == ALGORITHM


def serves_dlite() -> bool:
    """Whether this process belongs to a server of DLITE; for hooks, which all servers run."""
    from sglang.srt.runtime_context import get_spec

    return is_dlite(get_spec())
