"""SGLang on a machine without an accelerator: an out-of-tree CPU platform.

PyPI's sglang 0.5.23 reaches its own CPU path only through a source build of `sgl_kernel`. This
platform serves with torch operators instead, so that a laptop or a CI machine runs the same
server, scheduler and speculation as a GPU does.
"""

from __future__ import annotations

import os

CPU_PLATFORM = "sglang_dlite.platforms.cpu.DLiteCpuPlatform"


def has_accelerator() -> bool:
    """True where torch sees any accelerator (CUDA, ROCm, XPU, NPU, MPS, ...)."""
    import torch

    return torch.accelerator.is_available()


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the platform's dotted path, or None to stay out.

    Stays out where an accelerator exists, and where SGLANG_USE_CPU_ENGINE=1 asks for upstream's
    own CPU engine.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or has_accelerator():
        return None
    return CPU_PLATFORM
