"""`sglang-dlite train` from a config file to an exported drafter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from sglang_dlite.cli import main
from sglang_dlite.drafter import load_drafter
from sglang_dlite.training import simulate
from sglang_dlite.training.config import from_dict, load_config
from sglang_dlite.training.estimate import _activations, estimate
from sglang_dlite.training.provenance import read_metrics, without_folders, write_provenance
from sglang_dlite.training.run_folder import load_any, load_teacher
from sglang_dlite.training.storage import locked
from sglang_dlite.training.targets import TargetShape, drafter_config

from .conftest import MODEL


def _write(path: Path, target: Path, replies: Path, folder: Path, **sections) -> Path:
    raw: dict = {
        "target": {"path": str(target), "dtype": "float32"},
        "data": {"replies": [str(replies)], "held_out_percent": 20, "top_k": 8},
        "model": MODEL,
        "stages": {"unit": "steps", "stable": 4},
        "optim": {"batch_replies": 6, "anchors_per_reply": 4, "micro_replies": 3},
        "eval": {"folders": [str(replies)]},
        "run": {"folder": str(folder), "device": "cpu", "eval_every": 4, "checkpoint_every": 4},
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values
    path.write_text(yaml.safe_dump(raw))
    return path


ALL_STAGES = {"teacher": 5, "warm_up": 3, "transition": 3, "stable": 4}


@pytest.mark.parametrize("states", ["online", "cache"])
def test_two_stage_training_from_the_command_line(
    target: Path, data_folder: Path, tmp_path: Path, states: str, capsys
) -> None:
    run = tmp_path / "run"
    data = {"states": states, "cache": str(tmp_path / "cache")}
    path = _write(
        tmp_path / "c.yaml", target, data_folder, run,
        stages=ALL_STAGES, data=data, model={"warm_start": True}, run={"log_every": 1},
    )  # fmt: skip
    if states == "cache":
        assert main(["cache-states", str(path)]) == 0
    assert main(["train", str(path), "run.export=" + str(tmp_path / "drafter")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "drafter")
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    stages = [line["stage"] for line in lines if line["kind"] == "train"]
    assert stages == ["warm_up"] * 3 + ["transition"] * 3 + ["stable"] * 4
    teacher, drafter = load_teacher(run / "teacher/best"), load_drafter(tmp_path / "drafter")
    assert teacher.window == MODEL["window"] and teacher.config == drafter.config
    assert drafter.config.target_layer_ids == (0, 1, 3)
    provenance = json.loads((tmp_path / "drafter/provenance.json").read_text())
    assert provenance["config"]["stages"]["teacher"] == 5
    assert provenance["data"]["generated_by"] == [{"command": ["test"]}]
    shard = f".../{data_folder.name}/part-0-00000.jsonl"
    assert list(provenance["data"]["sha256"]) == [shard]
    assert str(tmp_path) not in json.dumps(provenance)
    assert provenance["metrics"]["simulated_tau"]["mean"] >= 1
    assert sorted(p.name for p in (tmp_path / "drafter").iterdir()) == [
        "config.json", "model.safetensors", "provenance.json",
    ]  # fmt: skip
    # Both can be played as drafters.
    for folder in (tmp_path / "drafter", run / "teacher/best"):
        capsys.readouterr()
        more = ["--target", str(target), "--by", "context"]
        assert simulate.main([str(folder), str(data_folder), *more]) == 0
        assert json.loads(capsys.readouterr().out)["mean"] >= 1
    assert load_any(run / "teacher/best").config == teacher.config


def test_the_head_is_the_teachers_and_frozen_in_the_warm_up(
    target: Path, data_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    stages = {"teacher": 3, "warm_up": 4, "stable": 0}
    path = _write(tmp_path / "c.yaml", target, data_folder, run, stages=stages)
    assert main(["train", str(path)]) == 0
    head = load_teacher(run / "teacher/best").sequential_head.state_dict()
    for name, weight in load_drafter(run / "best").sequential_head.state_dict().items():
        assert torch.equal(weight, head[name])
    # A trained teacher can be given instead; the drafter then learns from it all the same.
    again = _write(
        tmp_path / "d.yaml", target, data_folder, tmp_path / "again",
        stages={"warm_up": 4, "stable": 0}, run={"teacher_from": str(run / "teacher/best")},
    )  # fmt: skip
    assert main(["train", str(again)]) == 0
    mine, theirs = (load_drafter(f / "best").state_dict() for f in (run, tmp_path / "again"))
    for name in mine:  # fresh weights differ: the first run's teacher drew from the same generator
        assert mine[name].shape == theirs[name].shape
    assert torch.equal(
        mine["sequential_head.output_proj.weight"], theirs["sequential_head.output_proj.weight"]
    )


def test_a_teacher_alone_can_be_trained(target: Path, data_folder: Path, tmp_path: Path) -> None:
    stages = {"teacher": 3, "stable": 0}
    path = _write(tmp_path / "c.yaml", target, data_folder, tmp_path / "run", stages=stages)
    assert main(["train", str(path)]) == 0
    best = tmp_path / "run/teacher/best"
    assert load_teacher(best).window == MODEL["window"]
    assert read_metrics(best)["simulated_tau"]["mean"] >= 1
    assert read_metrics(best)["best"]["step"] == 3


def test_a_finished_run_can_be_called_again(
    target: Path, data_folder: Path, tmp_path: Path
) -> None:
    path = _write(tmp_path / "c.yaml", target, data_folder, tmp_path / "run")
    assert main(["train", str(path)]) == 0
    weights = (tmp_path / "run/drafter/model.safetensors").read_bytes()
    assert main(["train", str(path)]) == 0
    assert (tmp_path / "run/drafter/model.safetensors").read_bytes() == weights


def test_a_second_run_in_the_same_folder_is_refused(
    target: Path, data_folder: Path, tmp_path: Path, capsys
) -> None:
    path = _write(tmp_path / "c.yaml", target, data_folder, tmp_path / "run")
    with locked(tmp_path / "run", "run"):
        assert main(["train", str(path)]) == 1
    assert f"another process is writing run in {tmp_path / 'run'}" in capsys.readouterr().err
    assert not (tmp_path / "run/checkpoint.pt").exists()


@pytest.mark.parametrize("warm", [True, False])
def test_a_dry_run_writes_a_drafter_that_loads(
    target: Path, data_folder: Path, tmp_path: Path, warm: bool, capsys
) -> None:
    path = _write(
        tmp_path / "c.yaml", target, data_folder, tmp_path / "run", model={"warm_start": warm}
    )
    assert main(["train", str(path), "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "M parameters" in printed.err and "state cache, per chosen anchor" in printed.err
    drafter = load_drafter(Path(printed.out.strip()))
    assert drafter.dtype == torch.bfloat16 and drafter.config.hidden_size == 32
    norm = torch.ones(32, dtype=torch.bfloat16)
    if not warm:
        assert torch.equal(drafter.norm.weight, norm)


def test_a_dry_run_leaves_a_trained_drafter_alone(
    target: Path, data_folder: Path, tmp_path: Path, capsys
) -> None:
    run = tmp_path / "run"
    path = str(_write(tmp_path / "c.yaml", target, data_folder, run))
    assert main(["train", path]) == 0
    weights = (run / "drafter/model.safetensors").read_bytes()
    elsewhere = f"run.export={tmp_path / 'other'}"
    for more in (
        [],
        [f"run.folder={tmp_path / 'new'}", f"run.export={run / 'drafter'}"],
        [elsewhere],
    ):
        capsys.readouterr()
        assert main(["train", path, "--dry-run", *more]) == 0
        said = capsys.readouterr()
        assert "M parameters" in said.err and "no drafter written" in said.err and not said.out
    assert (run / "drafter/model.safetensors").read_bytes() == weights
    assert not (tmp_path / "other").exists()


def test_a_dry_run_starts_from_an_earlier_drafter(
    target: Path, data_folder: Path, tmp_path: Path
) -> None:
    path = str(_write(tmp_path / "c.yaml", target, data_folder, tmp_path / "run"))
    assert main(["train", path, "--dry-run"]) == 0
    earlier = tmp_path / "run/drafter"
    again = [f"run.folder={tmp_path / 'again'}", f"run.init_from={earlier}", "optim.seed=9"]
    assert main(["train", path, "--dry-run", *again]) == 0
    mine = (tmp_path / "again/drafter/model.safetensors").read_bytes()
    assert mine == (earlier / "model.safetensors").read_bytes()


def test_a_teacher_of_another_window_is_refused(
    target: Path, data_folder: Path, tmp_path: Path, capsys
) -> None:
    run = tmp_path / "run"
    path = _write(tmp_path / "c.yaml", target, data_folder, run, stages={"teacher": 3, "stable": 0})
    assert main(["train", str(path)]) == 0
    more = [
        f"run.folder={tmp_path / 'again'}", f"run.teacher_from={run / 'teacher/best'}",
        "stages.warm_up=2", "model.window=9",
    ]  # fmt: skip
    assert main(["train", str(path), *more]) == 1
    assert "has a window of 6, model.window is 9: set model.window=6" in capsys.readouterr().err


def test_shards_of_every_folder_are_in_the_provenance(data_folder: Path, tmp_path: Path) -> None:
    for parent in ("a", "b"):
        shutil.copytree(data_folder, tmp_path / parent / "replies")
    config = from_dict(
        {"data": {"replies": [str(tmp_path / parent / "replies") for parent in ("a", "b")]}}
    )
    write_provenance(tmp_path / "out", config, [], {})
    hashes = json.loads((tmp_path / "out/provenance.json").read_text())["data"]["sha256"]
    assert list(hashes) == [f".../replies{n}/part-0-00000.jsonl" for n in ("", " (2)")]


def test_a_dry_run_comes_before_the_replies(target: Path, tmp_path: Path, capsys) -> None:
    path = _write(tmp_path / "c.yaml", target, tmp_path / "none yet", tmp_path / "run")
    assert main(["train", str(path), "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "data.replies: not there yet" in printed.err
    assert load_drafter(Path(printed.out.strip())).config.hidden_size == 32
    assert main(["train", str(path)]) == 1  # training does need them


def test_provenance_names_no_folder_of_the_machine() -> None:
    value = {
        "command": ["--prompts", "/a/b/q.jsonl:text", "x=[/a/b, /c/d]", "Qwen/Qwen3-4B"],
        "n": 1,
    }
    assert without_folders(value) == {
        "command": ["--prompts", ".../q.jsonl:text", "x=[.../b, .../d]", "Qwen/Qwen3-4B"], "n": 1,
    }  # fmt: skip
    assert without_folders("work/replies https://h/x ../up/y") == "work/replies https://h/x ../up/y"


@pytest.mark.slow
@pytest.mark.server
def test_the_drafter_of_a_dry_run_serves(
    target: Path, data_folder: Path, tmp_path: Path, hf_model
) -> None:
    from engines import engine

    from .conftest import greedy

    path = _write(tmp_path / "c.yaml", target, data_folder, tmp_path / "run")
    assert main(["train", str(path), "--dry-run"]) == 0
    prompts = [[5, 6, 7], list(range(1, 40))]
    params = {"temperature": 0, "max_new_tokens": 20}
    with engine(target, tmp_path / "run/drafter", env={"DLITE_DRAFTER_FACTORY": None}) as running:
        answers = running.generate(input_ids=prompts, sampling_params=params)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["output_ids"] == greedy(hf_model, prompt, 20)
        assert answer["meta_info"]["spec_verify_ct"] > 0


@pytest.mark.parametrize(
    "name,hidden,parameters", [("qwen3_4b", 2560, 602.0), ("qwen3_8b", 4096, 1063.5)]
)
def test_the_qwen3_configs_build_the_official_shapes(
    name: str, hidden: int, parameters: float, capsys
) -> None:
    assert main(["train", name, "--dry-run", "run.device=meta"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    config = load_config(Path(name), [])
    shape = TargetShape.from_section(config.target)
    assert shape is not None
    drafter = drafter_config(shape, config.model)
    assert drafter.hidden_size == hidden and drafter.vocab_size == 151936
    assert (drafter.num_hidden_layers, drafter.num_drafts, drafter.sequential_rank) == (5, 7, 320)
    assert drafter.target_layer_ids == (0, 1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35)
    assert drafter.mask_token_id == 151669
    figures = estimate(config, shape, drafter)
    assert figures.drafter_parameters / 1e6 == pytest.approx(parameters, rel=0.005)
    assert figures.states_per_token == 14 * hidden * 2
    assert f"{figures.drafter_parameters / 1e6:,.1f} M parameters" in printed.err


def test_the_estimate_of_activations_is_what_autograd_keeps(frozen) -> None:
    from sglang_dlite.drafter import DLiteDrafter

    config = drafter_config(frozen.shape, from_dict({"model": MODEL}).model)
    model, anchors = DLiteDrafter(config), 40
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not any(tensor.data_ptr() == p.data_ptr() for p in model.parameters()):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    states = torch.randn(anchors, 3, 32)
    tokens = torch.randint(0, 200, (anchors, 6))
    embed = torch.nn.Embedding.from_pretrained(frozen.embedding)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        hidden = model.backbone(states, tokens[:, :2], embed)
        model.head_vectors(hidden, tokens[:, :4], tokens[:, :2])
    estimated = 4 * anchors * _activations(config, 0)
    assert 0.5 < estimated / sum(kept.values()) < 2


def test_options_may_stand_between_overrides_but_must_be_known(capsys) -> None:
    meta = ["run.device=meta", "--dry-run", "model.rank=16"]
    assert main(["train", "qwen3_4b", *meta]) == 0
    small = capsys.readouterr().err
    assert main(["train", "qwen3_4b", "--dry-run", "run.device=meta"]) == 0
    assert small != capsys.readouterr().err
    for arguments in (["train", "qwen3_4b", "--nope"], ["check", "run.device=meta"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "unrecognized arguments" in capsys.readouterr().err


def test_bad_input_is_reported(target: Path, data_folder: Path, tmp_path: Path, capsys) -> None:
    data = {"cache": str(tmp_path / "no cache")}
    path = str(_write(tmp_path / "c.yaml", target, data_folder, tmp_path / "run", data=data))
    gpt = tmp_path / "gpt"
    gpt.mkdir()
    (gpt / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 9})
    )
    for override, message in (
        ("optim.rate=1", "unknown key optim.rate"),
        (f"target.path={gpt}", "'GPT2LMHeadModel' is not supported; supported are Llama"),
        ("target.vocab_size=300", "target.vocab_size = 300, but"),
        ("model.mask_token_id=257", "mask_token_id = 257: must be an integer in [0, 256]"),
        ("model.pivot_states=9", "model.pivot_states = 9: must be in 1..4"),
        (f"data.replies=[{tmp_path / 'none'}]", "is no data set"),
        ("run.device=meta", "use it with --dry-run"),
        (f"run.init_from={tmp_path / 'none'}", "is not a folder"),
        (
            f"eval.folders=[{tmp_path / 'none'}]",
            f"eval.folders: {tmp_path / 'none'} is no data set",
        ),
        ("data.states=cache", "is no state cache: run `sglang-dlite cache-states"),
    ):
        assert main(["train", path, override]) == 1, override
        assert message in capsys.readouterr().err, override
    other = tmp_path / "other"
    other.mkdir()
    for file in data_folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    described = json.loads((other / "dataset.json").read_text()) | {"vocab_size": 999}
    (other / "dataset.json").write_text(json.dumps(described))
    assert main(["train", path, f"data.replies=[{other}]"]) == 1
    assert "vocabulary has 999 tokens; the target's has 257" in capsys.readouterr().err
