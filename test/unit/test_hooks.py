"""The table of changed upstream functions fits the installed sglang, and it took."""

from __future__ import annotations

import inspect
import pkgutil
from importlib.metadata import version

import pytest
from sglang.srt.plugins.hook_registry import HookType
from sglang_dlite import SGLANG_VERSION
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


@pytest.mark.parametrize(
    "changes,complaint",
    [
        ({"parameters": ("self", "renamed")}, "renamed"),
        ({"target": "sglang.srt.mem_cache.allocation_sizing.no_such_function"}, "not in the"),
        (
            {
                "target": "sglang.srt.mem_cache.allocation_sizing.get_alloc_page_size",
                "parameters": (),
            },
            "registered but not applied",
        ),
    ],
)
def test_a_hook_that_does_not_fit_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], complaint: str
) -> None:
    """SGLang itself would only log it and serve wrongly."""
    broken = hooks.HOOKS[0]._replace(**changes)
    monkeypatch.setattr(hooks, "HOOKS", (broken, *hooks.HOOKS[1:]))
    (problem,) = hooks.problems()
    assert broken.target in problem and complaint in problem
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9.9")
    with pytest.raises(RuntimeError) as error:
        hooks.require_hooks()
    for part in (broken.target, SGLANG_VERSION, "9.9.9", "sglang-dlite check"):
        assert part in str(error.value)


def test_another_sglang_is_refused_before_anything_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang_dlite import plugin

    assert version("sglang") == SGLANG_VERSION
    monkeypatch.setattr(plugin, "version", lambda name: "0.9.0")
    monkeypatch.setattr(hooks, "install", lambda: pytest.fail("installed on another version"))
    with pytest.raises(RuntimeError, match=r"0\.9\.0.*not registered"):
        plugin.register()
