"""The DLITE worker: target forward, acceptance, then the next draft, in one call per step.

It orchestrates and owns no mathematics: acceptance.py has the rules, drafter/ the model,
pivot_capture.py the states. There is no draft ModelRunner, KV pool, attention backend or draft
extend: the drafter runs at the end of a prefill or verify call, after the new lengths are
published, so that the scheduler's work overlaps it (docs/structures.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_dlite.drafter import DraftBlock
from sglang_dlite.speculative.acceptance import (
    Acceptance,
    match_drafts,
    next_token_group,
    pivot_rows,
)
from sglang_dlite.speculative.cuda_graph import capture_draft
from sglang_dlite.speculative.drafting import (
    Drafter,
    build_drafter,
    check_pair,
    require_sampled_drafts,
)
from sglang_dlite.speculative.inputs import DLiteDraftInput, next_input, unpack_vectors
from sglang_dlite.speculative.pivot_capture import PivotCapture, split_states
from sglang_dlite.speculative.rejection import RejectionSampling
from sglang_dlite.speculative.target_tokens import broadcast_from_rank0, target_tokens
from sglang_dlite.speculative.token_groups import prefill_token_group
from sglang_dlite.speculative.verify_batch import verify_batch
from sglang_dlite.speculative.verify_logits import Barrier, VerifyLogits
from sglang_dlite.speculative.verify_tail import GreedyRound, VerifyTail, is_plain_greedy
from sglang_dlite.speculative.width_control import NOT_DRAFTED, WidthControl, make_width_control
from sglang_dlite.speculative.width_runtimes import WidthRuntimes, has_graphs

logger = logging.getLogger(__name__)

Publish = Callable[[torch.Tensor], None]


class DLiteWorker(BaseSpecWorker):
    """Drives the target and the drafter for the scheduler (upstream's spec-V2 contract)."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self._target_worker = target_worker
        super().__init__()
        runner = target_worker.model_runner
        self.device = runner.device
        options = get_spec()  # the resolved record; server_args holds what the user typed
        self.width: int = options.speculative_num_draft_tokens
        # Without an adapter: its segments are those of the target's batch, not of the drafter's.
        self.embed = unwrap_lora_layer(runner.model.get_input_embeddings())
        # Loaded here, before memory is profiled: its bytes are then not given to the KV pool.
        self.drafter: Drafter = build_drafter(
            options.speculative_draft_model_path,
            options.speculative_draft_model_revision,
            self.device,
            runner.dtype,
            options.speculative_use_rejection_sampling,
        )
        self.config = self.drafter.config
        # Sharded under tensor parallelism: the whole table's size is the padded one.
        rows = getattr(self.embed, "num_embeddings_padded", None)
        if rows is None:
            rows = self.embed.weight.shape[0]
        check_pair(self.config, runner.model_config.hf_text_config, rows)
        self.capture = PivotCapture(runner.model, self.config.target_layer_ids)
        self.num_drafts = self.width - 1
        self._offsets = torch.arange(self.width, device=self.device)
        self.rejection: RejectionSampling | None = None
        if options.speculative_use_rejection_sampling:
            sampled_drafter = require_sampled_drafts(self.drafter)
            self.rejection = RejectionSampling(sampled_drafter, self.width, self.device)
        self.options = VerifyLogits(self.width, lambda: runner.req_to_token_pool.req_to_token)
        # Resolution turns the flag off for upstream, whose controller is EAGLE's.
        self.adaptive: WidthControl | None = (
            make_width_control(self.width) if server_args.speculative_adaptive else None
        )
        self.runtimes: WidthRuntimes | None = None
        # SGLang calls both while it captures the verify graphs, and never without graphs.
        runner.capture_head_hooks.append(self.capture.start_graph)
        self.tail = self._verify_tail()
        if self.tail is not None:
            runner.capture_tail_hooks.append(self.tail)
        logger.info(
            "DLITE: verify width %s%d, %d pivot states, no draft KV.",
            "1 to " if self.adaptive else "",
            self.width,
            self.config.num_pivot_states,
        )

    def __getattr__(self, name: str) -> Any:
        # What the scheduler asks of a worker and we do not define is the target's.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    @property
    def draft_worker(self) -> None:
        """There is none: BaseSpecWorker's defaults then need no draft pool or graph."""
        return None

    def init_cuda_graphs(self) -> None:
        """Called after the target's graphs are captured; what DLITE needs is captured likewise."""
        runner = self._target_worker.model_runner
        # The CPU's attention reads a pass's width from its batch; it has graphs in tests only.
        if self.adaptive is not None and (runner.device != "cpu" or has_graphs(runner)):
            self.runtimes = WidthRuntimes(runner, self.adaptive.widths)
            self._additional_graph_memory_usage["target_verify"] = self.runtimes.memory_gb
            self._additional_graph_time_usage["target_verify"] = self.runtimes.seconds
        captured = capture_draft(self.drafter, self.embed, runner)
        if captured is not None:
            self.drafter = captured.drafter
            self._additional_graph_memory_usage["draft_decode"] = captured.memory_gb
            self._additional_graph_time_usage["draft_decode"] = captured.seconds

    # -- one step -------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Publish | None = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """One scheduler step: an extend (prompt or chunk, possibly mixed) or a verify pass."""
        del pp_proxy_tensors
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._extend(batch, on_publish, grammar_barrier)
        return self._verify(batch, on_publish, grammar_barrier)

    def _extend(
        self, batch: Any, on_publish: Publish | None, grammar_barrier: Barrier | None
    ) -> GenerationBatchResult:
        self.options.before_extend(batch, grammar_barrier)
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.LAST
        )
        anchor = broadcast_from_rank0(result.next_token_ids)  # [n]
        self.options.after_step(batch, anchor[:, None])
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        if self.adaptive is not None:
            self.adaptive.extended(req.rid for req in batch.reqs)
        group = prefill_token_group(batch, anchor, self.config.anchor_group_size)
        states, result.logits_output.hidden_states = result.logits_output.hidden_states, None
        result.next_draft_input = self._draft(states, group, batch, batch.seq_lens)
        return result

    def _verify(
        self, batch: Any, on_publish: Publish | None, grammar_barrier: Barrier | None
    ) -> GenerationBatchResult:
        carried = batch.spec_info.hidden_states  # [n, K + E + P]
        num_earlier = max(self.config.anchor_group_size - 2, 0)
        drafts, earlier, packed = carried.tensor_split(
            (self.num_drafts, self.num_drafts + num_earlier), dim=1
        )
        width = self.width
        if self.adaptive is not None:
            width = self.adaptive.width
            # NOT_DRAFTED becomes token 0, verified like any other guess.
            drafts = drafts[:, : width - 1].clamp(min=0)
        if self.runtimes is not None:
            self.runtimes.use(width)
        candidates = torch.cat([batch.spec_info.bonus_tokens[:, None], drafts], dim=1)  # [n, D]
        prefix_lens = batch.seq_lens  # [n], without the anchor
        tail = self.tail
        if tail is not None and not (tail.fits(len(prefix_lens)) and is_plain_greedy(batch)):
            tail = None
        forward_batch = verify_batch(
            batch, candidates, self._offsets, self._target_worker, greedy_tail=tail is not None
        )
        if tail is not None:
            tail.stage(earlier)
        grammar_tree = self.options.before_verify(batch, candidates)
        target = self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        if tail is not None and target.can_run_cuda_graph:
            step = tail.read(len(prefix_lens))
            result = self._verified(target, forward_batch, step, width, prefix_lens, on_publish)
            target.logits_output.hidden_states = None
            result.next_draft_input = next_input(step.token_group, self._usable(step.draft_ids))
            return result
        logits_output = target.logits_output
        self.options.apply(
            batch, candidates, logits_output.next_token_logits, grammar_tree, grammar_barrier
        )
        sampler = self._target_worker.model_runner.sampler
        if self.rejection is None or batch.sampling_info.is_all_greedy:
            target_ids = target_tokens(
                sampler, batch, logits_output, forward_batch.positions
            )  # [n, D]
            accepted = match_drafts(candidates, target_ids)
        else:
            vectors = unpack_vectors(packed, self.num_drafts, self.config.sequential_rank)
            accepted = self.rejection.accept(
                sampler, batch, logits_output, forward_batch.positions, candidates, vectors
            )
        result = self._verified(target, forward_batch, accepted, width, prefix_lens, on_publish)
        if self.adaptive is not None:
            self.adaptive.verified(req.rid for req in batch.reqs)
        self.options.after_step(batch, accepted.output_ids)
        states = logits_output.hidden_states[pivot_rows(accepted.num_accepted, width)]
        logits_output.hidden_states = None
        group = next_token_group(earlier, candidates, accepted, self.config.anchor_group_size)
        result.next_draft_input = self._draft(states, group, batch, result.new_seq_lens)
        return result

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: Sequence[int], batch_size: int = 0
    ) -> None:
        """The scheduler has read a verify pass's result (upstream's hook for adaptive workers)."""
        if self.adaptive is not None:
            self.adaptive.completed(num_correct_drafts_per_req, batch_size)

    @staticmethod
    def _verified(
        target: GenerationBatchResult,
        forward_batch: ForwardBatch,
        accepted: Acceptance | GreedyRound,
        width: int,
        prefix_lens: torch.Tensor,
        on_publish: Publish | None,
    ) -> GenerationBatchResult:
        """Publish the new lengths; the step's result, but for the next draft."""
        accept_lens = (accepted.num_accepted + 1).to(torch.int32)  # [n]
        new_seq_lens = prefix_lens + accept_lens.to(prefix_lens.dtype)
        if on_publish is not None:
            on_publish(new_seq_lens)
        return GenerationBatchResult(
            logits_output=target.logits_output,
            next_token_ids=accepted.output_ids.reshape(-1),
            accept_lens=accept_lens,
            new_seq_lens=new_seq_lens,
            speculative_num_draft_tokens=width,
            can_run_cuda_graph=target.can_run_cuda_graph,
            routed_experts_output=target.routed_experts_output,
            indexer_topk_output=target.indexer_topk_output,
            extra_keep_alive_refs=[forward_batch],
        )

    # -- parts ----------------------------------------------------------------------------------

    def _verify_tail(self) -> VerifyTail | None:
        """The tail of the verify graphs, where it can decide all that a round needs.

        Not under tensor parallelism, whose decisions are broadcast from rank 0 outside of graphs,
        not with rejection sampling, which relays more than token ids, and not at a width that
        changes.
        """
        if get_parallel().tp_size > 1 or self.rejection is not None or self.adaptive is not None:
            return None
        return VerifyTail(self.drafter, self.embed, self.width)

    def _draft(
        self,
        states: torch.Tensor,
        group: torch.Tensor,
        batch: Any,
        anchor_positions: torch.Tensor,
    ) -> DLiteDraftInput:
        """states [n, S * h], group [n, G] and anchor_positions [n] -> the next step's input."""
        if self.adaptive is not None and self.adaptive.width == 1:
            return next_input(group, group.new_full((len(group), self.num_drafts), NOT_DRAFTED))
        block = self._draft_block(states, group, batch.sampling_info, anchor_positions)
        # One set of drafts for all ranks: acceptance compares against it.
        drafts = self._usable(broadcast_from_rank0(block.token_ids))
        vectors = None if self.rejection is None else self._usable(block.head_vectors)
        return next_input(group, drafts, vectors)

    def _usable(self, block: torch.Tensor) -> torch.Tensor:
        """Of a block [n, K, ...] the D - 1 drafts that are verified: a shorter D takes a prefix."""
        return block[:, : self.num_drafts]

    def _draft_block(
        self, states: torch.Tensor, group: torch.Tensor, info: Any, anchor_positions: torch.Tensor
    ) -> DraftBlock:
        pivot_states = split_states(states, self.config.num_pivot_states)
        with torch.inference_mode():
            if self.rejection is None or info.is_all_greedy:
                return self.drafter.draft(pivot_states, group, self.embed)
            return self.rejection.draft(pivot_states, group, self.embed, info, anchor_positions)
