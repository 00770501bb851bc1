"""Builds the drafter for a target and checks that the two belong together."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable

import torch

from sglang_dlite.drafter import DLiteConfig, DraftBlock, load_drafter
from sglang_dlite.speculative.drafter_files import drafter_directory

FACTORY_VARIABLE = "DLITE_DRAFTER_FACTORY"

_MAX_PADDING = 1024  # where the table's size is not known yet; the check is then repeated

Embedding = Callable[[torch.Tensor], torch.Tensor]


class Drafter(Protocol):
    """What the worker needs of a drafter; `DLiteDrafter` is one."""

    config: DLiteConfig

    def draft(
        self, pivot_states: torch.Tensor, token_group: torch.Tensor, embed: Embedding
    ) -> DraftBlock:
        """pivot_states [n, S, h], token_group [n, G] int64 -> token_ids [n, K] int64."""
        ...


@runtime_checkable
class SampledDrafter(Drafter, Protocol):
    """A drafter that can also draw its drafts, as rejection sampling needs it."""

    def draft_sampled(
        self,
        pivot_states: torch.Tensor,
        token_group: torch.Tensor,
        embed: Embedding,
        temperatures: torch.Tensor,
        greedy: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> DraftBlock:
        """As `DLiteDrafter.draft_sampled`; its head_vectors [n, K, R] are those of the drafts."""
        ...

    def law_logits(self, head_vectors: torch.Tensor) -> torch.Tensor:
        """fp32 logits [..., V], as `DLiteDrafter.law_logits`, of head vectors [..., R] in fp32."""
        ...


def require_sampled_drafts(drafter: Drafter) -> SampledDrafter:
    """The drafter, if it can serve --speculative-use-rejection-sampling.

    Raises:
        ValueError: it is of a kind that only drafts greedily.
    """
    if isinstance(drafter, SampledDrafter):
        return drafter
    raise ValueError(
        f"--speculative-use-rejection-sampling: {type(drafter).__name__} (made by "
        f"{FACTORY_VARIABLE} = {os.environ.get(FACTORY_VARIABLE)!r}) has no draft_sampled and "
        "law_logits; allowed are drafters that draw their drafts, as the checkpoint's own does. "
        "Drop the option (the output's law is the target's either way), or unset the variable."
    )


def build_drafter(
    path: str,
    revision: str | None,
    device: str,
    dtype: torch.dtype,
    sampled_drafts: bool = False,
) -> Drafter:
    """The drafter at `path`, or the one that DLITE_DRAFTER_FACTORY makes.

    With sampled_drafts a `SampledDrafter` where the checkpoint is loaded.

    The variable names `module:function`; the function is called with (path, device, dtype) in
    the scheduler process and returns a Drafter. It is the seam for a drafter of one's own, and
    for the oracle of the tests. The config.json at `path` is read either way.

    Raises:
        ValueError: the variable names nothing that can be imported; the checkpoint is unfit.
    """
    directory = drafter_directory(path, revision)
    spec = os.environ.get(FACTORY_VARIABLE)
    if not spec:
        drafter = load_drafter(directory, device=device, dtype=dtype)
        if device == "cpu":
            from sglang_dlite.platforms.cpu_drafter import prepare_drafter

            return prepare_drafter(drafter, sampled_drafts)
        if device.startswith("cuda") and find_spec("triton") is not None:
            from sglang_dlite.kernels.fused_drafter import prepare_drafter as prepare_on_gpu

            return prepare_on_gpu(drafter)
        return drafter
    try:
        factory = pkgutil.resolve_name(spec)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{FACTORY_VARIABLE} = {spec!r} cannot be imported ({error}); allowed is "
            "module:function, importable by the server. Unset it to load the checkpoint."
        ) from error
    return factory(str(directory), device, dtype)


def check_pair(config: DLiteConfig, target: Any, embedding_rows: int | None = None) -> None:
    """Refuse a drafter that was made for another target.

    target is the text config of the served model (HF names); embedding_rows is the size of its
    embedding table, once that is known.

    Raises:
        ValueError: names the field and both values.
    """
    for field, ours, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("num_target_layers", config.num_target_layers, target.num_hidden_layers),
    ):
        if ours != theirs:
            raise ValueError(
                f"--speculative-draft-model-path: the drafter's {field} is {ours}, the target has "
                f"{theirs}. Use a drafter that was trained for this target."
            )
    # SGLang pads a table to a multiple of 64; a drafter may be made for either size.
    if embedding_rows is None:
        embedding_rows = target.vocab_size + _MAX_PADDING
    if config.mask_token_id >= embedding_rows:
        raise ValueError(
            f"--speculative-draft-model-path: the drafter's mask_token_id is "
            f"{config.mask_token_id}, the target's embedding table has {embedding_rows} rows. Use "
            "a drafter that was trained for this target."
        )
    if not target.vocab_size <= config.vocab_size <= embedding_rows:
        raise ValueError(
            f"--speculative-draft-model-path: the drafter's vocab_size is {config.vocab_size}, the "
            f"target has {target.vocab_size} tokens ({embedding_rows} embedding rows). Use a "
            "drafter that was trained for this target."
        )
