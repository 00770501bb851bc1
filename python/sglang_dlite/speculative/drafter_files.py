"""The drafter's files: a local directory, or a hub id fetched through huggingface_hub."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from sglang_dlite.drafter import DLiteConfig, DrafterConfigError


def drafter_directory(
    path: str, revision: str | None = None, download_dir: str | None = None
) -> Path:
    """The local directory of `path`, downloading a hub id's config and weights if need be, into
    `download_dir` or the hub's cache.

    Raises:
        DrafterConfigError: `path` is neither a directory nor a hub id that can be fetched.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                path,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=["*.json", "*.safetensors"],
            )
        )
    except Exception as error:
        raise DrafterConfigError(
            f"--speculative-draft-model-path {path!r}: not a directory, and not a hub model that "
            f"could be fetched ({type(error).__name__}: {error}). Give a directory with "
            "config.json and model.safetensors, or a hub id such as SJTU-DAI-Sys/Qwen3-4B-DLite."
        ) from error


@lru_cache(maxsize=4)
def read_drafter_config(path: str, revision: str | None = None) -> DLiteConfig:
    """The drafter's validated configuration."""
    return DLiteConfig.from_pretrained(drafter_directory(path, revision))
