"""What the CPU platform needs of upstream functions that have no extension point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def default_device(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step `handle_missing_default_values`: the device is cpu where none is given.

    Upstream's detection knows a CPU only as SGLANG_USE_CPU_ENGINE=1 and raises otherwise.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.platforms import current_platform

    if current_platform.is_out_of_tree() and resolving_view(server_args).device is None:
        declare_resolution(server_args, "dlite", device=current_platform.device_type)
    previous(server_args)


def write_reserved_slots(
    original: Callable[..., None],
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """AROUND `assign_req_to_token_pool_func`: a Triton kernel upstream, index writes on a CPU.

    Row `req_pool_indices[i]` of req_to_token [rows, width] gets the next slots of out_cache_loc
    [sum(end - start)] at columns start_offset[i] .. end_offset[i]-1.
    """
    if req_to_token.device.type != "cpu":
        original(
            req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size
        )
        return
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def repack_after_update(result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER a weight update: the packed copies are of the old weights."""
    from sglang_dlite.platforms.packed_linear import pack_linear_weights

    if updater.device == "cpu":
        pack_linear_weights(updater.get_model())


def refuse_memory_release(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND the control calls that release and resume memory: an error instead of a dead server.

    Upstream synchronizes a CUDA device there, in the scheduler, which ends with that.

    Raises:
        ValueError: always; the HTTP server answers 400.
    """
    raise ValueError(
        f"{original.__name__} is not available on a CPU: it needs torch_memory_saver, which "
        "replaces CUDA's allocator. Flush the cache (/flush_cache), or stop the server to get its "
        "memory back."
    )
