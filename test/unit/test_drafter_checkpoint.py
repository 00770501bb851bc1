from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_dlite.drafter import CheckpointError, DLiteDrafter, load_drafter, save_drafter
from sglang_dlite.drafter import checkpoint as checkpoint_module


@pytest.fixture
def saved(make_drafter_config: Any, tmp_path: Path) -> tuple[DLiteDrafter, Path]:
    torch.manual_seed(0)
    drafter = DLiteDrafter(make_drafter_config())
    save_drafter(drafter, tmp_path / "drafter")
    return drafter, tmp_path / "drafter"


def _shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names, weight_map = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_in_the_drafters_dtype(
    make_drafter_config: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    drafter = DLiteDrafter(make_drafter_config()).to(dtype)
    save_drafter(drafter, tmp_path / "new" / "drafter")
    loaded = load_drafter(tmp_path / "new" / "drafter")
    assert loaded.config == drafter.config
    assert loaded.dtype == dtype
    assert not loaded.training
    assert not any(p.requires_grad or p.is_meta for p in loaded.parameters())
    state = loaded.state_dict()
    assert all(torch.equal(state[n], t) for n, t in drafter.state_dict().items())
    assert loaded.constants.key_cos.device.type == "cpu"
    assert sorted(os.listdir(tmp_path / "new")) == ["drafter"]
    assert sorted(os.listdir(tmp_path / "new" / "drafter")) == ["config.json", "model.safetensors"]


def test_golden_files_round_trip(golden: Path, tmp_path: Path) -> None:
    save_drafter(load_drafter(golden), tmp_path / "copy")
    theirs, ours = (
        load_file(golden / "model.safetensors"),
        load_file(tmp_path / "copy" / "model.safetensors"),
    )
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[n], ours[n]) for n in theirs)


def test_dtype_and_device(saved: tuple[DLiteDrafter, Path]) -> None:
    assert load_drafter(saved[1], dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load_drafter(saved[1], device="meta").norm.weight.is_meta
    with pytest.raises(CheckpointError, match="must be a floating-point dtype"):
        load_drafter(saved[1], dtype=torch.int64)


def test_loaded_weights_do_not_alias_the_file(saved: tuple[DLiteDrafter, Path]) -> None:
    drafter, path = saved
    loaded = load_drafter(path)
    with (path / "model.safetensors").open("rb+") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\0" * 4096)
    state = loaded.state_dict()
    assert all(torch.equal(state[n], t) for n, t in drafter.state_dict().items())


def test_sharded(saved: tuple[DLiteDrafter, Path]) -> None:
    drafter, path = saved
    _shard(path)
    state = load_drafter(path).state_dict()
    assert all(torch.equal(state[n], t) for n, t in drafter.state_dict().items())


def test_sharded_errors(saved: tuple[DLiteDrafter, Path]) -> None:
    path = saved[1]
    _shard(path)
    first, second = (path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=r"lacks shard.*model-00002-of-00002"):
        load_drafter(path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="in more than one shard"):
        load_drafter(path)
    second.write_bytes(content)
    index = path / "model.safetensors.index.json"
    for text, message in (
        ('{"weight_map": {"norm.weight": "../x.safetensors"}}', "outside the folder"),
        ('{"weight_map": 3}', "is not a safetensors index"),
        ('{"weight_map": {"a": 3}}', "is not a safetensors index"),
        ("{", "is not a safetensors index"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            load_drafter(path)


def test_every_wrong_tensor_is_listed(saved: tuple[DLiteDrafter, Path]) -> None:
    path = saved[1]
    tensors = load_file(path / "model.safetensors")
    del tensors["norm.weight"], tensors["layers.1.mlp.up_proj.weight"]
    tensors["lm_head.weight"] = torch.zeros(2, 3)
    tensors["context_norm.weight"] = torch.zeros(17)
    tensors["sequential_head.state_proj.bias"] = torch.zeros(14, dtype=torch.int8)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_drafter(path)
    for line in (
        "missing: norm.weight [16]",
        "missing: layers.1.mlp.up_proj.weight [24, 16]",
        "unexpected: lm_head.weight [2, 3]",
        "wrong shape: context_norm.weight is [17], must be [16]",
        "wrong dtype: sequential_head.state_proj.bias is I8",
    ):
        assert line in str(error.value)


def test_mixed_dtypes_need_a_choice(saved: tuple[DLiteDrafter, Path]) -> None:
    path = saved[1]
    tensors = load_file(path / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"].bfloat16()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="pass a dtype"):
        load_drafter(path)
    assert load_drafter(path, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -5000])
def test_truncated_file(saved: tuple[DLiteDrafter, Path], keep: int) -> None:
    file = saved[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_drafter(saved[1])


def test_missing_folder_and_file(saved: tuple[DLiteDrafter, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a folder.*hf download"):
        load_drafter(tmp_path / "nowhere")
    (saved[1] / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has neither"):
        load_drafter(saved[1])
    assert issubclass(CheckpointError, ValueError)


@pytest.mark.parametrize("when", ["tensors", "config", "rename"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_crash_while_saving_leaves_the_old_one(
    make_drafter_config: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
    exists: bool,
) -> None:
    path = tmp_path / "drafter"
    if exists:
        save_drafter(DLiteDrafter(make_drafter_config()), path)
        (path / "README.md").write_text("mine")
    before = {f.name: f.read_bytes() for f in path.iterdir()} if exists else {}

    def crash(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        if when == "tensors":
            patch.setattr(checkpoint_module, "save_file", crash)
        elif when == "config":
            patch.setattr(Path, "write_text", crash)
        else:
            patch.setattr(os, "replace", crash)
            patch.setattr(Path, "rename", crash)
        with pytest.raises(OSError, match="disk full"):
            save_drafter(DLiteDrafter(make_drafter_config()), path)

    assert path.exists() == exists
    assert {f.name: f.read_bytes() for f in path.iterdir()} == before if exists else True
    assert [p for p in tmp_path.iterdir() if p != path] == []
    save_drafter(DLiteDrafter(make_drafter_config()), path)
    load_drafter(path)
    assert not exists or (path / "README.md").read_text() == "mine"


def test_saved_files_have_the_usual_permissions(saved: tuple[DLiteDrafter, Path]) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert saved[1].stat().st_mode & 0o777 == 0o777 & ~umask
    for file in saved[1].iterdir():
        assert file.stat().st_mode & 0o777 == 0o666 & ~umask
