"""Writing files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write the whole file or nothing; parents are made. Text is written as UTF-8."""
    content = data.encode("utf-8") if isinstance(data, str) else data
    write_whole(path, lambda file: file.write(content))


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call `write` with a scratch file beside `path`, then put it in its place; parents are made.

    What `write` or the disk raises is raised again; neither the scratch file nor a torn one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "wb", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            # Temporary files are private; the result is as readable as any other file.
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
