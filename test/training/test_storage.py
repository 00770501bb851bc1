"""Files on disk: one process writes, the others are told."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_dlite.training.storage import StorageError, locked, read_lines

HOLDER = """
import sys, time
from pathlib import Path
from sglang_dlite.training.storage import locked
with locked(Path(sys.argv[1]), "part-0"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_told_and_a_kill_ends_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            refusal = pytest.raises(StorageError, match="another process is writing part-0 in")
            with refusal, locked(folder, "part-0"):
                pass
            with locked(folder, "part-1"):  # another share of the same folder
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
    with locked(folder, "part-0"):
        pass


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, capsys
) -> None:
    def refuse(*_) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path, "part-0"):
        assert f"{tmp_path} cannot be locked ({os.strerror(code)})" in capsys.readouterr().err
    code = errno.EIO
    with pytest.raises(StorageError, match=r"cannot lock .*part-0"), locked(tmp_path, "part-0"):
        pass


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write to"), locked(tmp_path / "file", "part-0"):
        pass


@pytest.mark.parametrize(
    "line,problem",
    [(b"", "Expecting value"), (b"{oops", ""), (b"\xff", ""), (b"3", "no JSON object")],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "part-0-00000.jsonl"
    path.write_bytes(b'{"id": 1}\n' + line + b'\n{"id": 2}\n{"id"')
    with pytest.raises(StorageError, match=rf"part-0-00000.jsonl, line 2: .*{problem}.*restore"):
        read_lines(path)
    path.write_bytes(b'{"id": 1}\n{"id": 2}\n{"id"')
    assert read_lines(path) == [{"id": 1}, {"id": 2}]
