"""What the documentation says is true of the code: links, commands, keys, paths, metrics, messages."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import math
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from hpc_grpo import errors
from hpc_grpo.algorithms.terms import LossInputs
from hpc_grpo.cli import MOVED
from hpc_grpo.cli.request import load_request
from hpc_grpo.config import load_config
from hpc_grpo.registry import REWARDS
from hpc_grpo.rewards import Group
from hpc_grpo.run.paths import RunDir
from tests.support.command import parsed
from tests.support.configs import loss_of
from tools.reference import pages

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
RUN_DIRECTORY = REPOSITORY / "docs" / "run-directory.md"
REFERENCE = REPOSITORY / "docs" / "reference"
LAUNCHING = REPOSITORY / "docs" / "launching.md"
EXAMPLES = [path for folder in ("hpc_grpo", "tests/support") for path in sorted((REPOSITORY / folder).rglob("*.py"))]
DOCUMENTS = [README, REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")


def blocks(language: str) -> list[str]:
    return [text for path in DOCUMENTS for found, text in _BLOCK.findall(path.read_text()) if found == language]


def commands(program: str) -> list[list[str]]:
    """The words of every command line in a bash block, from `program` on."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [found for found in words if found and found[0].rpartition("/")[2] == program]


def section(path: Path, heading: str) -> str:
    """The text below the heading that contains `heading`, up to the next one."""
    return re.split(r"^#.*$", path.read_text().split(heading, 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def table(path: Path, heading: str) -> list[list[str]]:
    """The cells of the first table of a section, without its header."""
    rows = [line for line in section(path, heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def is_run(name: str) -> bool:
    """Tell whether the docs mean a run by the CONFIG|RUN of a command."""
    return name == "RUN" or name.startswith("runs/")


def source_text() -> str:
    files = [*(REPOSITORY / "hpc_grpo").rglob("*.py"), *(REPOSITORY / "tools").rglob("*.sh")]
    return "\n".join(path.read_text() for path in files)


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the example files of the README (blocks that start with `# NAME`) and the shipped configs."""
    for block in [*blocks("python"), *blocks("yaml")]:
        if name := re.match(r"# (\w+\.\w+)\n", block):
            (tmp_path / name[1]).write_text(block)
    (tmp_path / "completions.jsonl").touch()
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = _BLOCK.sub("", path.read_text())
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_commands_parse_and_their_configs_load(examples: Path) -> None:
    found = commands("hpc-grpo")
    assert {words[1] for words in found} >= {"train", "submit", "config", "report"}
    for _, *words in found:
        name, params = parsed(words)
        if "config_name" in params:
            if params["config_name"] and not is_run(params["config_name"]):
                load_request(params["config_name"], [*params.get("sets", ()), *params["overrides"]])
        elif name == "config" and not any(
            params[f"from_{system}"] for system in ("areal", "trl", "verl", "open_instruct")
        ):
            load_request(params["words"][0], [*params["sets"], *(word for word in params["words"][1:] if "=" in word)])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_commands_as_they_are_called_today(path: Path) -> None:
    text = " ".join(path.read_text().split())
    assert sorted(MOVED.keys() & re.findall(r"hpc-grpo ([a-z-]+)", text)) == []


def test_files_and_modules_named_in_commands_exist() -> None:
    words = [word for block in blocks("bash") for word in shlex.split(block, comments=True)]
    paths = [word for word in words if word.startswith(("configs/", "sbatch/", "tools/"))]
    assert paths
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    modules = [after for word, after in pairwise(words) if word == "-m"]
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_only_files_that_exist(path: Path) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)`", path.read_text())
    roots = (REPOSITORY, REPOSITORY / "hpc_grpo")
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


def test_make_targets_exist() -> None:
    spans = [code for path in DOCUMENTS for code in _CODE.findall(_BLOCK.sub("", path.read_text()))]
    named = {words[1] for words in commands("make")} | {code.split()[1] for code in spans if code.startswith("make ")}
    assert named >= {"demo", "test"}
    makefile = (REPOSITORY / "Makefile").read_text()
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_the_readme_has_at_most_150_lines_and_its_first_screen_says_how_to_begin() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    assert {"make demo", "make test"} <= {line.partition("  ")[0] for line in lines[:24]}


@pytest.mark.parametrize("name", pages())
def test_the_reference_is_what_the_code_says(name: str) -> None:
    assert (REFERENCE / name).read_text() == pages()[name], "run: python -m tools.reference"


def test_the_readme_example_runs(examples: Path) -> None:
    config = load_request("my_run.yaml", []).config
    assert config.eval.every is not None and config.data.has_eval  # `report` compares two evals, `eval` asks its set
    _, own = config.rewards
    module, _, function = own.name.partition(":")
    scores = REWARDS.find(f"{examples / module}.py:{function}")(
        prompts=["p"] * 2, completions=["one line", "one\ntwo\nthree"], answer=["1"] * 2, **own.args
    )
    assert list(scores) == [0.0, 1.0]


def test_the_losses_of_contributing_give_one_finite_number_a_token(examples: Path) -> None:
    torch = pytest.importorskip("torch")
    values = torch.linspace(-1.0, 1.0, 6)
    inputs = LossInputs(
        learner_logprobs=values.requires_grad_(),
        proximal_logprobs=values.detach() - 0.1,
        engine_logprobs=values.detach(),
        ref_logprobs=None,
        advantages=torch.ones(6),
        sequence_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
    )
    token_loss = loss_of(name=f"{examples / 'my_losses.py'}:reinforce").term(inputs).per_token
    assert token_loss.tolist() == pytest.approx((-values).tolist())
    sequence_loss = loss_of(name=f"{examples / 'my_losses.py'}:sequence_ratio").term(inputs).per_token
    assert sequence_loss.tolist() == pytest.approx([-math.exp(0.1)] * 6)


def test_the_advantage_of_contributing_compares_with_the_others(examples: Path) -> None:
    leave_one_out = loss_of(advantage=f"{examples / 'my_advantages.py'}:leave_one_out").advantage
    assert leave_one_out.of_group((1.0, 0.0, 5.0), (True, True, False)) == (1.0, -1.0, 0.0)


def test_the_reward_of_contributing_counts_words(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(REWARDS, "_entries", dict(REWARDS._entries))  # no other test finds it
    length_limit = REWARDS.find(f"{examples / 'length_limit.py'}:length_limit")
    group = Group("p", ("a b", "a b c"), {})
    assert list(length_limit(group, length_limit.settings(max_words=2))) == [1.0, 0.0]


def test_the_table_of_rewards_has_every_built_in() -> None:
    rows = table(REPOSITORY / "docs" / "rewards.md", "## Built in")
    assert sorted(code for cells in rows for code in _CODE.findall(cells[0])) == REWARDS.names()


def test_configuration_table_has_real_keys_and_defaults(tmp_path: Path) -> None:
    (tmp_path / "least.yaml").write_text(
        "{run: {name: n}, model: {path: m}, data: {train: {path: d}}, train: {total_steps: 1}}"
    )
    overrides = []
    for keys, defaults, _ in table(REPOSITORY / "docs" / "configuration.md", "# Configuration"):
        values = re.findall(r"`([^`]*)`|(required)", defaults)
        for key, (value, required) in zip(_CODE.findall(keys), values, strict=True):
            overrides += [] if required or key == "train.total_steps" else [f"{key}={value}"]
    assert len(overrides) > 30
    assert load_config(str(tmp_path / "least.yaml"), overrides) == load_config(str(tmp_path / "least.yaml"))


def run_dir_paths() -> set[str]:
    run = RunDir(Path())
    paths = {str(value) for name in vars(RunDir) if isinstance(value := getattr(run, name), Path)}
    per_step = {str(make("N")) for make in (run.rollouts, run.eval_rollouts, run.batches, run.checkpoint, run.export)}  # type: ignore[arg-type]
    return paths | per_step | {str(run.attempt("K", "JOB")), str(run.profiles("A", "B"))}  # type: ignore[arg-type]


def test_run_directory_tables_match_the_code() -> None:
    real = run_dir_paths()
    below = {str(parent) for path in real for parent in Path(path).parents}
    in_full = {code for cells in table(RUN_DIRECTORY, "# The run directory") for code in _CODE.findall(cells[0])}
    assert in_full == real - below


@pytest.mark.parametrize(
    ("path", "heading"), [(REFERENCE / "exit-codes.md", "# Exit codes"), (LAUNCHING, "**Exit codes**")]
)
def test_exit_codes_are_the_codes(path: Path, heading: str) -> None:
    documented = {int(code) for cells in table(path, heading) for code in re.findall(r"\d+", cells[0])}
    assert documented - {128} == {value for name, value in vars(errors).items() if name.startswith("EXIT_")}


def test_metrics_have_the_names_of_the_code() -> None:
    source = source_text()
    names = [name for name in _CODE.findall(section(REFERENCE / "metrics.md", "# Metrics")) if "." not in name]
    assert len(names) > 25
    for name in (name.removeprefix("eval/") for name in names):
        phase = name.removeprefix("time/").removesuffix("_s")
        written = [f'"{name}"', f'phase("{phase}")', f"{name.removesuffix('NAME').removesuffix('k')}{{"]
        assert any(form in source for form in written), name


def test_messages_of_troubleshooting_are_those_of_the_code() -> None:
    source = source_text()
    messages = [
        _CODE.findall(cells[0])[0] for cells in table(REPOSITORY / "docs" / "troubleshooting.md", "# Troubleshooting")
    ]
    assert len(messages) > 10
    assert [message for message in messages if message.strip() not in source] == []


@pytest.mark.parametrize("path", [path for path in EXAMPLES if ">>>" in path.read_text()], ids=lambda path: path.stem)
def test_worked_examples_in_docstrings_come_out_as_written(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
    assert doctest.testmod(module).failed == 0
