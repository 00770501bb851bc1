"""DLITE's verify pass in SGLang's decode CUDA graphs (hooks H1 and H2).

Nothing here has run on a GPU yet (docs/dlite.md, Limits).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sglang_dlite import ALGORITHM


def _is_dlite(algorithm: Any) -> bool:
    return getattr(algorithm, "name", None) == ALGORITHM


@lru_cache(maxsize=1)
def _runner_class() -> type:
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    from sglang_dlite.speculative.inputs import capture_verify_input

    class DLiteDecodeCudaGraphRunner(DecodeCudaGraphRunner):
        """Upstream's decode graphs with a verify input of width D."""

        def get_spec_info(self, num_tokens: int) -> Any:
            _, needs_mask = resolve_dflash_verify_mask_policy(self.model_runner.attn_backend)
            return capture_verify_input(
                self.captured_req_width, self.buffers.custom_mask if needs_mask else None
            )

    return DLiteDecodeCudaGraphRunner


def decode_graph_runner_class(original: Callable[[Any], type], model_runner: Any) -> type:
    """AROUND `ModelRunner._decode_cuda_graph_runner_cls` (H1)."""
    if _is_dlite(model_runner.spec_algorithm):
        return _runner_class()
    return original(model_runner)


def dummy_verify_input(
    original: Callable[..., Any],
    spec_algorithm: Any,
    custom_mask: Any,
    num_tokens_per_req: int,
    is_draft_worker: bool,
) -> Any:
    """AROUND `create_dummy_verify_input` (H2)."""
    if _is_dlite(spec_algorithm):
        from sglang_dlite.speculative.inputs import capture_verify_input

        return capture_verify_input(num_tokens_per_req)
    return original(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)
