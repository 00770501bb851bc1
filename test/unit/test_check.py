"""`sglang-dlite check`: every failure is told with a remedy, and sets the exit status."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

import pytest
from sglang_dlite import check
from sglang_dlite.check import Result, Status


def _statuses(results: Iterator[Result]) -> list[str]:
    return [result.status.value for result in results]


def _only(results: Iterator[Result]) -> Result:
    (result,) = results
    return result


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)


def test_the_pin_is_the_installed_version() -> None:
    assert check.pinned_version() == metadata.version("sglang")
    assert _statuses(check.check_sglang_version()) == ["OK"]


def test_another_sglang_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.99")
    result = _only(check.check_sglang_version())
    assert result.status is Status.FAIL
    assert "0.5.99" in result.detail
    assert result.fix == f"pip install sglang=={check.pinned_version()}"


def test_entry_points_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _statuses(check.check_entry_points()) == ["OK", "OK"]
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    results = list(check.check_entry_points())
    assert _statuses(iter(results)) == ["FAIL", "FAIL"]
    assert "pip install" in results[0].fix


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("SGLANG_PLUGINS", "", "OK"),
        ("SGLANG_PLUGINS", "dlite, dlite_cpu", "OK"),
        ("SGLANG_PLUGINS", "other", "FAIL"),
        ("SGLANG_PLUGINS", "dlite", "FAIL"),
        ("SGLANG_PLATFORM", "dlite_cpu", "OK"),
        ("SGLANG_PLATFORM", "someone_elses", "FAIL"),
    ],
)
def test_whitelists(monkeypatch: pytest.MonkeyPatch, name: str, value: str, status: str) -> None:
    monkeypatch.setenv(name, value)
    result = _only(check.check_environment())
    assert result.status.value == status
    if status == "FAIL":
        assert value in result.detail and name in result.fix


def test_a_whitelist_fix_keeps_what_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert "SGLANG_PLUGINS=other,dlite,dlite_cpu" in _only(check.check_environment()).fix


def _run_with(
    monkeypatch: pytest.MonkeyPatch, *checks: tuple[str, Callable[[], Iterator[Result]]]
) -> int:
    monkeypatch.setattr(check, "CHECKS", checks)
    return check.run(argparse.Namespace())


def test_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = ("good", lambda: iter([check.ok("good", "fine"), check.info("more", "by the way")]))
    bad = ("bad", lambda: iter([check.fail("bad", "broken", "mend it")]))
    assert _run_with(monkeypatch, good) == 0
    assert "all is well" in capsys.readouterr().out
    assert _run_with(monkeypatch, good, bad) == 1
    out = capsys.readouterr().out
    assert "FAIL  bad" in out and "fix: mend it" in out and "1 failure(s)" in out


def test_a_check_that_raises_fails_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises() -> Iterator[Result]:
        raise ImportError("no module of that name")
        yield

    last = ("last", lambda: iter([check.ok("last", "reached")]))
    assert _run_with(monkeypatch, ("first", raises), last) == 1
    out = capsys.readouterr().out
    assert "FAIL  first" in out and "no module of that name" in out
    assert "OK    last" in out


def test_the_command_on_this_installation() -> None:
    # In a process of its own: loading the plugins changes SGLang for good.
    command = [sys.executable, "-m", "sglang_dlite.cli", "check"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    results = [line for line in lines if line.startswith(("OK ", "FAIL ", "INFO "))]
    assert len(results) >= len(check.CHECKS)
    failures = [line for line in results if line.startswith("FAIL")]
    assert done.returncode == (1 if failures else 0)
    assert sum(line.startswith("      fix: ") for line in lines) >= len(failures)
    # The plugin is registered and its hooks are in place, whatever else the machine lacks.
    for name in ("algorithm DLITE", "hooks"):
        assert any(line.startswith(f"OK    {name}") for line in results), done.stdout
