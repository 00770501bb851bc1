"""The table of changed upstream functions fits the installed sglang, and it took."""

from __future__ import annotations

import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookType
from sglang_dlite import SGLANG_VERSION
from sglang_dlite.platforms import has_accelerator
from sglang_dlite.plugin import verify
from sglang_dlite.speculative import hooks


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    """What every SGLang process does first; harmless when done before."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_every_target_has_the_signature_its_hook_was_written_for(hook: hooks.Hook) -> None:
    original = inspect.unwrap(pkgutil.resolve_name(hook.target))
    assert tuple(inspect.signature(original).parameters) == hook.parameters
    assert hook.kind in HookType.__members__
    assert hook.reason


def test_loading_the_plugins_installs_all_of_them() -> None:
    assert hooks.problems() == []
    assert verify() == []
    hooks.require_hooks()


def test_installing_twice_adds_nothing() -> None:
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS
    from sglang.srt.plugins.hook_registry import HookRegistry

    def count() -> list[int]:
        per_target = [len(HookRegistry._hooks[hook.target]) for hook in hooks.active_hooks()]
        return [*per_target, len(_HOOKS[hooks.RESOLUTION_STEP])]

    before = count()
    hooks.install()
    assert count() == before


def gone(installed: Any) -> Any:
    """Nothing is left: neither the function nor one that it overrode."""
    return None


def of_another_signature(installed: Any) -> Any:
    return lambda renamed, added: None


def untouched(installed: Any) -> Any:
    """What upstream's function is where SGLang has failed to apply the hook."""
    return inspect.unwrap(installed)


@pytest.mark.parametrize("hook", hooks.active_hooks(), ids=lambda hook: hook.target.split(".")[-1])
@pytest.mark.parametrize(
    "change,complaint",
    [
        (gone, "not in the installed sglang"),
        (of_another_signature, "takes ('renamed', 'added')"),
        (untouched, "registered but not applied"),
    ],
)
def test_each_broken_hook_is_named_with_both_versions(
    monkeypatch: pytest.MonkeyPatch,
    hook: hooks.Hook,
    change: Callable[[Any], Any],
    complaint: str,
) -> None:
    """SGLang itself would only log it and serve wrongly. What asks for this: the next tests."""
    path, _, name = hook.target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    broken = change(getattr(owner, name))
    if broken is None:
        for place in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
            monkeypatch.delattr(place, name, raising=False)
    else:
        monkeypatch.setattr(owner, name, broken)
    (problem,) = hooks.problems()
    assert problem.startswith(hook.target) and complaint in problem
    monkeypatch.setattr(hooks, "version", lambda name: "9.9.9")
    with pytest.raises(RuntimeError) as error:
        hooks.require_hooks()
    for part in (hook.target, complaint, SGLANG_VERSION, "9.9.9", "sglang-dlite check"):
        assert part in str(error.value)


@pytest.mark.parametrize("step", ["resolve_early", "default_device"])
def test_a_missing_resolution_step_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    from sglang.srt.arg_groups import resolution_hooks

    kept = [f for f in resolution_hooks._HOOKS[hooks.RESOLUTION_STEP] if f.__name__ != step]
    monkeypatch.setitem(resolution_hooks._HOOKS, hooks.RESOLUTION_STEP, kept)
    with pytest.raises(RuntimeError, match=f"{hooks.RESOLUTION_STEP}: without {step}"):
        hooks.require_hooks()


def test_a_dlite_server_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any device: it is the algorithm's own check, before all others."""
    from sglang_dlite.speculative.algorithm import validate

    monkeypatch.setattr(hooks, "problems", lambda: ["some.function: changed"])
    with pytest.raises(RuntimeError, match=r"some\.function: changed"):
        validate(SimpleNamespace())


@pytest.mark.skipif(has_accelerator(), reason="the CPU platform stays out beside an accelerator")
def test_a_broken_hook_stops_a_cpu_server_without_dlite(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.platforms import current_platform

    monkeypatch.setattr(hooks, "problems", lambda: ["some.function: changed"])
    with pytest.raises(RuntimeError, match=r"some\.function: changed"):
        current_platform.apply_server_args_defaults(SimpleNamespace())


UPGRADED = """
import sys
from sglang_dlite import plugin
from sglang_dlite.speculative import hooks

plugin.version = lambda name: "0.9.0"
hooks.HOOKS = (hooks.HOOKS[0]._replace(parameters=("of", "0.5.23")), *hooks.HOOKS[1:])

from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

load_plugins()
assert not HookRegistry._patched & {hook.target for hook in hooks.HOOKS}
for options in ({"speculative_algorithm": "DLITE", "device": "cuda"}, {}):
    try:
        ServerArgs(model_path=sys.argv[1], **options).resolve_once()
    except Exception as error:
        print(type(error).__name__, error)
    print("----")
"""


def test_another_sglang_stops_the_server(tmp_path: Path) -> None:
    """Upgraded by hand: nothing is installed, and the server says which hook and versions."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-W", "ignore", "-c", UPGRADED, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    with_dlite, target_only, _ = run.stdout.split("----\n")
    for text in (with_dlite, *([] if has_accelerator() else [target_only])):
        assert text.startswith("RuntimeError ")
        for part in (SGLANG_VERSION, "0.9.0", hooks.HOOKS[0].target, "('of', '0.5.23')"):
            assert part in text, text
