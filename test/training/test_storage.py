"""Files on disk: one process writes, the others are told."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_dlite.training.storage import StorageError, locked

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


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write to"), locked(tmp_path / "file", "part-0"):
        pass
