"""Reading and writing drafter checkpoints: a folder of `config.json` and safetensors."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_dlite.drafter.config import DLiteConfig
from sglang_dlite.drafter.model import DLiteDrafter

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")  # safetensors' names


class CheckpointError(ValueError):
    """The weights of a drafter are absent, damaged or not those of its config."""


def load_drafter(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> DLiteDrafter:
    """Load the checkpoint in folder `path`, for inference (eval mode, no gradients).

    dtype None keeps the stored dtype. Reads one `model.safetensors`, or the shards that
    `model.safetensors.index.json` names. Raises `DrafterConfigError` for the config and
    `CheckpointError` for the weights, listing every missing, unexpected or misshapen tensor.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder. Give the local folder of a DLite checkpoint, for example "
            "after `hf download SJTU-DAI-Sys/Qwen3-4B-DLite --local-dir <folder>`."
        )
    if dtype is not None and not dtype.is_floating_point:
        raise CheckpointError(f"dtype = {dtype}: must be a floating-point dtype, or None")
    config = DLiteConfig.from_pretrained(folder)
    with torch.device("meta"):
        drafter = DLiteDrafter(config)
    expected = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    with _open_tensors(folder) as slices:
        _check_tensors(folder, expected, slices, keep_dtype=dtype is None)
        # A copy: safetensors maps the file, and a later write to it would show through.
        state = {
            name: _read(file, name).to(device, dtype, copy=True) for name, file in slices.items()
        }
    drafter.load_state_dict(state, assign=True)
    return drafter.to(device).requires_grad_(False).eval()


def save_drafter(drafter: DLiteDrafter, path: str | os.PathLike[str]) -> None:
    """Write `config.json` and `model.safetensors` into folder `path`, in the drafter's dtype.

    Both are written to a temporary folder beside it first. A new folder appears whole or not at
    all. In an existing one each file is replaced in one step, the weights first, an unchanged
    config not at all: save a drafter of another config to another folder. Other files there are
    left alone. Raises OSError where the disk does.
    """
    folder = Path(path).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in drafter.state_dict().items()
        }
        try:
            save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        except SafetensorError as error:  # what it raises where the disk refuses
            raise OSError(f"cannot write {WEIGHTS_FILE}: {error}") from error
        text = json.dumps(drafter.config.to_dict(), indent=1) + "\n"
        (staging / CONFIG_FILE).write_text(text, encoding="utf-8")
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            _sync(staging / name)
        if not folder.exists():
            # mkdtemp makes private folders; what is published gets the usual permissions.
            _publish_permissions(staging)
            staging.rename(folder)
            return
        _publish_permissions(staging)
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            if name == CONFIG_FILE and _same_text(folder / name, text):
                continue
            os.replace(staging / name, folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync(file: Path) -> None:
    with file.open("rb+") as handle:
        os.fsync(handle.fileno())


def _publish_permissions(staging: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    staging.chmod(0o777 & ~umask)
    for file in staging.iterdir():
        file.chmod(0o666 & ~umask)


def _same_text(file: Path, text: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") == text
    except (OSError, UnicodeDecodeError):
        return False


@contextmanager
def _open_tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Open the weight files; yields tensor name -> open safetensors file."""
    with ExitStack() as stack:
        owners: dict[str, Any] = {}
        for file in _weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"cannot read {file}: {error}. It is truncated or damaged; download it again."
                ) from error
            twice = sorted(owners.keys() & set(names))
            if twice:
                raise CheckpointError(f"{folder}: in more than one shard: {', '.join(twice)}")
            owners.update(dict.fromkeys(names, handle))
        yield owners


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}. Download the whole checkpoint."
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index} names files outside the folder: {', '.join(outside)}")
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(
            f"{folder} lacks shard(s) named by {INDEX_FILE}: {', '.join(absent)}. Download them."
        )
    return files


def _check_tensors(
    folder: Path, expected: dict[str, list[int]], owners: dict[str, Any], keep_dtype: bool
) -> None:
    problems = [f"missing: {n} {shape}" for n, shape in expected.items() if n not in owners]
    dtypes = set()
    for name, file in owners.items():
        header = file.get_slice(name)
        shape, dtype = list(header.get_shape()), header.get_dtype()
        if name not in expected:
            problems.append(f"unexpected: {name} {shape}")
            continue
        dtypes.add(dtype)
        if shape != expected[name]:
            problems.append(f"wrong shape: {name} is {shape}, must be {expected[name]}")
        if dtype not in _FLOAT_DTYPES:
            problems.append(f"wrong dtype: {name} is {dtype}, must be one of {_FLOAT_DTYPES}")
    if keep_dtype and len(dtypes) > 1:
        problems.append(f"mixed dtypes {sorted(dtypes)}: pass a dtype to cast all tensors to")
    if problems:
        raise CheckpointError(
            f"the weights in {folder} are not those of its config.json:\n  " + "\n  ".join(problems)
        )


def _read(file: Any, name: str) -> Tensor:
    try:
        return file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read tensor {name}: {error}") from error
