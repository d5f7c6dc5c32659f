"""`hpc-grpo submit` as a user calls it: what it finds on the login node before anything is handed in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result

from hpc_grpo.cli.request import load_request
from hpc_grpo.config import load_config
from hpc_grpo.config.load import CONFIGS_DIR
from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.errors import EXIT_CONFIG
from hpc_grpo.launch.chain import submit as handing_in
from hpc_grpo.launch.chain.submit import attempt_command
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.launch.place.base import JobRequest
from hpc_grpo.launch.place.slurm import partition
from hpc_grpo.launch.place.slurm.sbatch import render
from hpc_grpo.preflight import inputs as preflight
from hpc_grpo.run.lock import RunLock
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.commands import Answer
from tests.support.command import call

SHELL_CONFIGS = sorted(set((CONFIGS_DIR / "isambard").glob("*.sh")) - set(CONFIGS_DIR.rglob("setup_*.sh")))


@pytest.mark.parametrize("command", ["train", "submit"])
def test_a_run_below_home_that_is_held_stays_as_it_is(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = freeze(load_config("local/debug", [f"run.root={tmp_path}/runs"]), [], []).run
    before = run.config.read_text()
    hold = RunLock.take(run, "17", 1)
    result = call(command, "local/debug", "run.root=~/runs", "launch.slurm.time_min=7")
    hold.release()
    assert "is being trained by attempt 1" in result.stderr
    assert run.config.read_text() == before


def test_a_dry_run_shows_the_run_directory_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"attempt {tmp_path}/runs/debug\n" in call("submit", "local/debug", "run.root=~/runs", "--dry-run").output


@pytest.fixture
def handed_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunDir]:
    """The runs that would have become jobs; Slurm is not asked. The working directory holds no data."""
    runs: list[RunDir] = []

    def submit_run(run: RunDir, *_more: object) -> str:
        runs.append(run)
        return "77"

    monkeypatch.setattr(handing_in, "submit_run", submit_run)
    monkeypatch.setattr(preflight, "refuse_what_cannot_start", lambda _slurm: None)
    monkeypatch.chdir(tmp_path)
    return runs


def submit(*words: str) -> Result:
    """Of a run that names nothing on this machine but what `words` say."""
    return call("submit", "local/debug", "data.train.path=org/rows", "eval.every_steps=null", *words)


ROW = '{"question": "What is 1+1?", "answer": "2"}\n'

MISSING = [
    ("model.path=./qwen", ["model.path = ./qwen: ", "{here}/qwen/config.json"]),
    ("model.path=/no/such/model", ["model.path = /no/such/model: ", "/no/such/model/config.json"]),
    ("model.path=models/of/mine", ["model.path = models/of/mine: "]),
    ("model.path=.", ["model.path = .: ", "config.json"]),
    ("data.train.path=rows.jsonl", ["data.train.path = rows.jsonl: ", "{here}/rows.jsonl"]),
    ("data.train.path=../saved", ["data.train.path = ../saved: "]),
    ("data.train.path=~/rows.json", ["data.train.path = ~/rows.json: ", "~ is not expanded"]),
    (
        "rewards.0.name=my/rewards.py:shows_work",
        ["rewards.0.name = my/rewards.py:shows_work: ", "{here}/my/rewards.py"],
    ),
]


@pytest.mark.parametrize(("word", "told"), MISSING, ids=[word for word, _ in MISSING])
def test_a_path_that_does_not_exist_is_refused(
    word: str, told: list[str], handed_in: list[RunDir], tmp_path: Path
) -> None:
    result = submit("rewards=[{name: correctness}]", word)
    assert result.exit_code == EXIT_CONFIG
    for text in told:
        assert text.format(here=tmp_path) in result.stderr
    assert (handed_in, list(tmp_path.iterdir())) == ([], [])


def test_all_that_is_missing_is_said_at_once(handed_in: list[RunDir]) -> None:
    said = submit("model.path=./m", "data.train.path=a.json", "data.eval.path=b.json", "eval.every_steps=2").stderr
    assert [line.split(" = ")[0].strip() for line in said.splitlines() if " = " in line] == [
        "model.path",
        "data.train.path",
        "data.eval.path",
    ]
    assert said.count("error: ") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["model.path=Qwen/Qwen2.5-7B", "data.train.path=openai/gsm8k"],
        ["model.path=$SCRATCHDIR/models/qwen", "data.train.path=${SCRATCH}/rows.jsonl"],
        ["data.eval.path=gone.jsonl"],  # without eval nobody reads it
        ["rewards.0.name=my_rewards:shows_work"],
        ["task=sft", "rewards.0.name=gone.py:shows_work"],
    ],
    ids=["of the hub", "with a job's variables", "eval that is off", "reward of a module", "reward that sft ignores"],
)
def test_what_the_job_may_find_is_left_to_it(words: list[str], handed_in: list[RunDir]) -> None:
    result = submit("rewards=[{name: correctness}]", *words)
    assert result.exit_code == 0, result.stderr
    assert len(handed_in) == 1


def test_paths_are_relative_to_the_folder_the_run_was_started_in(
    handed_in: list[RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "rows.jsonl").write_text(ROW)
    (tmp_path / "my" / "rewards.py").touch()
    words = ["data.train.path=my/rows.jsonl", "rewards=[{name: 'my/rewards.py:f'}]", f"run.root={tmp_path}/runs"]
    assert submit(*words).exit_code == 0
    monkeypatch.chdir(tmp_path / "runs")
    assert submit(*words).exit_code == 0
    (tmp_path / "my" / "rewards.py").unlink()
    assert f"there is no {tmp_path}/my/rewards.py" in submit(*words).stderr


def test_a_name_of_the_hub_is_one_although_another_folder_holds_a_clone(
    handed_in: list[RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["model.path=org/m", f"run.root={tmp_path}/runs"]
    assert submit(*words).exit_code == 0
    (tmp_path / "other" / "org" / "m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "other")
    assert submit(*words).exit_code == 0
    assert len(handed_in) == 2


def test_a_folder_of_the_run_is_checked_from_everywhere(
    handed_in: list[RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "x").mkdir(parents=True)
    (tmp_path / "models" / "x" / "config.json").touch()
    (tmp_path / "other").mkdir()
    words = ["model.path=models/x", f"run.root={tmp_path}/runs"]
    assert submit(*words).exit_code == 0
    (tmp_path / "models" / "x" / "config.json").unlink()
    monkeypatch.chdir(tmp_path / "other")
    assert f"model.path = models/x: there is no {tmp_path}/models/x/config.json" in submit(*words).stderr
    assert len(handed_in) == 1


@pytest.mark.parametrize(("key", "value"), [("launch.python", "{}"), ("launch.notify", "[{}, me]")])
def test_a_program_that_the_job_could_not_start_is_refused(
    key: str, value: str, handed_in: list[RunDir], tmp_path: Path
) -> None:
    program = tmp_path / "program"
    words = ["model.path=org/m", f"{key}={value.format(program)}", f"run.root={tmp_path}/runs"]

    def is_refused() -> bool:
        result = submit(*words)
        said = all(part in result.stderr for part in (f"{key} = ", str(program), "must be a file that can be executed"))
        return result.exit_code == EXIT_CONFIG and said

    assert is_refused()
    assert f"# submit would refuse this. {key} = " in submit(*words, "--dry-run").output
    program.touch(0o644)
    assert is_refused()
    assert (handed_in, (tmp_path / "runs").exists()) == ([], False)
    program.chmod(0o755)
    assert submit(*words).exit_code == 0
    assert len(handed_in) == 1


def test_modules_that_a_shell_lacks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_grpo.launch.supervisor.attempt.run_attempt", lambda *_: 0)
    monkeypatch.setenv("LOADEDMODULES", "brics/userenv:brics/nccl/2.21")
    words = ["local/debug", f"run.root={tmp_path}", "launch.modules=[brics/nccl, cudatoolkit]"]
    result = call("train", *words)
    assert "Not loaded in this shell, of launch.modules: cudatoolkit. `module load cudatoolkit`" in result.stderr
    assert "Not loaded" not in call("train", *words, "--link").stderr


BAD_FIRST_ROWS = {
    "broken": ('\n{"question": "q"\n' + ROW, [], "rows.jsonl, line 2, byte 18: not valid JSON"),
    "no object": ("[1]\n", [], "rows.jsonl, line 1, byte 0: must be a JSON object"),
    "no prompt": (
        '{"qustion": "q", "answer": "a"}\n',
        [],
        "there is no field 'question' (prompt_field). Fields: qustion",
    ),
    "no answer": (ROW, ["data.train.answer_field=gold"], "there is no field 'gold' (answer_field)"),
    "no completion": (ROW, ["task=sft", "sft.completion_field=reply"], "'reply' (sft.completion_field)"),
    "empty": ("\n", [], "rows.jsonl is empty"),
}


@pytest.mark.parametrize("case", BAD_FIRST_ROWS)
def test_data_that_begins_with_a_bad_row_is_refused(case: str, handed_in: list[RunDir], tmp_path: Path) -> None:
    text, words, told = BAD_FIRST_ROWS[case]
    (tmp_path / "rows.jsonl").write_text(text)
    result = submit("model.path=org/m", "data.train.path=rows.jsonl", *words)
    assert (result.exit_code, handed_in) == (EXIT_CONFIG, [])
    assert told in result.stderr
    assert result.stderr.count("error: ") == 1


def test_of_the_data_the_first_row_alone_is_read(handed_in: list[RunDir], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n" + ROW + "{broken\n")
    result = submit("model.path=org/m", "data.train.path=rows.jsonl")
    assert result.exit_code == 0, result.stderr
    assert len(handed_in) == 1


def test_data_is_judged_without_packages_that_a_light_installation_lacks() -> None:
    program = "import sys, hpc_grpo.preflight.inputs, hpc_grpo.preflight.inputs, hpc_grpo.config\n"
    program += "print(sorted(set(sys.modules) & {'numpy', 'torch', 'ray', 'datasets', 'transformers'}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


TOO_FEW_GPUS = [
    (["model.device=cuda"], "model.device = cuda, but launch.slurm.gpus_per_node = 0 asks Slurm for no GPUs"),
    (["model.device=cuda", "engine.tensor_parallel=2"], "need 5: set launch.slurm.gpus_per_node to that"),
    (["launch.slurm.gpus_per_node=2"], "launch.slurm.gpus_per_node = 2: a node of the job has 2 GPUs, but placement."),
    (["launch.slurm.gpus_per_node=4", "engine.tensor_parallel=2"], "(engine.tensor_parallel = 2) need 5."),
    (["launch.slurm.gpus_per_node=2", "model.device=cpu"], "need 3."),  # reserved although nothing computes on them
]


@pytest.mark.parametrize(("words", "told"), TOO_FEW_GPUS)
def test_fewer_gpus_than_learners_and_engines_need_are_refused(
    words: list[str], told: str, handed_in: list[RunDir]
) -> None:
    result = submit("model.path=org/m", *words)
    assert (result.exit_code, handed_in) == (EXIT_CONFIG, [])
    assert told in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model.device=cpu"],
        ["model.device=cuda", "launch.slurm.gpus_per_node=3"],
        ["model.device=cuda", "task=sft", "launch.slurm.gpus_per_node=1"],
        ["placement.gpus=none", "launch.slurm.gpus_per_node=1"],
        ["model.device=cuda", "--sbatch", "gres=gpu:4"],
        ["model.device=cuda", "--sbatch", "gpus-per-task=4"],
        ["model.device=cuda", "--sbatch", "exclusive"],
    ],
    ids=lambda words: " ".join(words) or "defaults",
)
def test_gpus_that_suffice_or_that_slurm_is_asked_for_otherwise_are_accepted(
    words: list[str], handed_in: list[RunDir]
) -> None:
    result = submit("model.path=org/m", *words)
    assert result.exit_code == 0, result.stderr
    assert len(handed_in) == 1


@pytest.mark.parametrize("path", SHELL_CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_shell_configs_of_a_site_are_handed_in(path: Path, handed_in: list[RunDir]) -> None:
    result = call("submit", str(path))
    assert result.exit_code == 0, result.stderr
    assert len(handed_in) == 1


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("30", 30), ("90:30", 91), ("24:00:00", 1440), ("1-0", 1440), ("1-12:30", 2190), ("1-00:00:01", 1441)],
)
def test_time_is_given_as_to_slurm(time: str, minutes: int) -> None:
    assert f"#SBATCH --time={minutes}\n" in call("submit", "local/debug", "--time", time, "--dry-run").output


@pytest.mark.parametrize("time", ["0", "0:00", "UNLIMITED", "1h", "1-", "1:2:3:4", "-5", "1.5", ""])
def test_a_time_that_slurm_does_not_know_is_one_error(time: str) -> None:
    result = call("submit", "local/debug", "--time", time, "--dry-run")
    assert (result.exit_code, result.stdout) == (EXIT_CONFIG, "")
    assert f"--time = {time!r} must be" in result.stderr
    assert "24:00:00" in result.stderr


@pytest.fixture
def model(tmp_path: Path) -> str:
    write_model(tmp_path / "model", ModelSize(hidden_size=64, num_heads=2), seed=0)
    return f"model.path={tmp_path}/model"


def dry_run(*words: str) -> tuple[str, str]:
    """The script that sbatch would get, and what is said below it."""
    result = submit("--dry-run", *words)
    assert result.exit_code == 0, result.stderr
    request = load_request("local/debug", [word for word in words if "=" in word])
    run = RunDir(request.config.run_path)
    script = render(JobRequest(run, request.config.launch, attempt_command(run)))
    assert result.stdout.startswith(script)
    below = result.stdout.removeprefix(script)
    assert all(line == "" or line.startswith("#") for line in below.splitlines())
    assert "#SBATCH" not in below
    return script, below


def test_a_dry_run_ends_with_the_plan(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, below = dry_run(model)
    plan = call("plan", "local/debug", model, "data.train.path=org/rows", "eval.every_steps=null").output
    assert "It fits." in plan
    assert plan in below.replace("\n# ", "\n").replace("\n#\n", "\n\n")
    assert "assuming 96 GiB on each GPU and 460 GiB" in below
    assert "refuse" not in below


def test_a_plan_that_does_not_fit_is_said_and_no_error(model: str) -> None:
    _, below = dry_run(model, "launch.object_store_gib=900")
    assert "# It does not fit:\n" in below


def test_a_dry_run_without_the_model_says_why_there_is_no_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    _, below = dry_run("model.path=org/not-here")
    assert below.startswith("\n# No plan: model.path = org/not-here is not on this machine")
    assert len(below.splitlines()) == 2


def test_a_dry_run_says_what_submit_would_refuse() -> None:
    _, below = dry_run("model.path=./not-here")
    assert "# submit would refuse this. The job would not find" in below
    assert "#   model.path = ./not-here: there is no " in below


def test_a_dry_run_says_all_that_submit_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "PartitionName=workq Default=YES MaxNodes=2 MaxTime=UNLIMITED State=UP TotalNodes=9\n"
    monkeypatch.setattr(partition, "ask_partitions", lambda: Answer(shown))
    _, below = dry_run("model.path=./not-here", "launch.num_nodes=3", "model.device=cuda")
    told = [line for line in below.splitlines() if line.startswith("# submit would refuse this. ")]
    assert [line.split("this. ")[1][:12] for line in told] == ["The job woul", "model.device", "launch.num_n"]
    assert "launch.num_nodes (--nodes) = 3" in told[2]


@pytest.mark.parametrize("scontrol", [None, "echo no controller >&2; exit 1", "exec sleep 30"])
def test_a_dry_run_needs_no_slurm_that_answers(
    scontrol: str | None, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    if scontrol is not None:
        (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{scontrol}\n")
        (tmp_path / "bin" / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(partition, "_DEADLINE_S", 0.5)
    _, below = dry_run(model, "launch.num_nodes=1000")
    assert "refuse" not in below
    assert "# Plan, assuming" in below
