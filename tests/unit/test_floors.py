"""The house's floors: a room imports from its own floor's room and from floors below, never from above.

A room is a folder of the package (`launch` has rooms of its own), or one of the modules at its root.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hpc_grpo

PACKAGE = Path(hpc_grpo.__file__).parent
FLOORS = (
    ("errors", "types", "registry", "section"),
    ("algorithms.terms", "algorithms.advantages", "algorithms.corrections", "algorithms.losses"),
    ("system", "config"),
    ("run", "foreign"),
    ("metrics", "data", "rewards", "algorithms", "weights", "episodes"),
    ("grading", "engine", "learner"),
    ("template",),
    ("driver",),
    ("launch.environment", "launch.agent", "launch.place"),
    ("launch.supervisor", "launch.chain", "launch"),
    ("plan",),
    ("simulate",),
    ("preflight", "report"),
    ("demo",),
    ("fleet",),
    ("cli",),
    ("api",),
)
"""From the ground up. Rooms on one floor may use each other, but not in a circle."""

LIGHT_ROOMS = (
    "system",
    "config",
    "foreign",
    "run",
    "launch",
    "plan",
    "simulate",
    "preflight",
    "report",
    "fleet",
    "cli",
)
"""Rooms that a login node enters: no module of theirs imports a heavy package when it is imported."""

HEAVY = {"torch", "vllm", "deepspeed", "transformers", "ray", "datasets"}
CORE = {"filelock", "psutil", "pydantic", "submitit", "yaml", "rich", "numpy"}
CONTROLLER = {"sqlalchemy", "asyncssh", "nats"}
ON_DISKS = {"errors", "system", "config", "section", "run"}
"""What `fleet` and `launch` use of other rooms: nothing of training."""
PROBES = {"preflight/torch_probe.py", "launch/agent/ray_program.py"}
"""Programs of their own on a compute node, which nothing imports."""

SLURM = "launch.place.slurm"
_COMMANDS = "srun|salloc|sbatch|scancel|scontrol|sacct|sacctmgr|sinfo|squeue"
SLURMS_WORD = re.compile(rf"(SLURM|SBATCH|SRUN)\w*\*?|(--)?({_COMMANDS})")
"""A variable or command of Slurm's alone in a string or a name: code. Texts that tell a user of them are free."""

USES_SLURM = {
    "launch.place": "finds the place of a process and the queue of its jobs",
    "cli.options": "--time is given as to sbatch",
    "cli.shell": "a shell on compute nodes is a step of a Slurm job",
    "preflight.diagnosis": "whether this is a login node of a Slurm site",
    "preflight.inputs": "refuses what its partition would never start",
    "preflight.login": "partition, account and walltime are Slurm's",
    "report.explain": "some kills leave their only trace in Slurm's own lines",
    "report.queue": "status --slurm",
}
"""Modules that import from Slurm's room -> why. Launching itself asks a Place and a JobQueue."""

NAMES_SLURM = {
    "launch.environment": "the deny list holds in every place: it is one table, to be read as a whole",
    "cli": "`sbatch` typed as a command means submit; the option --sbatch",
    "cli.options": "the option --sbatch",
    "cli.submit": "the option --sbatch",
    "cli.shell": "the option --sbatch",
}
"""Modules outside Slurm's room with words of Slurm's in their code -> why."""


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


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def own_imports(path: Path) -> set[str]:
    """What a module imports of the package, also inside functions: dotted names below hpc_grpo."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hpc_grpo."):
            found.add(node.module.removeprefix("hpc_grpo."))
    return found


def words_of(path: Path) -> set[str]:
    """Strings and names in the code of a module: no comments and no docstrings."""
    tree = tree_of(path)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in told)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.value for node in constants if isinstance(node.value, str)}


def imported_on_import(path: Path) -> set[str]:
    """Dotted names that a module imports when it is imported itself (not inside functions)."""
    found: set[str] = set()
    queue: list[ast.AST] = [tree_of(path)]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        queue += ast.iter_child_nodes(node)
    return found


def with_packages(name: str) -> set[str]:
    """Return a dotted name and the packages around it, which Python imports first."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


def test_no_module_imports_from_a_room_that_it_may_not_use() -> None:
    wrong = {}
    for path in modules():
        own = room_of(name_of(path))
        top = own.partition(".")[0]
        used = {name: room_of(name) for name in own_imports(path)}
        above = {name for name, room in used.items() if floor_of(room) > floor_of(own)}
        if top in ("fleet", "launch"):
            above |= {name for name, room in used.items() if room.partition(".")[0] not in {top, *ON_DISKS}}
        if above:
            wrong[name_of(path)] = above
    assert wrong == {}


def test_only_those_with_a_reason_use_slurms_room() -> None:
    outside = [path for path in modules() if not name_of(path).startswith(SLURM)]
    users = {name_of(path) for path in outside if any(name.startswith(SLURM) for name in own_imports(path))}
    assert users == USES_SLURM.keys()


def test_only_those_with_a_reason_have_slurms_words_in_their_code() -> None:
    outside = [path for path in modules() if not name_of(path).startswith(SLURM)]
    naming = {name_of(path) for path in outside if any(SLURMS_WORD.fullmatch(word) for word in words_of(path))}
    assert naming == NAMES_SLURM.keys()


def test_at_most_six_modules_at_the_root_of_the_package() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 6


def test_no_room_of_the_login_node_imports_anything_heavy() -> None:
    light = [path for path in modules() if path.relative_to(PACKAGE).parts[0] in LIGHT_ROOMS]
    imported = {str(path.relative_to(PACKAGE)): imported_on_import(path) for path in light}
    roots = {name: {module.partition(".")[0] for module in modules} for name, modules in imported.items()}
    assert {name: found & HEAVY for name, found in roots.items() if found & HEAVY and name not in PROBES} == {}


def test_no_import_runs_in_a_circle() -> None:
    """A circle works or fails by what a process imports first, so that no other test finds it."""
    paths = {f"hpc_grpo.{name_of(path)}": path for path in modules()}
    needs = {
        module: {
            name
            for imported in imported_on_import(path)
            for name in with_packages(imported) & paths.keys()
            if not f"{module}.".startswith(f"{name}.")
        }
        for module, path in paths.items()
    }
    # Raises CycleError, with the circle.
    TopologicalSorter(needs).prepare()


@pytest.mark.parametrize(
    ("names", "unwanted"),
    [
        ("cli", HEAVY | CORE | CONTROLLER | {"pandas"}),
        ("api", HEAVY | CONTROLLER | {"pandas", "matplotlib"}),
        ("launch.supervisor.attempt launch.agent.agent launch.place.slurm.sbatch", HEAVY),
        ("preflight.diagnosis preflight.node_program", HEAVY),
        ("simulate.text", HEAVY | {"numpy"}),
        ("driver.main driver.evaluation", HEAVY - {"ray", "numpy"}),
        ("fleet.visit fleet.runner", HEAVY | CONTROLLER | {"pydantic", "rich", "click"}),
    ],
)
def test_what_starts_on_a_login_node_or_a_visited_one_loads_nothing_heavy(names: str, unwanted: set[str]) -> None:
    imports = ", ".join(f"hpc_grpo.{name}" for name in names.split())
    program = f"import sys, {imports}; print(sorted(set(sys.modules) & {unwanted!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
