"""A test that lacks what it compares with: skipped on a desk, failed in continuous integration."""

import re

import pytest
from oracle import require
from sources import ROOT

ABSENT = "a_module_that_nobody_has"


@pytest.mark.parametrize("ci", ["true", "1"])
def test_what_is_absent_fails_in_ci(monkeypatch, ci):
    monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.fail.Exception, match=rf"{ABSENT}\.part is not installed.*CI is set"):
        require(f"{ABSENT}.part")


@pytest.mark.parametrize("ci", [None, "", "false"])
def test_what_is_absent_is_skipped_elsewhere(monkeypatch, ci):
    monkeypatch.delenv("CI", raising=False) if ci is None else monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.skip.Exception, match=f"{ABSENT} is not installed: `make test`"):
        require(ABSENT)


@pytest.mark.parametrize("ci", ["true", "false"])
def test_what_is_there_is_given(monkeypatch, ci):
    monkeypatch.setenv("CI", ci)
    assert require("re") is re


def test_what_has_moved_is_no_reason_to_skip(monkeypatch):
    monkeypatch.setenv("CI", "false")
    with pytest.raises(ModuleNotFoundError, match=r"json\.moved_away"):
        require("json.moved_away")


def test_no_test_skips_by_itself():
    # Put together here, so that this file does not find itself.
    name = "importor" + "skip"
    assert not [path for path in (ROOT / "tests").rglob("*.py") if name in path.read_text()]


def test_continuous_integration_says_that_it_is():
    assert "export CI=true" in (ROOT / ".ci" / "run").read_text()
