"""gpu_check without a GPU: its arithmetic, its verdicts, and that it says where it cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import SMALL, random_drafter

pytest.importorskip("triton", reason="Triton is not installed")

from sglang_dlite.drafter import DLiteDrafter
from sglang_dlite.gpu_check import __main__ as command
from sglang_dlite.gpu_check import drafters as made
from sglang_dlite.gpu_check import parity, timing
from sglang_dlite.gpu_check.drafters import OFFICIAL, random_table, step_bytes
from sglang_dlite.gpu_check.report import Report
from sglang_dlite.gpu_check.timing import DraftTimer
from sglang_dlite.kernels.fused_drafter import FusedDrafter


def failures(report: Report) -> list[str]:
    return [check["name"] for check in report.checks if not check["passed"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert command.main(["--json", str(file)]) == command.NO_GPU
    assert "torch sees no CUDA device" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.parametrize("works,status", [(True, 0), (False, command.FAILED)])
def test_the_exit_status_and_the_file(
    works: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draft_step(report: Report, deadline: float) -> None:
        with report.part("kernels"):
            report.figure("draft step", 3.5, "us", n=1)
            if not works:
                raise RuntimeError("no kernel image")
            report.add("kernels", True, {})

    monkeypatch.setattr(command, "why_not_here", lambda: None)
    monkeypatch.setattr(command, "describe", lambda: {"device": "none"})
    monkeypatch.setattr(command, "check_draft_step", draft_step)
    monkeypatch.setattr(
        command, "check_serving", lambda report, deadline: report.note("no serving")
    )
    file = tmp_path / "out.json"
    assert command.main(["--json", str(file)]) == status
    result = json.loads(file.read_text())
    assert result["passed"] is works
    assert result["figures"] == [{"name": "draft step", "value": 3.5, "unit": "us", "n": 1}]
    assert result["environment"]["device"] == "none"
    assert works or "no kernel image" in result["checks"][0]["detail"]["error"]


def test_the_draft_steps_part_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with doubles for what only CUDA has: graphs, events, the kernels' launches."""
    monkeypatch.setattr(command, "DEVICE", "cpu")
    monkeypatch.setattr(command, "OFFICIAL", {"small": SMALL.config()})
    monkeypatch.setattr(parity, "check_kernels", lambda *_: None)
    monkeypatch.setattr(timing, "cuda_capture", lambda step: step)
    monkeypatch.setattr(timing, "cuda_timer", lambda step: step() and 1e-3)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device, timer: 1e9)
    report = Report()
    command.check_draft_step(report, deadline=float("inf"))
    assert report.passed
    graphs = [check["name"] for check in report.checks if "graph = eager" in check["name"]]
    assert len(graphs) == 2 * len(command.GRAPH_SIZES)
    timed = {(f["arm"], f["n"]) for f in report.figures if f["name"] == "draft step"}
    arms = ("eager", "graph", "graph + kernels")
    assert timed == {(arm, n) for arm in arms for n in command.TIMED_SIZES}
    assert any("the goal of 1.3 is not met" in note for note in report.notes)


def test_a_random_drafter_is_whole_on_its_device() -> None:
    """Its constants too, which are made on the CPU; meta stands for a GPU."""
    drafter = made.random_drafter(SMALL.config(), "meta", torch.bfloat16)
    tensors = dict([*drafter.named_parameters(), *drafter.named_buffers()])
    assert "constants.key_cos" in tensors
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}


def test_bytes_of_a_step() -> None:
    """Against the parameters of a module: each matrix once, output_proj K times."""
    for config in (SMALL.config(), *OFFICIAL.values()):
        with torch.device("meta"):
            drafter = DLiteDrafter(config)
        head = drafter.sequential_head
        layers = sum(p.numel() for p in drafter.layers.parameters() if p.dim() > 1)
        output = config.num_drafts * head.output_proj.weight.numel()
        hidden = head.state_hidden_mlp.weight[:, config.sequential_rank :].numel()
        assert step_bytes(config, torch.bfloat16) == 2 * (layers + output + hidden)
    assert round(step_bytes(OFFICIAL["Qwen3-4B"], torch.bfloat16) / 1e9, 2) == 1.56


def test_times_are_related_to_the_bound() -> None:
    config = SMALL.config()
    report, table = Report(), random_table(config, "cpu", torch.float32)
    drafter = random_drafter(config, torch.float32)
    calls = []

    def timer(step: Callable[[], Any]) -> float:
        calls.append(step().token_ids.shape)
        return 3e-6

    def capture(step: Callable[[], Any]) -> Callable[[], Any]:
        calls.append("captured")
        return step

    bandwidth = step_bytes(config, torch.float32) / 2e-6
    timed_draft = DraftTimer(report, "small", config, table, bandwidth, timer, capture)
    assert timed_draft.run("graph", drafter, (1, 4), graph=True) == pytest.approx({1: 1.5, 4: 1.5})
    assert calls == ["captured", (1, 4), "captured", (4, 4)]
    timed = [figure for figure in report.figures if figure["name"] == "draft step"]
    assert [figure["n"] for figure in timed] == [1, 4]
    assert timed[0]["value"] == pytest.approx(3)

    late = DraftTimer(report, "small", config, table, bandwidth, timer, capture, deadline=0)
    assert late.run("eager", drafter, (1,), graph=False) == {}
    assert "out of time" in report.notes[0]


def test_a_wrong_fused_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report()
    parity.check_fused_step(report, "small", SMALL.config(), "cpu")
    assert len(report.checks) == 8 and report.passed

    def unrotated(self: FusedDrafter, drafter: DLiteDrafter) -> None:
        original(self, drafter)
        self._sin = torch.zeros_like(self._sin)

    original = FusedDrafter.__init__
    monkeypatch.setattr(FusedDrafter, "__init__", unrotated)
    report = Report()
    parity.check_fused_step(report, "small", SMALL.config(), "cpu")
    assert len(failures(report)) == 6  # all but n = 0


def test_a_stale_graph_fails() -> None:
    config = SMALL.config()
    table, drafter = (
        random_table(config, "cpu", torch.float32),
        FusedDrafter(random_drafter(config, torch.float32)),
    )
    report = Report()
    parity.check_graph(report, "small", drafter, table, (1, 3), lambda step: step)
    assert len(report.checks) == 2 and report.passed

    def capture_once(step: Callable[[], Any]) -> Callable[[], Any]:
        outputs = step()
        return lambda: outputs

    report = Report()
    parity.check_graph(report, "small", drafter, table, (1, 3), capture_once)
    assert len(failures(report)) == 2


def test_nan_is_not_close() -> None:
    assert parity.largest_share(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


def test_its_first_half_imports_no_sglang() -> None:
    code = (
        "import sys\n"
        "from sglang_dlite.gpu_check import __main__, parity, timing\n"
        "sys.exit(any(name.split('.')[0] == 'sglang' for name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
