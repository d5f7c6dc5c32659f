from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import hpc_grpo
from hpc_grpo.algorithms.advantages import Advantage
from hpc_grpo.algorithms.corrections import Correction
from hpc_grpo.algorithms.losses import Loss
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import ALGORITHMS, ENVIRONMENTS, LOSSES, REWARDS, SOURCES, Registry
from hpc_grpo.section import OWN, variants


def message_of(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        REWARDS.find(name)
    return str(caught.value)


@pytest.mark.parametrize("registry", [ALGORITHMS, ENVIRONMENTS, REWARDS, SOURCES])
def test_the_built_ins_of_the_modules_are_those_that_are_listed(registry: Registry) -> None:
    names = registry.names()
    assert names
    assert all(callable(registry.find(name)) for name in names)
    assert registry.names() == names


def test_no_built_in_loss_correction_or_advantage_is_named_outside_of_its_file() -> None:
    """What is named elsewhere is a file more that a new one touches; the defaults of the config are."""
    package = Path(hpc_grpo.__file__).parent
    files = [package / "algorithms" / f"{kind}.py" for kind in ("losses", "corrections", "advantages")]
    foreign = package / "foreign"  # the names that other systems' names become
    names = {name for union in (Loss, Correction, Advantage) for name in variants(get_args(union)[0])} - {OWN}
    names -= {"grpo", "truncated", "group", "none", "sequence"}  # defaults, and words of other meanings too
    names -= {"pass_k", "turns"}  # a key of `eval`, and one of files of rollouts
    for path in package.rglob("*.py"):
        if path not in files and path.parent != foreign:
            constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not names & {each for each in constants if isinstance(each, str)}, path


def test_a_built_in_is_found_by_its_name() -> None:
    assert REWARDS.find("correctness").name == "correctness"


def test_names_are_listed_without_importing_an_entry() -> None:
    program = (
        "import sys\nfrom hpc_grpo.registry import ALGORITHMS, REWARDS\n"
        "print([registry.names() for registry in (ALGORITHMS, REWARDS)])\n"
        "print([name for name in sys.modules if name.startswith('hpc_grpo.') and name.count('.') > 1])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "[]"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            {"strength": 0.5, "cap": 2.0},
            "here: strength, cap. It does not take them: got an unexpected keyword argument",
        ),
        ({}, "here: none. It does not take them: missing a required argument: 'strength'"),
    ],
)
def test_args_that_a_function_of_the_users_does_not_take_are_refused(
    tmp_path: Path, args: dict[str, float], words: str
) -> None:
    (tmp_path / "pull.py").write_text("def pull(inputs, strength): return inputs + strength\n")
    name = f"{tmp_path}/pull.py:pull"
    assert LOSSES.with_args(name, {"strength": 0.5}, 1)(1.0) == 1.5
    with pytest.raises(ConfigError) as caught:
        LOSSES.with_args(name, args, 1)
    assert words in str(caught.value)


def test_unknown_name_gives_the_nearest_and_lists_the_builtins() -> None:
    message = message_of("corectness")
    assert f"did you mean 'correctness'? Built in: {', '.join(REWARDS.names())}." in message
    assert "Or name your own: module:function" in message


def test_a_name_is_registered_once() -> None:
    REWARDS.find("correctness")
    with pytest.raises(ConfigError, match="registered already"):
        REWARDS.register("correctness")(lambda prompts, completions: [])


def test_module_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_for_registry.py").write_text("def score(prompts, completions): return [7.0]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert REWARDS.find("my_rewards_for_registry:score")([], []) == [7.0]


def test_file_with_a_dataclass_and_a_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 3.0\n")
    (tmp_path / "file_reward.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_reward import VALUE\n"
        "@dataclass\nclass Weight:\n    value: float = VALUE\n"
        "def score(prompts, completions): return [Weight().value]\n"
    )
    assert REWARDS.find(f"{tmp_path}/file_reward.py:score")([], []) == [3.0]


@pytest.mark.parametrize(
    ("source", "name", "words"),
    [
        ("import no_such_module_at_all", "f", "No module named 'no_such_module_at_all'"),
        ("x = 1\ny = 1 / 0", "f", "bad.py:2"),
        ("import sys\nsys.exit(3)", "f", "SystemExit: 3"),
        ("def (", "f", "SyntaxError"),
        ("def other(): pass", "f", "It has: other"),
        ("f = 3", "f", "must be a function, but is of type int"),
    ],
)
def test_module_errors_reach_the_user(tmp_path: Path, source: str, name: str, words: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    assert words in message_of(f"{tmp_path}/bad.py:{name}")


@pytest.mark.parametrize(
    ("name", "meant"), [("mine.py", "mine.py:FUNCTION"), ("mine.f", "mine:f"), ("mine.py::f", "mine.py:f")]
)
def test_a_file_without_one_colon_before_its_function_is_named_with_it(
    name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    assert f"Write {meant}." in message_of(name)


def test_missing_module_and_missing_file(tmp_path: Path) -> None:
    message = message_of("no_such_module_at_all:f")
    assert f"there is no no_such_module_at_all.py in {Path.cwd()}, and no package" in message
    assert str(tmp_path / "none.py") in message_of(f"{tmp_path}/none.py:f")
