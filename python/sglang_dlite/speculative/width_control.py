"""Adaptive width inside the worker: which steps teach the policy what, and when it is asked.

The width of a verify pass is settled at the end of the call before it, because the drafter is
skipped where that width is 1. What the pass kept arrives later (under overlap, after the next
launch), in order; steps are timed from one such arrival to the next.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_dlite.speculative.adaptive import WidthPolicy, width_choices

logger = logging.getLogger(__name__)

NOT_DRAFTED = -1
"""Relayed in place of a drafted id where the drafter was skipped."""


class _Step(NamedTuple):
    """A verify pass whose result is not known yet."""

    batch_size: int
    width: int
    drafted: bool  # every request had drafts, so that its acceptance says something
    timed: bool  # its duration is that of a steady step of this width


class WidthControl:
    """The width of the next verify pass, kept up to date by the worker's calls."""

    def __init__(
        self,
        policy: WidthPolicy,
        clock: Callable[[], float] = time.perf_counter,
        agree: Callable[[int], int] = lambda width: width,
    ) -> None:
        """clock gives seconds; agree makes a width the same on all ranks."""
        self.widths = policy.widths
        self.width = policy.widths[-1]
        self._policy = policy
        self._clock = clock
        self._agree = agree
        self._pending: deque[_Step] = deque()
        # Ids of the requests in the newest verify pass, and of those prefilled since: a chunked
        # prompt, or a request that decodes in a mixed batch, is one request.
        self._running: set[str] = set()
        self._all_drafted = True  # every request of the next verify pass has drafts
        self._after_verify = False
        self._completed_at: float | None = None

    def extended(self, request_ids: Iterable[str]) -> None:
        """A prefill was launched; settles whether its requests are drafted for."""
        self._running.update(request_ids)
        self._settle()
        # The requests that were running keep what they had.
        self._all_drafted &= self.width > 1
        self._after_verify = False

    def verified(self, request_ids: Iterable[str]) -> None:
        """A verify pass of `self.width` rows was launched; settles the width of the next one."""
        width, self._running = self.width, set(request_ids)
        self._settle()
        # Drafting is part of a step's cost: a step counts where it drafts as its width implies.
        timed = self._after_verify and (width > 1) == (self.width > 1)
        self._pending.append(_Step(len(self._running), width, self._all_drafted, timed))
        self._all_drafted = self.width > 1
        self._after_verify = True

    def completed(self, num_accepted: Sequence[int], batch_size: int) -> None:
        """The oldest pass's accepted drafts per request have reached the host.

        Under overlap a request that has ended is verified once more, and counts: upstream does not
        say which ones those are. Its drafts were verified as all others, so that only the text
        behind an end is a little over-represented.
        """
        now, before = self._clock(), self._completed_at
        self._completed_at = now
        while self._pending:
            step = self._pending.popleft()
            if step.batch_size != batch_size:  # its result was never looked at
                before = None
                continue
            self._policy.record_acceptance(num_accepted, step.width if step.drafted else 1)
            if step.timed and before is not None:
                self._policy.record_step(batch_size, step.width, now - before)
            return

    def _settle(self) -> None:
        width = self._agree(self._policy.next_width(len(self._running)))
        if width != self.width:
            logger.debug("DLITE: verify width %d at %d requests.", width, len(self._running))
        self.width = width


def agree_on_rank0(width: int) -> int:
    """Rank 0's width on every tensor-parallel rank (their clocks differ); free for one rank."""
    group = get_parallel().tp_group
    if group.world_size == 1:
        return width
    agreed = torch.tensor([width])
    torch.distributed.broadcast(agreed, src=group.ranks[0], group=group.cpu_group)
    return int(agreed)


def make_width_control(largest: int) -> WidthControl:
    """The control of a worker whose verify passes have up to `largest` rows per request."""
    return WidthControl(WidthPolicy(width_choices(largest)), agree=agree_on_rank0)
