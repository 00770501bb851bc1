"""Files that appear whole or not at all, written by one process, and what is said when the disk
is full."""

from __future__ import annotations

import errno
import fcntl
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sglang_dlite.files import write_whole

# What flock answers on file systems that have none: some network and FUSE mounts.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}


class StorageError(RuntimeError):
    """A file could not be written, and what was there before is intact; or it cannot be read."""


@contextmanager
def locked(folder: Path, name: str, wait: bool = False) -> Iterator[None]:
    """Be the only process that writes what `name` stands for in `folder`, which is made if need be.

    Raises `StorageError` at once where another process does, or with `wait` stands in line; and
    where the folder refuses. A file system without locks gets a warning. The kernel ends the lock
    with the process, however that ends; the file `.<name>.lock` stays, since removing it would let
    a third process lock another file of the same name.
    """
    path = folder / f".{name}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise StorageError(f"cannot write to {folder}: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise StorageError(
                f"another process is writing {name} in {folder} (it holds {path}): wait for its "
                "end or stop it, or use another folder."
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise StorageError(f"cannot lock {path}: {error}") from error
            print(
                f"{folder} cannot be locked ({error.strerror}): see to it that no second process "
                f"writes {name} there",
                file=sys.stderr,
            )
        yield


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """As `write_whole`, with `StorageError` and its remedy where the disk refuses."""
    try:
        write_whole(path, write)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
        raise StorageError(
            f"cannot write {path}: {error}. The file before it is intact. Free some space and run "
            "the same command again: it continues from there."
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of the complete lines of a file; a torn last line is left out.

    Raises `StorageError` for a damaged line, which none of our commands leaves behind.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    values = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            value = json.loads(line)
        except ValueError as error:  # UnicodeDecodeError is one
            raise _damaged(path, number, str(error)) from error
        if not isinstance(value, dict):
            raise _damaged(path, number, "no JSON object")
        values.append(value)
    return values


def _damaged(path: Path, number: int, problem: str) -> StorageError:
    return StorageError(
        f"{path}, line {number}: {problem}. The file was damaged outside of this program: restore "
        "it, or remove the line; what it held is then made again."
    )
