"""DLITE as an entry of SGLang's registry of speculative algorithms."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_dlite import ALGORITHM
from sglang_dlite.speculative import is_dlite
from sglang_dlite.speculative.drafter_files import drafter_directory, read_drafter_config
from sglang_dlite.speculative.server_args import apply_defaults, check_server_args, drafter_path


class DLiteAlgorithm(CustomSpecAlgo):
    """Answers the scheduler's questions about DLITE.

    Every `is_*` predicate of another algorithm stays False: upstream branches on identity, and
    the branch for 'none of these' is the right one everywhere.
    """

    # -- required by the scheduler, absent from the base class -------------------------------------

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    # -- capabilities ---------------------------------------------------------------------------

    def has_draft_kv(self) -> bool:
        return False

    def supports_grammar_overlap(self) -> bool:
        # The worker calls the scheduler's barrier before it reads a grammar's state.
        return True

    def supports_mixed_chunk(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        # The drafter reads pivot states and tokens, nothing that the scheduler also writes.
        return True

    # -- start-up -------------------------------------------------------------------------------

    def handle_server_args(self, server_args: Any) -> None:
        """Fill and pin the speculative fields (after upstream's own defaults)."""
        apply_defaults(server_args)


def validate(server_args: Any) -> None:
    """Start-up refusals; called by upstream before `handle_server_args`."""
    from sglang_dlite.speculative.hooks import require_hooks

    require_hooks()
    check_server_args(server_args)


def resolve_early(server_args: Any, previous: Any) -> None:
    """Resolution step: what must be known before memory and CUDA graphs are sized.

    D defaults to the drafter's block size; `handle_server_args` would come too late for it.
    """
    from sglang.srt.arg_groups.model_path_hook import handle_modelscope_paths
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.environ import envs

    if is_dlite(resolving_view(server_args)):
        if envs.SGLANG_USE_MODELSCOPE.get():  # a step of `previous`: it may run twice
            handle_modelscope_paths(server_args)
        view = resolving_view(server_args)
        directory = drafter_directory(
            drafter_path(view), view.speculative_draft_model_revision, view.download_dir
        )
        # One download, here: whoever reads the drafter later finds a directory.
        declare_resolution(server_args, "dlite", speculative_draft_model_path=str(directory))
        config = read_drafter_config(str(directory))
        if view.speculative_num_draft_tokens is None:
            declare_resolution(server_args, "dlite", speculative_num_draft_tokens=config.block_size)
        # Upstream's controller is EAGLE's; ours goes by what the user typed (worker.py).
        declare_resolution(server_args, "dlite", speculative_adaptive=False)
        # A replayed prefill graph runs without the hooks of the pivot capture.
        declare_resolution(server_args, "dlite", disable_prefill_cuda_graph=True)
    previous(server_args)


def register() -> None:
    """Add DLITE to SGLang's registry; harmless when called twice in a process."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec(ALGORITHM) is not None:
        return

    @SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, validate_server_args=validate, spec_class=DLiteAlgorithm
    )
    def worker(server_args: Any) -> type:
        from sglang_dlite.speculative.worker import DLiteWorker

        return DLiteWorker
