"""The cache gives what a forward pass gives, holds only what is needed, and survives kills."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sglang_dlite.training.anchors import AnchorSpec, Pick, is_held_out
from sglang_dlite.training.cache_format import CacheError, CacheFormat, check_cache
from sglang_dlite.training.cache_states import cache_states, choose_places
from sglang_dlite.training.config import TrainConfig, from_dict
from sglang_dlite.training.dataset import load_replies
from sglang_dlite.training.session import Session
from sglang_dlite.training.state_cache import CachedStates
from sglang_dlite.training.states import OnlineStates
from sglang_dlite.training.storage import StorageError, locked
from sglang_dlite.training.targets import FrozenTarget
from sglang_dlite.training.train import train

from .conftest import MODEL, VOCAB

LAYER_IDS = (0, 1, 3)  # the rule for S=3 of 4 layers


def _config(target: Path, data: Path, cache: Path, window: bool = True, **changes) -> TrainConfig:
    return from_dict(
        {
            "target": {"path": str(target), "dtype": "float32"},
            "data": {
                "replies": [str(data)],
                "cache": str(cache),
                "states": "cache",
                "top_k": 5,
                "cached_anchors_per_reply": 6,
                "held_out_percent": 20,
            }
            | changes,
            "model": MODEL,
            "stages": {"teacher": 1.0 if window else 0.0},
            "run": {"folder": str(cache.parent / "run")},
        }
    )


def _spec(window: int) -> AnchorSpec:
    return AnchorSpec(LAYER_IDS, MODEL["group_size"], MODEL["block_size"] - 1, 5, window)


@pytest.mark.parametrize("window", [0, MODEL["window"]])
def test_a_cached_batch_is_the_online_one(
    target: Path, data_folder: Path, frozen, tmp_path: Path, window: int
) -> None:
    folder = cache_states(_config(target, data_folder, tmp_path / "c", bool(window)))
    replies, spec = load_replies([data_folder], VOCAB), _spec(window)
    cached, online = CachedStates(folder, replies, spec), OnlineStates(frozen, replies)
    picks = [
        Pick(i, cached.places(reply)[start::2])
        for i, reply in enumerate(replies)
        for start in (0, 1)
        if len(cached.places(reply)) > 1
    ]
    a, b = cached.batch(picks, spec), online.batch(picks, spec)
    assert len(a.labels) > 80
    for name in ("token_group", "next_tokens", "labels", "labelled"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    torch.testing.assert_close(a.pivot_states.float(), b.pivot_states, atol=0.05, rtol=0.01)
    labelled = a.labelled
    assert torch.equal(a.law.ids[labelled][:, 0], b.law.ids[labelled][:, 0])
    torch.testing.assert_close(
        a.law.logprobs[labelled].float(), b.law.logprobs[labelled], atol=1e-2, rtol=1e-2
    )
    if window:
        assert torch.equal(a.window.valid, b.window.valid)
        torch.testing.assert_close(
            a.window.features[a.window.index].float(), b.window.features[b.window.index],
            atol=0.05, rtol=0.01,
        )  # fmt: skip


@pytest.mark.parametrize(
    "layers,drafts,top_k,window",
    [((0, 3), 4, 5, 6), ((3, 0, 1), 2, 5, 0), ((0, 1, 3), 4, 2, 3), ((1,), 1, 1, 2)],
)
def test_a_cache_serves_drafters_that_need_less(
    target: Path, data_folder: Path, frozen, tmp_path: Path, layers, drafts, top_k, window
) -> None:
    folder = cache_states(_config(target, data_folder, tmp_path / "c"))
    replies = load_replies([data_folder], VOCAB)
    spec = AnchorSpec(layers, 1, drafts, top_k, window)
    cached, online = CachedStates(folder, replies, spec), OnlineStates(frozen, replies)
    picks = [Pick(i, cached.places(r)[1:4]) for i, r in enumerate(replies) if r.length > 6]
    a, b = cached.batch(picks, spec), online.batch(picks, spec)
    assert len(a.labels) > 20 and torch.equal(a.labelled, b.labelled)
    torch.testing.assert_close(a.pivot_states.float(), b.pivot_states, atol=0.05, rtol=0.01)
    assert torch.equal(a.law.ids[a.labelled][:, 0], b.law.ids[a.labelled][:, 0])
    assert a.law.ids.shape == b.law.ids.shape
    if window:
        torch.testing.assert_close(
            a.window.features[a.window.index].float(), b.window.features[b.window.index],
            atol=0.05, rtol=0.01,
        )  # fmt: skip


def test_only_what_the_anchors_need_is_stored(target: Path, data_folder: Path, tmp_path) -> None:
    folder = cache_states(_config(target, data_folder, tmp_path / "c", window=False))
    replies = load_replies([data_folder], VOCAB)
    anchors = laws = 0
    for reply in replies:
        limit = 1000 if is_held_out(reply.id, 20) else 6
        count = min(limit, max(0, reply.length - 1))
        anchors += count if reply.length >= 2 else 0
        if reply.length >= 2:
            places = CachedStates(folder, replies, _spec(0)).places(reply)
            assert len(places) == count
            rows = {p + j for p in places.tolist() for j in range(MODEL["block_size"] - 1)}
            laws += len({row for row in rows if row < reply.length - 1})
    sizes = {path.suffix: path.stat().st_size for path in folder.glob("part-*")}
    assert sizes[".states"] == anchors * 3 * 32 * 2
    assert sizes[".topids"] == laws * 5 * 4 and sizes[".toplogp"] == laws * 5 * 2
    assert ".window" not in sizes


@pytest.mark.parametrize("tear", ["line", "arrays", "both"])
def test_a_kill_loses_only_what_was_not_committed(
    target: Path, data_folder: Path, tmp_path: Path, tear: str
) -> None:
    whole = cache_states(_config(target, data_folder, tmp_path / "whole"))
    broken = cache_states(_config(target, data_folder, tmp_path / "broken"))
    (part,) = broken.glob("*.jsonl")
    lines = part.read_bytes().splitlines(keepends=True)
    torn = lines[5][: len(lines[5]) // 2] if tear in ("line", "both") else b""
    part.write_bytes(b"".join(lines[:5]) + torn)
    if tear in ("arrays", "both"):
        record = json.loads(lines[6])
        for kind, rows in record["rows"].items():
            size = CacheFormat.read(broken).row_bytes(kind)
            with part.with_suffix(f".{kind}").open("rb+") as file:
                file.truncate(rows * size + 7)
    again = cache_states(_config(target, data_folder, tmp_path / "broken"))
    for path in sorted(whole.glob("part-*")):
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_shares_together_hold_every_reply(target: Path, data_folder: Path, tmp_path) -> None:
    config = _config(target, data_folder, tmp_path / "c")
    for share in (0, 1):
        cache_states(config, share, 2)
    replies = load_replies([data_folder], VOCAB)
    cached = CachedStates(tmp_path / "c", replies, _spec(0))
    assert all(len(cached.places(reply)) for reply in replies if reply.length > 1)
    before = {path: path.stat().st_size for path in (tmp_path / "c").glob("part-*")}
    cache_states(config)  # another number of shares: nothing is left to do
    after = {path: path.stat().st_size for path in (tmp_path / "c").glob("part-*")}
    assert before == {path: after[path] for path in before}
    assert not any(size for path, size in after.items() if path not in before)


def test_a_cache_for_something_else_is_refused(target: Path, data_folder: Path, tmp_path) -> None:
    config = _config(target, data_folder, tmp_path / "c", window=False)
    cache_states(config)
    replies = load_replies([data_folder], VOCAB)
    with pytest.raises(CacheError, match=r"needs target layers \[2\], the cache holds"):
        CachedStates(tmp_path / "c", replies, AnchorSpec((0, 2), 2, 4, 5))
    for spec, message in (
        (_spec(6), r"model.window.* is 6, the cache was made for 0"),
        (AnchorSpec(LAYER_IDS, 2, 5, 5), r"block_size - 1 is 5, the cache was made for 4"),
        (AnchorSpec(LAYER_IDS, 2, 4, 6), r"top_k is 6, the cache was made for 5"),
    ):
        with pytest.raises(CacheError, match=message):
            CachedStates(tmp_path / "c", replies, spec)
    with pytest.raises(CacheError, match="anchors_per_reply is 6, now 7"):
        cache_states(
            _config(target, data_folder, tmp_path / "c", False, cached_anchors_per_reply=7)
        )
    with pytest.raises(CacheError, match="cache-states"):
        CachedStates(tmp_path / "none", replies, _spec(0))


def test_lost_rows_are_an_error(target: Path, data_folder: Path, tmp_path: Path) -> None:
    folder = cache_states(_config(target, data_folder, tmp_path / "c"))
    next(folder.glob("*.topids")).write_bytes(b"")
    with pytest.raises(CacheError, match="topids is shorter"):
        cache_states(_config(target, data_folder, tmp_path / "c"))


def test_a_line_that_was_removed_is_made_again(
    target: Path, data_folder: Path, tmp_path: Path
) -> None:
    config = _config(target, data_folder, tmp_path / "c")
    folder = cache_states(config)
    (part,) = folder.glob("*.jsonl")
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:3] + lines[4:]))
    cache_states(config)
    replies = load_replies([data_folder], VOCAB)
    assert all(
        len(CachedStates(folder, replies, _spec(0)).places(r)) for r in replies if r.length > 1
    )
    again = part.read_bytes().splitlines(keepends=True)
    assert again[:-1] == lines[:3] + lines[4:]
    assert json.loads(again[-1])["id"] == json.loads(lines[3])["id"]


def test_a_full_disk_is_named_and_the_cache_is_completed_afterwards(
    target: Path, data_folder: Path, tmp_path: Path, file_size_limit
) -> None:
    whole = cache_states(_config(target, data_folder, tmp_path / "whole"))
    config = _config(target, data_folder, tmp_path / "full")
    with file_size_limit(9000), pytest.raises(StorageError, match="Free some space"):
        cache_states(config)
    again = cache_states(config)
    for path in sorted(whole.glob("part-*")):
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_two_processes_do_not_write_one_part(target: Path, data_folder: Path, tmp_path) -> None:
    config = _config(target, data_folder, tmp_path / "c")
    with locked(tmp_path / "c", "part-0-of-1"), pytest.raises(StorageError, match="another proc"):
        cache_states(config)
    assert not (tmp_path / "c" / "cache.json").exists()


def test_places_are_chosen_by_reply_and_seed() -> None:
    assert choose_places(5, 8, 0, "a").tolist() == [0, 1, 2, 3, 4]
    chosen = choose_places(100, 8, 0, "a")
    assert len(set(chosen.tolist())) == 8 and np.all(np.diff(chosen) > 0)
    assert np.array_equal(chosen, choose_places(100, 8, 0, "a"))
    assert not np.array_equal(chosen, choose_places(100, 8, 0, "b"))


def test_states_of_another_text_are_not_used_for_it(
    target: Path, data_folder: Path, write_replies, frozen, tmp_path: Path, capsys
) -> None:
    folder = cache_states(_config(target, data_folder, tmp_path / "c"))
    longer = write_replies(tmp_path / "longer", [15] * 30)  # the same ids and prompts
    replies, spec = load_replies([longer], VOCAB), _spec(MODEL["window"])
    none = CachedStates(folder, replies, spec)
    known = load_replies([data_folder], VOCAB)
    for reply, before in zip(replies, known, strict=True):
        assert not len(none.places(reply)) or reply.content == before.content
    with pytest.raises(CacheError, match=r"of \d+ replies, the first 'part-0/.*cache-states"):
        train(_config(target, longer, tmp_path / "c"))
    cache_states(_config(target, longer, tmp_path / "c"))
    assert "other texts under the ids" in capsys.readouterr().err
    online = OnlineStates(frozen, replies)
    cached = CachedStates(folder, replies, spec)
    picks = [Pick(i, cached.places(r)) for i, r in enumerate(replies) if r.length > 1]
    assert len(picks) > 20 and all(len(pick.places) for pick in picks)
    check_cache(folder, frozen, [replies[pick.reply] for pick in picks])
    torch.testing.assert_close(
        cached.batch(picks, spec).pivot_states.float(), online.batch(picks, spec).pivot_states,
        atol=0.05, rtol=0.01,
    )  # fmt: skip
    before = load_replies([data_folder], VOCAB)  # it still serves those that it was made for
    old = CachedStates(folder, before, spec)
    assert all(len(old.places(reply)) for reply in before if reply.length > 1)


def test_replies_that_the_cache_lacks_are_named(
    target: Path, data_folder: Path, write_replies, frozen, tmp_path: Path, capsys
) -> None:
    """A second reply to a prompt has an id that no cache of the first folder alone knows."""
    folder = cache_states(_config(target, data_folder, tmp_path / "c"))
    longer = write_replies(tmp_path / "longer", [15] * 30)  # the same ids and prompts
    both = [str(data_folder), str(longer)]
    config = _config(target, data_folder, tmp_path / "c", replies=both)
    known = load_replies([data_folder], VOCAB)
    more = load_replies([data_folder, longer], VOCAB)
    used = sum(reply.length > 1 for reply in more)
    lacking = [r for r in more[len(known) :] if r.length > 1]
    wanted = rf"{len(lacking)} of {used} replies, the first '{lacking[0].id}'.*Run cache-states"
    with pytest.raises(CacheError, match=wanted):
        train(config)
    session = Session(config)
    session.trainer("drafter", session.fresh_drafter(), None)
    trained = sum(r.length > 1 and not is_held_out(r.id, 20) for r in known)
    assert f"; {trained} replies, " in capsys.readouterr().err  # those it has places of
    cache_states(config)
    check_cache(folder, frozen, [reply for reply in more if reply.length > 1])


def _without_hashes(folder: Path) -> None:
    """Make a cache what it was before lines had a hash and `cache.json` the target's identity."""
    (part,) = folder.glob("*.jsonl")
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    for line in lines:
        del line["content"]
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = json.loads((folder / "cache.json").read_text())
    del found["target_weights"], found["target_dtype"]
    (folder / "cache.json").write_text(json.dumps(found))


