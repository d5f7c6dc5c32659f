"""The house's floors: a room imports from its own floor's room and from floors below, never from above.

A room is a folder of the package (`launch` has rooms of its own), or one of the modules at its root.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_grpo

PACKAGE = Path(hpc_grpo.__file__).parent
FLOORS = (
    ("errors", "types", "registry"),
    ("system", "config"),
    ("run",),
    ("metrics", "data", "rewards", "algorithms", "weights"),
    ("grading", "engine", "learner"),
    ("driver",),
    ("launch.environment", "launch.agent", "launch.place"),
    ("launch.supervisor", "launch.chain", "launch"),
    ("plan",),
    ("preflight", "report"),
    ("cli",),
    ("demo",),
)
"""From the ground up. Rooms on one floor may use each other, but not in a circle."""

LIGHT_ROOMS = ("system", "config", "run", "launch", "plan", "preflight", "report", "cli")
"""Rooms that a login node enters: no module of theirs imports a heavy package when it is imported."""

HEAVY = {"torch", "vllm", "deepspeed", "transformers", "ray", "datasets"}
PROBES = {"preflight/torch_probe.py", "launch/agent/ray_program.py"}
"""Programs of their own on a compute node, which nothing imports."""


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room_of(module: str) -> str:
    """The room of a dotted name below hpc_grpo.

    >>> room_of("launch.place.slurm.jobs"), room_of("run.paths"), room_of("launch.freeze")
    ('launch.place', 'run', 'launch')
    """
    rooms = [room for floor in FLOORS for room in floor if f"{module}.".startswith(f"{room}.")]
    assert rooms, f"{module} is in no room of FLOORS"
    return max(rooms, key=len)


def floor_of(room: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if room in floor)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def own_imports(path: Path) -> set[str]:
    """What a module imports of the package, also inside functions: dotted names below hpc_grpo."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hpc_grpo."):
            found.add(node.module.removeprefix("hpc_grpo."))
    return found


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


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_no_module_imports_from_a_floor_above(path: Path) -> None:
    own_floor = floor_of(room_of(name_of(path)))
    above = {name for name in own_imports(path) if floor_of(room_of(name)) > own_floor}
    assert above == set()


@pytest.mark.parametrize("path", [path for path in modules() if name_of(path).startswith("launch")], ids=name_of)
def test_launching_uses_nothing_of_training(path: Path) -> None:
    allowed = {"errors", "system", "config", "run"}
    used = {room_of(name) for name in own_imports(path)}
    assert {room for room in used if not room.startswith("launch")} <= allowed


def test_at_most_six_modules_at_the_root_of_the_package() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 6


@pytest.mark.parametrize(
    "path", [path for path in modules() if path.relative_to(PACKAGE).parts[0] in LIGHT_ROOMS], ids=name_of
)
def test_a_room_of_the_login_node_imports_nothing_heavy(path: Path) -> None:
    if str(path.relative_to(PACKAGE)) not in PROBES:
        assert imported_on_import(path).isdisjoint(HEAVY)


def test_importing_the_command_loads_nothing_heavy() -> None:
    light = HEAVY | {"pydantic", "submitit", "yaml", "rich", "numpy"}
    program = f"import sys, hpc_grpo.cli; print(sorted(set(sys.modules) & {light!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    program = (
        "import sys, hpc_grpo.launch.supervisor.attempt, hpc_grpo.launch.agent.agent\n"
        "import hpc_grpo.launch.place.slurm.sbatch\n"
        "import hpc_grpo.preflight.diagnosis, hpc_grpo.preflight.node_program\n"
        f"print(sorted(set(sys.modules) & {HEAVY!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
