"""The compiled CPU kernels, where they are built and wanted."""

from __future__ import annotations

import logging
import os
from functools import cache
from types import ModuleType

import torch

logger = logging.getLogger(__name__)

SWITCH = "DLITE_CPU_KERNELS"

# What the norms, the rotary embedding, SiLU and attention compute on; others stay with torch.
KERNEL_DTYPES = (torch.float32, torch.bfloat16)


@cache
def compiled_kernels() -> ModuleType | None:
    """The module `sglang_dlite_kernel`; None where it is not built, or SWITCH=0 asks for torch.

    Everything has a way without it, on torch operators. A module that is there but does not load
    (built for another torch) is reported in the log.
    """
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        import sglang_dlite_kernel
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        logger.warning(
            "The compiled CPU kernels do not load (%s): serving goes on with torch operators. "
            "Build them again: make install.",
            error,
        )
        return None
    return sglang_dlite_kernel
