"""The two halves: launching imports nothing heavy, training reads nothing of the scheduler."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_grpo

PACKAGE = Path(hpc_grpo.__file__).parent
HEAVY = {"torch", "vllm", "deepspeed", "transformers", "ray", "datasets"}
LAUNCHING = sorted(
    [*(path for name in ("launch", "doctor", "config") for path in (PACKAGE / name).glob("*.py")), PACKAGE / "cli.py"]
)


def imported_on_import(path: Path) -> set[str]:
    """Top-level packages that a module imports when it is imported itself (not inside functions)."""
    found: set[str] = set()
    queue: list[ast.AST] = [ast.parse(path.read_text())]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        queue += ast.iter_child_nodes(node)
    return found


def hpc_grpo_imports(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in nodes if node.module and node.module.startswith("hpc_grpo.")}


@pytest.mark.parametrize("path", LAUNCHING, ids=lambda path: path.stem)
def test_launching_imports_nothing_heavy(path: Path) -> None:
    assert imported_on_import(path).isdisjoint(HEAVY)


@pytest.mark.parametrize("path", sorted((PACKAGE / "launch").glob("*.py")), ids=lambda path: path.stem)
def test_launching_uses_nothing_of_training(path: Path) -> None:
    allowed = ("hpc_grpo.launch", "hpc_grpo.config", "hpc_grpo.contract", "hpc_grpo.errors")
    allowed += ("hpc_grpo.run_dir", "hpc_grpo.manifest")
    assert {name for name in hpc_grpo_imports(path) if not name.startswith(allowed)} == set()


def test_training_uses_nothing_of_launching_and_reads_no_scheduler() -> None:
    front_end = {"launch", "commands", "see", "plan", "prefetch", "doctor"}
    training = [path for path in PACKAGE.rglob("*.py") if front_end.isdisjoint(path.parts) and path.name != "cli.py"]
    assert len(training) > 20
    for path in training:
        assert not [name for name in hpc_grpo_imports(path) if name.startswith("hpc_grpo.launch")], path
        strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        assert not [text for text in strings if isinstance(text, str) and text.startswith("SLURM_")], path


def test_importing_the_command_loads_nothing_heavy() -> None:
    light = HEAVY | {"pydantic", "submitit", "yaml", "rich", "numpy"}
    program = f"import sys, hpc_grpo.cli; print(sorted(set(sys.modules) & {light!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    program = (
        "import sys, hpc_grpo.launch.attempt, hpc_grpo.launch.slurm, hpc_grpo.launch.node\n"
        "import hpc_grpo.doctor.diagnosis, hpc_grpo.doctor.node\n"
        f"print(sorted(set(sys.modules) & {HEAVY!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