def test_a_cache_without_hashes_stays_usable_where_its_rows_fit(
    target: Path, data_folder: Path, write_replies, frozen, tmp_path: Path
) -> None:
    folder = cache_states(_config(target, data_folder, tmp_path / "c"))
    _without_hashes(folder)
    replies, spec = load_replies([data_folder], VOCAB), _spec(MODEL["window"])
    cached = CachedStates(folder, replies, spec)
    assert all(len(cached.places(reply)) for reply in replies if reply.length > 1)
    sizes = {path: path.stat().st_size for path in folder.glob("part-*")}
    cache_states(_config(target, data_folder, tmp_path / "c"))  # nothing is left to do
    assert sizes == {path: path.stat().st_size for path in folder.glob("part-*")}
    shorter = load_replies([write_replies(tmp_path / "shorter", [5] * 30)], VOCAB)
    with pytest.raises(CacheError, match="another prompt or reply with the same id"):
        check_cache(folder, frozen, shorter)


def test_another_target_of_the_same_name_is_refused(
    target: Path, data_folder: Path, tmp_path: Path
) -> None:
    """As a fine-tuned copy is: the same config, names and file sizes."""
    from safetensors.torch import load_file, save_file

    config = _config(target, data_folder, tmp_path / "c")
    folder = cache_states(config)
    tuned = shutil.copytree(target, tmp_path / "tuned" / target.name)
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"] *= 1.01
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    other = _config(tuned, data_folder, tmp_path / "c")
    with pytest.raises(CacheError, match=r"target_weights is '\w+', now '\w+'.*data\.cache"):
        cache_states(other)
    with pytest.raises(CacheError, match="target_weights"):
        train(other)
    half = replace(config, target=replace(config.target, dtype="bfloat16"))
    with pytest.raises(CacheError, match="target_dtype is 'float32', now 'bfloat16'"):
        check_cache(folder, FrozenTarget.load(half.target), [])
