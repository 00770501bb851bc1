"""Entry point `sglang.srt.plugins`: makes DLITE known to every process that SGLang starts."""

from __future__ import annotations

import logging
from importlib.metadata import version

from sglang_dlite import ALGORITHM, SGLANG_VERSION

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the algorithm and its hooks; called by SGLang in each of its processes.

    Raises:
        RuntimeError: another sglang version is installed. SGLang logs the exception of a plugin
            and goes on, so the user then meets 'Unknown speculative algorithm name': `sglang-dlite
            check` explains it.
    """
    installed = version("sglang")
    if installed != SGLANG_VERSION:
        raise RuntimeError(
            f"sglang-dlite is made for sglang {SGLANG_VERSION} and found {installed}: DLITE is not "
            f"registered. Install sglang=={SGLANG_VERSION}."
        )
    from sglang_dlite.platforms import has_accelerator
    from sglang_dlite.speculative import algorithm, hooks

    if not has_accelerator():
        from sglang_dlite.platforms.cpu import register_attention

        register_attention()
    hooks.install()
    algorithm.register()


def verify() -> list[str]:
    """Problems of an installation that has loaded the plugin; empty when all is well."""
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_dlite.speculative import hooks

    missing = (
        [] if get_spec(ALGORITHM) is not None else [f"{ALGORITHM} is not in SGLang's registry"]
    )
    return missing + hooks.problems()
