"""`sglang-dlite cache-states CONFIG.yaml`: the target's states for the chosen anchors, once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sglang_dlite.training.config import TrainConfig, TrainConfigError, load_config

if TYPE_CHECKING:
    from sglang_dlite.training.anchors import AnchorSpec, Reply
    from sglang_dlite.training.state_cache import CacheWriter
    from sglang_dlite.training.states import OnlineStates

_COMMIT_EVERY = 64  # replies
_FORWARD_TOKENS = 2048  # in one pass: 1.7 times as fast as one reply of 200 tokens at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="the config of `train`, or a shipped one's name")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="do the I-th of N shares")


def run(args: argparse.Namespace) -> int:
    from sglang_dlite.training.prompts import PromptError, parse_share
    from sglang_dlite.training.train import ERRORS

    try:
        share, shares = parse_share(args.share)
        folder = cache_states(load_config(args.config, args.overrides), share, shares)
    except (*ERRORS, PromptError) as error:
        print(f"cache-states: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def choose_places(count: int, limit: int, seed: int, reply_id: str) -> np.ndarray:
    """Which of a reply's `count` places to cache, sorted: all, or `limit` random ones."""
    if count <= limit:
        return np.arange(count)
    generator = np.random.default_rng([seed, *reply_id.encode()])
    return np.sort(generator.choice(count, limit, replace=False))


def cache_states(config: TrainConfig, share: int = 0, shares: int = 1) -> Path:
    """Fill the cache of a config for this share of its replies; what is there already is kept."""
    import torch

    from sglang_dlite.training.anchors import AnchorSpec
    from sglang_dlite.training.cache_format import CacheFormat
    from sglang_dlite.training.dataset import load_replies
    from sglang_dlite.training.selection import usable
    from sglang_dlite.training.session import pick_device
    from sglang_dlite.training.state_cache import CacheWriter
    from sglang_dlite.training.states import OnlineStates
    from sglang_dlite.training.storage import locked
    from sglang_dlite.training.targets import FrozenTarget, drafter_config, target_path

    if not config.data.top_k:
        raise TrainConfigError("data.top_k = 0: the cache keeps the likeliest tokens only; set it")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    target = FrozenTarget.load(config.target, pick_device(config.run.device))
    shape = drafter_config(target.shape, config.model)
    window = config.model.window if config.uses_history else 0
    spec = AnchorSpec.of(shape, config.data.top_k, window)
    if config.data.cached_layer_ids:
        spec = replace(spec, layer_ids=config.data.cached_layer_ids)
        if max(spec.layer_ids) >= target.shape.num_hidden_layers:
            raise TrainConfigError(
                f"data.cached_layer_ids = {list(spec.layer_ids)}: the target's layers are "
                f"0..{target.shape.num_hidden_layers - 1}"
            )
    replies = load_replies([Path(f) for f in config.data.replies], target.shape.vocab_size)
    folder = Path(config.data.cache)
    fmt = CacheFormat(
        target=Path(target_path(config.target.path)).name,
        target_layer_ids=spec.layer_ids,
        hidden_size=shape.hidden_size,
        num_drafts=spec.num_drafts,
        top_k=spec.top_k,
        window=window,
        anchors_per_reply=config.data.cached_anchors_per_reply,
        seed=config.optim.seed,
        target_weights=target.fingerprint,
        target_dtype=target.dtype,
    )
    mine = [i for i in range(share, len(replies), shares) if usable(replies[i], config.data)]
    part = f"part-{share}-of-{shares}"
    with locked(folder, part):
        writer = CacheWriter(folder, part, fmt)
        _fill(writer, OnlineStates(target, replies), spec, mine, config)
        writer.close()
    return folder


def _fill(
    writer: CacheWriter,
    source: OnlineStates,
    spec: AnchorSpec,
    mine: list[int],
    config: TrainConfig,
) -> None:
    """Write the states of the replies `mine` that the cache lacks, behind a progress bar."""
    import torch
    from tqdm import tqdm

    from sglang_dlite.training.anchors import Pick, TopLaw
    from sglang_dlite.training.states import ReplyStates

    replies = source.replies
    bar = tqdm(total=len(mine), desc="states", unit="reply", smoothing=0.05)
    missing = [index for index in mine if writer.index.find(replies[index]) is None]
    bar.update(len(mine) - len(missing))
    stale = sum(writer.index.is_stale(replies[index]) for index in missing)
    if stale:
        print(
            f"cache-states: {config.data.cache} has other texts under the ids of {stale} replies: "
            "their states are added",
            file=sys.stderr,
        )
    for first in range(0, len(missing), _COMMIT_EVERY):
        for together in _of_like_length(missing[first : first + _COMMIT_EVERY], replies):
            picks = [Pick(i, _cached_places(replies[i], config)) for i in together]
            for pick, batch in zip(picks, source.batches(picks, spec), strict=True):
                part = ReplyStates(replies[pick.reply], pick.places, spec)
                # Every law once: the first draft of the place's anchor, or the j-th of an earlier.
                owner = np.searchsorted(pick.places, part.laws, side="right") - 1
                where = (torch.from_numpy(owner), torch.from_numpy(part.laws - pick.places[owner]))
                assert isinstance(batch.law, TopLaw)
                writer.append(part, batch, (batch.law.ids[where], batch.law.logprobs[where]))
                bar.update()
        writer.commit()
    bar.close()


def _cached_places(reply: Reply, config: TrainConfig) -> np.ndarray:
    from sglang_dlite.training.anchors import is_held_out

    # Held-out replies are walked through from end to end: they need every place.
    held = is_held_out(reply.id, config.data.held_out_percent)
    limit = reply.length if held else config.data.cached_anchors_per_reply
    return choose_places(len(reply.places), limit, config.optim.seed, reply.id)


def _of_like_length(indices: list[int], replies: Sequence[Reply]) -> Iterator[list[int]]:
    """Groups that share a forward pass: their padded tokens stay within `_FORWARD_TOKENS`."""
    group: list[int] = []
    for index in sorted(indices, key=lambda i: len(replies[i].tokens)):
        if group and (len(group) + 1) * len(replies[index].tokens) > _FORWARD_TOKENS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
