"""Entry point `sglang.srt.plugins`: makes DLITE known to every process that SGLang starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from sglang_dlite import ALGORITHM, SGLANG_VERSION

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the algorithm and its hooks; called by SGLang in each of its processes.

    Raises:
        RuntimeError: another sglang version is installed. SGLang logs the exception of a plugin
            and goes on, so a server that needs this package is stopped when it starts, with the
            same message.
    """
    installed = version("sglang")
    if installed != SGLANG_VERSION:
        message = "\n  ".join(
            [
                f"sglang-dlite is made for sglang {SGLANG_VERSION} and found {installed}: DLITE is "
                f"not registered. Install sglang=={SGLANG_VERSION}.",
                *_misfits(),
            ]
        )
        _stop_servers(message)
        raise RuntimeError(message)
    from sglang_dlite.platforms import has_accelerator
    from sglang_dlite.speculative import algorithm, hooks

    if not has_accelerator():
        from sglang_dlite.platforms.cpu import register_attention

        register_attention()
    hooks.install()
    algorithm.register()


def _misfits() -> list[str]:
    """The hooks that do not fit another sglang."""
    try:
        from sglang_dlite.speculative import hooks
    except ImportError as error:
        return [f"the table of hooks does not load: {error}"]
    return hooks.misfits()


def _stop_servers(message: str) -> None:
    """Stop a server that asks for DLITE or runs on our platform, as soon as it reads its options.

    Raises:
        ImportError: that sglang resolves its options in another way.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    @register_resolution_hook("handle_missing_default_values")
    def refuse(server_args: Any, previous: Callable[[Any], None]) -> None:
        from sglang.srt.platforms import current_platform

        algorithm = getattr(server_args, "speculative_algorithm", None) or ""
        ours = type(current_platform).__module__.startswith("sglang_dlite.")
        if ours or algorithm.upper() == ALGORITHM:
            raise RuntimeError(message)
        previous(server_args)


def verify() -> list[str]:
    """Problems of an installation that has loaded the plugin; empty when all is well."""
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_dlite.speculative import hooks

    missing = (
        [] if get_spec(ALGORITHM) is not None else [f"{ALGORITHM} is not in SGLang's registry"]
    )
    return missing + hooks.problems()
