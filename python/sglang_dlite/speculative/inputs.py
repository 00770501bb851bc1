"""What DLITE hands to the scheduler between steps, and to the target for a verify pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


@dataclass
class DLiteDraftInput(SpecInput):
    """State carried from step to step, per request; n requests.

    `bonus_tokens` [n] int64 is the anchor (upstream's name), and `hidden_states` [n, K + E + P]
    int64 (the one slot that upstream's FutureMap relays as it is) holds the K drafted ids, the
    E = max(G-2, 0) tokens before the anchor that the next token group may reach back to, and with
    rejection sampling the bits of the K head vectors (`pack_vectors`; else P = 0).
    Under overlap only `future_indices` is filtered and merged; the tensors come from the relay.
    """

    bonus_tokens: torch.Tensor
    hidden_states: torch.Tensor
    future_indices: torch.Tensor | None = None
    # Read by upstream's relay for every algorithm; DLITE has no tree and no draft probabilities.
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None

    def __post_init__(self) -> None:
        super().__init__(spec_input_type=SpecInputType.DFLASH_DRAFT)

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        """Keep the requests `new_indices` [m]."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.hidden_states = self.hidden_states[new_indices]

    def merge_batch(self, other: DLiteDraftInput) -> None:
        """Append another batch's requests."""
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.hidden_states = torch.cat([self.hidden_states, other.hidden_states])


def next_input(
    group: torch.Tensor, drafts: torch.Tensor, vectors: torch.Tensor | None = None
) -> DLiteDraftInput:
    """What the next step needs: group [n, G] ends in the anchor, drafts [n, K] int64.

    vectors [n, K, R] are the drafts' head vectors, with rejection sampling.
    """
    earlier = group[:, 1:-1]  # [n, E]: as far back as the next round's window can reach
    carried = [drafts, earlier]
    if vectors is not None:
        carried.append(pack_vectors(vectors))  # [n, P]
    return DLiteDraftInput(
        bonus_tokens=group[:, -1].contiguous(), hidden_states=torch.cat(carried, dim=1)
    )


def pack_vectors(vectors: torch.Tensor) -> torch.Tensor:
    """The bits of vectors [n, K, R], as fp32, in [n, P] int64 with P = ceil(K * R / 2)."""
    flat = vectors.float().flatten(1)  # [n, K * R]
    return torch.nn.functional.pad(flat, (0, flat.shape[1] % 2)).contiguous().view(torch.int64)


def unpack_vectors(packed: torch.Tensor, num_drafts: int, rank: int) -> torch.Tensor:
    """The vectors [n, K, R] fp32 of `pack_vectors`; packed may be a slice of wider rows."""
    flat = packed.contiguous().view(torch.float32)
    return flat[:, : num_drafts * rank].unflatten(1, (num_drafts, rank))


@dataclass
class DLiteVerifyInput(DFlashVerifyInput):
    """A linear verify pass of D rows per request.

    Upstream's attention backends treat a DFLASH verify as 'causal, D rows per request'; that is
    exactly DLITE's, and a plugin has no type of its own.
    """

    greedy_tail: bool = False
    """Replay the verify graph that also accepts and drafts (verify_tail.py)."""


def capture_verify_input(width: int, custom_mask: torch.Tensor | None = None) -> DLiteVerifyInput:
    """A verify input without tokens: what graph capture and warm-up need (hooks H1 and H2)."""
    empty: Any = None
    return DLiteVerifyInput(
        draft_token=empty,
        positions=empty,
        draft_token_num=width,
        custom_mask=custom_mask,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
