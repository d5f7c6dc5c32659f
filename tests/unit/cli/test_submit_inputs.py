"""Inputs that submit refuses before it queues a job: models, rewards, programs, too few GPUs."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

import hpc_grpo
from hpc_grpo.config import load_config
from hpc_grpo.data.fingerprint import local_fingerprints
from hpc_grpo.errors import EXIT_CONFIG, ConfigError
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.plan import disk as plan_disk
from hpc_grpo.preflight.inputs import refuse_unknown_models, refuse_wrong_share
from hpc_grpo.run.frozen_config import read_config, take_inputs
from hpc_grpo.system.disk import Room
from hpc_grpo.types import GIB
from tests.support.command import call
from tests.support.configs import minimal_config
from tests.support.model_folders import make_model
from tests.support.places import FakeQueue


def submit(*words: str) -> Result:
    """Submit a run that names nothing on this machine but what `words` say."""
    return call("submit", "local/debug", "data.train.path=org/rows", "eval.every=null", "--one-job", *words)


ROW = '{"question": "What is 1+1?", "answer": "2"}\n'

MISSING = [
    ("model.path=./qwen", ["model.path = ./qwen: ", "{here}/qwen/config.json"]),
    ("model.path=/no/such/model", ["model.path = /no/such/model: ", "/no/such/model/config.json"]),
    ("model.path=models/of/mine", ["model.path = models/of/mine: "]),
    ("model.path=.", ["model.path = .: ", "config.json"]),
    ("data.train.path=rows.jsonl", ["data.train.path = rows.jsonl: ", "{here}/rows.jsonl"]),
    ("data.train.path=../saved", ["data.train.path = ../saved: "]),
    ("data.train.path=~/rows.json", ["data.train.path = ", "/rows.json: there is no "]),
    ("data.train.path=$NOWHERE/rows.json", ["data.train.path = '$NOWHERE/rows.json': NOWHERE is not set here"]),
    (
        "rewards.0.name=my/rewards.py:shows_work",
        ["rewards.0.name = my/rewards.py:shows_work: ", "{here}/my/rewards.py"],
    ),
    ("rewards.0.name=my_rewards:shows_work", ["rewards.0.name = my_rewards:shows_work: ", "{here}/my_rewards.py"]),
    ("eval.metrics=[json.my:f]", ["eval.metrics.0 = json.my:f: ", "{here}/json/my.py"]),
    ("data.train.path=my_data:rows", ["data.train.path = my_data:rows: ", "{here}/my_data.py"]),
]


@pytest.mark.parametrize(("word", "messages"), MISSING, ids=[word for word, _ in MISSING])
def test_a_path_that_does_not_exist_is_refused(
    word: str, messages: list[str], queue: FakeQueue, tmp_path: Path
) -> None:
    result = submit("rewards=[{name: correctness}]", word)
    assert result.exit_code == EXIT_CONFIG
    for text in messages:
        assert text.format(here=tmp_path) in result.stderr
    assert (queue.requests, list(tmp_path.iterdir())) == ([], [])


SHARE = "data.held_out = 0.01 holds nothing out of data.train. Set eval.every to null, raise the share"
WRONG_FOR_TRAIN = [
    ("model.path=./qwen", "model.path = ./qwen: there is no {here}/qwen/config.json"),
    ("data.train.path=gone.jsonl", "data.train.path = gone.jsonl: there is no {here}/gone.jsonl"),
    ("data.train.answer_field=gold", "there is no field 'gold' (answer_field). Fields: question, answer"),
    ("data.held_out=0.01", SHARE),
    ("data.held_out=0.99", "data.held_out = 0.99 holds everything out of data.train. Lower it"),
    ("rewards.0.name=my.py:shows_wrok", "{here}/my.py has no 'shows_wrok'. It has: needs_gold, shows_work"),
    ("rewards.0.name=my.py:needs_gold", "cannot be called: missing a required argument: 'gold'"),
]


@pytest.mark.parametrize(
    ("kind", "code"), [(RepositoryNotFoundError, EXIT_CONFIG), (HfHubHTTPError, 0), (ConnectionError, 0)]
)
def test_train_refuses_a_model_that_the_hub_does_not_know(
    kind: type[Exception], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def model_info(api: HfApi, name: str, **_: object) -> None:
        asked.append(f"{api.endpoint}/{name}")
        raise kind.__new__(kind)  # without the answer of an HTTP library

    monkeypatch.setattr(HfApi, "model_info", model_info)
    monkeypatch.setattr("hpc_grpo.cli.train.run_attempt", lambda *_args: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROW)
    words = ["model.path=org/gone", "data.train.path=rows.jsonl", "eval.every=null", "launch.env.HF_ENDPOINT=https://h"]
    result = call("train", "local/debug", *words, f"launch.env.HF_HOME={tmp_path}")
    assert (result.exit_code, asked) == (code, ["https://h/org/gone"]), result.stderr
    assert ("model.path = org/gone: there is no such folder" in result.stderr) == (code == EXIT_CONFIG)
    assert (tmp_path / "runs").exists() == (code == 0)
    (tmp_path / "unreadable").write_bytes(b"\xff")
    for environ in ({"HF_HUB_OFFLINE": "1"}, {"HF_TOKEN_PATH": str(tmp_path / "unreadable")}):
        refuse_unknown_models(minimal_config(model={"path": "org/gone"}), environ)
    assert len(asked) == 1


@pytest.mark.parametrize(("word", "says"), WRONG_FOR_TRAIN, ids=[word for word, _ in WRONG_FOR_TRAIN])
def test_train_refuses_a_wrong_input_before_it_leaves_anything(
    word: str, says: str, queue: FakeQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[Path] = []
    monkeypatch.setattr("hpc_grpo.cli.train.run_attempt", lambda run, *_args: attempts.append(run.path) or 0)
    (tmp_path / "rows.jsonl").write_text("".join(ROW.replace("1+1", f"{number}+1") for number in range(6)))
    (tmp_path / "my.py").write_text(
        "def shows_work(prompts, completions, **columns): ...\ndef needs_gold(prompts, completions, gold): ..."
    )
    config = {
        "run": {"name": "mine", "root": "runs"},
        "model": {"path": "org/m", "device": "cpu"},
        "data": {"train": {"path": "rows.jsonl"}, "held_out": 0.4},
        "rewards": [{"name": "my.py:shows_work"}],
        "train": {"total_steps": 1},
        "eval": {"every": 1},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(config))
    refused = call("train", "mine.yaml", word)
    assert (refused.exit_code, refused.stderr.count("error: "), attempts) == (EXIT_CONFIG, 1, [])
    assert says.format(here=tmp_path) in refused.stderr
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match=re.escape(says.format(here=tmp_path))):
        hpc_grpo.train("mine.yaml", overrides=dict([word.split("=")]))
    assert call("train", "mine.yaml", word, "--link").exit_code == 0  # submit has checked it
    assert attempts == [tmp_path / "runs" / "mine"]


@pytest.mark.parametrize("reward", ["scores:own", "scores.py:own"])
def test_a_complete_run_stays_so_where_its_reward_has_changed(
    reward: str, queue: FakeQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[Path] = []
    monkeypatch.setattr("hpc_grpo.cli.train.run_attempt", lambda run, *_args: attempts.append(run.path) or 0)
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "scores.py").write_text("def own(completions, **columns): return [0.2 for _ in completions]")
    words = ["local/debug", "data.train.path=rows.jsonl", "eval.every=null", f"rewards=[{{name: {reward}}}]"]
    words += ["model.path=org/m", "run.root=runs", "model.device=cpu"]
    run = freeze(load_config(words[0], [*words[1:], "train.total_steps=3"]), [], [])
    take_inputs(run, local_fingerprints(read_config(run), tmp_path))
    run.ledger.write_text('{"step": 1, "attempt": 1, "ordinals": [0]}\n')
    run.complete_marker.write_text("step 3\n")
    (tmp_path / "scores.py").write_text("def own(completions, **columns): return [0.5 for _ in completions]")
    result = call("train", *words, "train.total_steps=4")
    assert (result.exit_code, run.is_complete(), attempts) == (EXIT_CONFIG, True, [])
    assert re.search(r"rewards.0.name, scores.py: \d+ bytes, sha256", result.stderr)
    assert "start a new run: run.name=NAME" in result.stderr
    before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    assert call("train", *words, "train.total_steps=3", "--accept-changes").exit_code == 0
    assert {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    ("data", "every", "is_refused"),
    [
        ({}, 1, True),
        ({}, None, False),
        ({"images": "image", "template": "chat"}, 1, False),
        ({"train": {"path": "org/d"}}, 1, False),
    ],
)
def test_a_share_is_refused_where_evals_need_it_and_the_prompts_are_known(
    data: dict[str, Any], every: int | None, is_refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(ROW)
    config = minimal_config(
        data={"train": {"path": "rows.jsonl"}, "held_out": 0.01, **data},
        eval={"every": every},
        rewards=[{"name": "correctness"}],
    )
    with pytest.raises(ConfigError, match="holds nothing out") if is_refused else nullcontext():
        refuse_wrong_share(config, tmp_path)


def test_the_folder_of_an_adapter_is_refused_with_its_own_key(queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter_config.json").write_text("{}")
    refused = submit("model.path=./mine", "--dry-run").stderr
    assert f"no {tmp_path}/mine/config.json: set model.adapter=./mine, and model.path to its base" in refused
    reference = submit("loss.kl.coef=0.1", "loss.kl.reference=./mine", "--dry-run").stderr
    assert f"no {tmp_path}/mine/config.json" in reference
    assert "model.adapter" not in reference


def test_a_file_in_place_of_the_folder_of_runs_is_refused(queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROW)
    refused = submit("model.path=org/m", "run.root=rows.jsonl", "--dry-run")
    assert refused.exit_code == EXIT_CONFIG
    assert "cannot be written (Not a directory). Set run.root to a folder" in refused.stderr


def test_all_that_is_missing_is_one_error(queue: FakeQueue) -> None:
    shown = submit("model.path=./m", "data.train.path=a.json", "data.eval.path=b.json", "eval.every=2").stderr
    assert [line.split(" = ")[0].strip() for line in shown.splitlines() if " = " in line] == [
        "model.path",
        "data.train.path",
        "data.eval.path",
    ]
    assert shown.count("error: ") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["model.path=Qwen/Qwen2.5-7B", "data.train.path=openai/gsm8k"],
        ["data.eval.path=gone.jsonl"],  # without eval nobody reads it
        ["rewards.0.name=json.decoder:scanstring"],
        ["rewards.0.name=my_rewards:shows_work", f"launch.python={sys.executable}"],
        ["task=sft", "rollout={}", "rewards.0.name=gone.py:shows_work"],
    ],
    ids=["of the hub", "eval that is off", "reward of a module", "reward of another Python", "reward that sft ignores"],
)
def test_an_input_that_the_job_may_find_is_accepted(words: list[str], queue: FakeQueue) -> None:
    result = submit("rewards=[{name: correctness}]", *words)
    assert result.exit_code == 0, result.stderr
    assert len(queue.requests) == 1


def test_paths_are_relative_to_the_folder_the_run_was_started_in(
    queue: FakeQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "rows.jsonl").write_text(ROW)
    (tmp_path / "my" / "rewards.py").write_text("def f(prompts, completions): ...")
    words = ["data.train.path=my/rows.jsonl", "rewards=[{name: 'my/rewards.py:f'}]", f"run.root={tmp_path}/runs"]
    assert submit(*words).exit_code == 0
    monkeypatch.chdir(tmp_path / "runs")
    assert submit(*words).exit_code == 0
    (tmp_path / "my" / "rewards.py").unlink()
    assert f"there is no {tmp_path}/my/rewards.py" in submit(*words).stderr


REWARDS = [
    ("def f(completions, **columns): ...", ""),
    ("@wrapped\ndef f(text): ...", ""),
    ("def f(text): ...\nf = wrapped(f)", ""),
    ("class f: ...", ""),
    ("def f(text): ...\ntry:\n    from fast import g as f\nexcept ImportError: ...", ""),
    ("def f(text): ...\nglobals()['f'] = wrapped(f)", ""),
    ("async def f(prompts: X, completions, *, answer, weight=unknown(), timeout_s=1): ...", ""),
    ("def f(prompts, completions, question, weight): ...", ""),
    ("def f(prompts, completions, weight, gold): ...", "cannot be called: missing a required argument: 'gold'"),
    ("def f(solution_str, ground_truth): ...", "cannot be called: missing a required argument: 'solution_str'"),
    ("def f(prompts, weight): ...", "cannot be called: got an unexpected keyword argument 'completions'"),
    (
        "def f(prompts, completions, /, **columns): ...",
        "cannot be called: 'prompts' parameter is positional only, but was passed as a keyword",
    ),
]


@pytest.mark.parametrize(("code", "says"), REWARDS, ids=[code for code, _ in REWARDS])
@pytest.mark.parametrize("name", ["my.py:f", "my:f"])
def test_a_reward_that_cannot_be_called_with_a_row_is_refused(
    name: str, code: str, says: str, queue: FakeQueue, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "my.py").write_text(code)
    words = ["model.path=org/m", f"rewards=[{{name: '{name}', args: {{weight: 2}}}}]"]
    result = submit(*words, "data.train.path=rows.jsonl")
    assert (result.exit_code, len(queue.requests)) == ((EXIT_CONFIG, 0) if says else (0, 1)), result.stderr
    if says:
        assert f"Reward '{name}' {says}. It gets lists by name: prompts, completions, and the columns" in result.stderr
        assert "here: question, answer" in result.stderr


def test_a_reward_gets_the_answer_from_the_answer_field(queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "6*7?", "solution": {"value": "42"}}\n')
    (tmp_path / "my.py").write_text("def f(prompts, completions, answer, min_lines=2, **columns): ...")
    words = ["model.path=org/m", "rewards=[{name: 'my.py:f'}]", "data.train.path=rows.jsonl"]
    result = submit(*words, "data.train.answer_field=solution.value", "data.train.prompt_field=question")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("code", ["def f(prompts, completions, *_): ...", "def f(own=None, /, **columns): ..."])
def test_names_that_no_column_can_have_are_no_columns(code: str, queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(code)
    assert submit("model.path=org/m", "rewards=[{name: 'my.py:f'}]").exit_code == 0


def test_a_reward_may_need_columns_of_data_that_is_elsewhere(queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def f(prompts, completions, gold): ...")
    words = ["model.path=org/m", "rewards=[{name: 'my.py:f'}]"]
    assert submit(*words).exit_code == 0
    (tmp_path / "my.py").write_text("def f(gold): ...")
    refused = submit(*words).stderr
    assert "Reward 'my.py:f' cannot be called" in refused
    assert (
        "the columns of the data set (`reward test`: --field NAME=VALUE), which are unknown until it is read. A last"
        in refused
    )


def test_a_file_of_data_is_no_model_and_the_folder_of_a_model_is_no_data(queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text("{}")
    (tmp_path / "qwen" / "model.safetensors").touch()
    refused = submit("model.path=rows.jsonl", "--dry-run")
    assert refused.exit_code == EXIT_CONFIG
    assert f"model.path = rows.jsonl: there is no {tmp_path}/rows.jsonl/config.json" in refused.stderr
    refused = submit("model.path=org/m", "data.train.path=qwen", "--dry-run")
    assert refused.exit_code == EXIT_CONFIG
    assert f"Data set {tmp_path}/qwen is the folder of a model." in refused.stderr


def test_an_offline_job_needs_its_inputs_in_the_cache(queue: FakeQueue, tmp_path: Path) -> None:
    words = ["model.path=org/m", f"launch.env.HF_HOME={tmp_path}/cache"]
    warned = submit(*words, "--dry-run")
    assert warned.exit_code == 0
    assert "# Not in the cache: model.path = org/m, data.train.path = org/rows. " in warned.stdout
    refused = submit(*words, "launch.env.HF_HUB_OFFLINE='1'")
    assert (refused.exit_code, queue.requests) == (EXIT_CONFIG, [])
    assert "model.path = org/m, data.train.path = org/rows: not in the cache" in refused.stderr
    assert "hpc-grpo cluster prefetch CONFIG" in refused.stderr
    assert submit(*words, "launch.env.HF_HOME=$OF_THE_JOB/c", "launch.env.HF_HUB_OFFLINE='1'").exit_code == 0
    for folder in ("models--org--m/snapshots/a", "datasets--org--rows"):
        (tmp_path / "cache" / "hub" / folder).mkdir(parents=True)
    (tmp_path / "cache" / "hub" / "models--org--m" / "snapshots" / "a" / "config.json").write_text(
        '{"model_type": "qwen2"}'
    )
    assert submit(*words, "launch.env.HF_HUB_OFFLINE='1'").exit_code == 0
    assert "Not in the cache" not in submit(*words, "--dry-run").stdout


def test_a_name_of_the_hub_is_one_although_another_folder_holds_a_clone(
    queue: FakeQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["model.path=org/m", f"run.root={tmp_path}/runs"]
    assert submit(*words).exit_code == 0
    (tmp_path / "other" / "org" / "m").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "other")
    assert submit(*words).exit_code == 0
    assert len(queue.requests) == 2


@pytest.mark.parametrize(
    ("settings", "file", "content"),
    [
        ({}, "pytorch_model.bin.index.json", '{"weight_map": {"w": "pytorch_model-00001-of-00002.bin"}}'),
        ({"transformers_weights": "own.safetensors"}, "own.safetensors", ""),
    ],
)
def test_a_folder_that_transformers_loads_is_not_refused(
    settings: dict[str, Any], file: str, content: str, queue: FakeQueue, tmp_path: Path
) -> None:
    """A whole file of weights is preferred to an index beside it, and config.json may name another file."""
    make_model(tmp_path / "qwen", settings, left_out="pytorch_model.bin" if settings else "")
    (tmp_path / "qwen" / file).write_text(content)
    shown = submit("model.path=./qwen", "--dry-run")
    assert shown.exit_code == 0, shown.stderr


BROKEN = [
    ("config.json", b"{", "config.json cannot be read as JSON"),
    ("config.json", b"[]", "config.json must hold a JSON object with model_type"),
    ("config.json", b"{}", "config.json must hold a JSON object with model_type"),
    ("pytorch_model.bin", b"version https://git-lfs.github.com/spec/v1\n", "is cut short or damaged"),
    ("pytorch_model.bin", None, "has no weights: neither model.safetensors nor pytorch_model.bin"),
    ("tokenizer.json", None, "the folder has no tokenizer"),
]


@pytest.mark.parametrize(("file", "content", "says"), BROKEN)
def test_a_folder_that_holds_no_whole_model_is_refused(
    file: str, content: bytes | None, says: str, queue: FakeQueue, tmp_path: Path
) -> None:
    make_model(tmp_path / "qwen", {})
    assert submit("model.path=./qwen", "--dry-run").exit_code == 0
    if content is None:
        (tmp_path / "qwen" / file).unlink()
    else:
        (tmp_path / "qwen" / file).write_bytes(content)
    refused = submit("model.path=./qwen", "--dry-run")
    assert (refused.exit_code, refused.stderr.count("error: ")) == (EXIT_CONFIG, 1)
    assert says in refused.stderr
    assert "# submit would refuse this. " in refused.stdout


def test_a_folder_of_the_run_is_checked_from_everywhere(
    queue: FakeQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "models" / "x", {})
    (tmp_path / "other").mkdir()
    words = ["model.path=models/x", f"run.root={tmp_path}/runs"]
    assert submit(*words).exit_code == 0
    (tmp_path / "models" / "x" / "config.json").unlink()
    monkeypatch.chdir(tmp_path / "other")
    assert f"model.path = models/x: there is no {tmp_path}/models/x/config.json" in submit(*words).stderr
    assert len(queue.requests) == 1


@pytest.mark.parametrize(("key", "value"), [("launch.python", "{}"), ("launch.notify", "[{}, me]")])
def test_a_program_that_the_job_could_not_start_is_refused(
    key: str, value: str, queue: FakeQueue, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    words = ["model.path=org/m", f"{key}={value.format(program)}", f"run.root={tmp_path}/runs"]

    def is_refused() -> bool:
        result = submit(*words)
        parts = (f"{key} = ", str(program), "must be an executable file")
        return result.exit_code == EXIT_CONFIG and all(part in result.stderr for part in parts)

    assert is_refused()
    assert f"# submit would refuse this. {key} = " in submit(*words, "--dry-run").output
    program.touch(0o644)
    assert is_refused()
    assert (queue.requests, (tmp_path / "runs").exists()) == ([], False)
    program.chmod(0o755)
    assert submit(*words).exit_code == 0
    assert len(queue.requests) == 1


def test_an_environment_that_nodes_could_not_copy_is_refused(queue: FakeQueue, tmp_path: Path) -> None:
    words = ["model.path=org/m", f"run.root={tmp_path}/runs"]
    (tmp_path / "env").mkdir()
    for environment in (tmp_path / "env", tmp_path / "env.squashfs"):
        result = submit(*words, f"launch.stage.environment={environment}")
        assert result.exit_code == EXIT_CONFIG
        assert f"{environment} must be the folder of a virtual environment, with bin/python" in result.stderr
    (tmp_path / "env.squashfs").touch()
    assert submit(*words, f"launch.stage.environment={tmp_path / 'env.squashfs'}").exit_code == 0
    assert len(queue.requests) == 1


TOO_FEW_GPUS = [
    (["model.device=cuda"], "model.device = cuda, but launch.slurm.gpus_per_node = 0 asks Slurm for no GPUs"),
    (["model.device=cuda", "engine.tensor_parallel=2"], "need 5: set launch.slurm.gpus_per_node to that"),
    (["launch.slurm.gpus_per_node=2"], "launch.slurm.gpus_per_node = 2: a node of the job has 2 GPUs, but placement."),
    (["launch.slurm.gpus_per_node=4", "engine.tensor_parallel=2"], "(engine.tensor_parallel = 2) need 5."),
]


@pytest.mark.parametrize(("words", "message"), TOO_FEW_GPUS)
def test_fewer_gpus_than_learners_and_engines_need_are_refused(
    words: list[str], message: str, queue: FakeQueue
) -> None:
    result = submit("model.path=org/m", *words)
    assert (result.exit_code, queue.requests) == (EXIT_CONFIG, [])
    assert message in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model.device=cpu"],
        ["model.device=cuda", "launch.slurm.gpus_per_node=3"],
        ["model.device=cuda", "task=sft", "rollout={}", "launch.slurm.gpus_per_node=1"],
        ["model.device=cpu", "launch.slurm.gpus_per_node=1"],
        ["model.device=cuda", "--sbatch", "gres=gpu:4"],
        ["model.device=cuda", "--sbatch", "gpus-per-task=4"],
        ["model.device=cuda", "--sbatch", "exclusive"],
        ["model.device=cuda", "launch.slurm.extra.exclusive=true"],
    ],
    ids=lambda words: " ".join(words) or "defaults",
)
def test_gpus_that_suffice_or_that_slurm_is_asked_for_otherwise_are_accepted(
    words: list[str], queue: FakeQueue
) -> None:
    result = submit("model.path=org/m", *words)
    assert result.exit_code == 0, result.stderr
    assert len(queue.requests) == 1


def test_a_mixture_of_experts_is_refused_before_it_queues(queue: FakeQueue, tmp_path: Path) -> None:
    settings = {"model_type": "phimoe", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
    make_model(tmp_path / "moe", settings)
    refused = submit("model.path=./moe")
    assert refused.exit_code == EXIT_CONFIG
    assert "model.path = ./moe: MixtralForCausalLM is a mixture of experts (num_local_experts = 8)" in refused.stderr
    assert queue.requests == []
    assert submit("model.path=./moe", "task=sft", "rollout={}").exit_code == 0


@pytest.mark.parametrize(
    ("model", "words", "says"),
    [
        (
            {"model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts": 128},
            ("engine.tensor_parallel=5", "engine.engines_per_node=1"),
            "engine.tensor_parallel = 5 must divide moe_intermediate_size = 768 and be at most the number of experts, "
            "128, of model.path = ./model. Set it to 1, 2, 3, 4.",
        ),
        (  # as transformers writes it
            {"model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_local_experts": 4},
            ("engine.tensor_parallel=8", "engine.engines_per_node=1"),
            "at most the number of experts, 4, of model.path = ./model. Set it to 1, 2, 3, 4.",
        ),
        (
            {"model_type": "mixtral", "intermediate_size": 64, "num_local_experts": 2},
            ("engine.tensor_parallel=4", "engine.engines_per_node=1"),
            "engine.tensor_parallel = 4 must divide intermediate_size = 64 and be at most the number of experts, 2, of "
            "model.path = ./model. Set it to 1, 2.",
        ),
        (
            {"model_type": "qwen3"},
            ("train.router_aux_loss_coef=0.001",),
            "train.router_aux_loss_coef = 0.001 needs a mixture of experts: mixtral, qwen3_moe. model.path = ./model "
            "is qwen3. Set train.router_aux_loss_coef=0",
        ),
        (
            {"model_type": "qwen3"},
            ("train.router_replay=true",),
            "train.router_replay = true needs a mixture of experts: mixtral, qwen3_moe. model.path = ./model is qwen3. "
            "Set train.router_replay=false",
        ),
    ],
)
def test_what_does_not_go_with_a_models_experts_is_refused_before_it_queues(
    model: dict[str, Any], words: tuple[str, ...], says: str, queue: FakeQueue, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    refused = submit("model.path=./model", *words)
    assert refused.exit_code == EXIT_CONFIG
    assert says in refused.stderr
    assert queue.requests == []


@pytest.mark.parametrize(
    ("row", "file", "says"),
    [
        ({"question": "?", "answer": "2"}, "processor_config.json", "no field 'image' (data.images). Fields: question"),
        ({"question": "?", "answer": "2", "image": "1.png"}, "tokenizer.json", "has no processor of images: "),
        ({"question": "?", "answer": "2", "image": "1.png"}, "preprocessor_config.json", None),
    ],
    ids=["no column", "no processor", "both"],
)
def test_a_run_on_images_without_images_or_processor_is_refused_before_it_queues(
    row: dict[str, str], file: str, says: str | None, queue: FakeQueue, tmp_path: Path
) -> None:
    make_model(tmp_path / "model", {"model_type": "qwen2_5_vl", "vision_config": {}})
    (tmp_path / "model" / file).write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = ("model.path=./model", "data.train.path=rows.jsonl", "data.images=image", "data.template=chat")
    found = submit(*words, "rewards=[{name: correctness}]")
    assert says is None or says in found.stderr
    assert (found.exit_code, len(queue.requests)) == ((0, 1) if says is None else (EXIT_CONFIG, 0))


@pytest.mark.parametrize(
    "words",
    [
        ["task=distill", "task.args.teacher=./teacher", "rewards=[]"],
        ["loss.kl.coef=0.1", "loss.kl.reference=./teacher"],
    ],
    ids=["teacher", "reference"],
)
@pytest.mark.parametrize(("ids", "is_refused"), [({"a": 0, "b": 1}, False), ({"a": 0, "b": 2, "c": 1}, True)])
def test_a_model_that_scores_with_other_tokens_is_refused_before_it_queues(
    ids: dict[str, int], is_refused: bool, words: list[str], queue: FakeQueue, tmp_path: Path
) -> None:
    for name, vocabulary in (("student", {"a": 0}), ("teacher", {key: ids[key] for key in ids if key != "b"})):
        make_model(tmp_path / name, {})
        added = [{"content": "b", "id": 1 if name == "student" else ids["b"]}]
        written = {"model": {"vocab": vocabulary}, "added_tokens": added}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(written))
    result = submit("model.path=./student", *words)
    assert (result.exit_code == EXIT_CONFIG) == is_refused, result.stderr
    says = "2 tokens have other ids than in model.path = ./student, such as 'b' (2, not 1)"
    assert (says in result.stderr) == is_refused
    assert len(queue.requests) == (not is_refused)


def test_a_teacher_that_is_nowhere_is_refused(queue: FakeQueue) -> None:
    refused = submit("model.path=org/m", "task=distill", "task.args.teacher=./large")
    assert refused.exit_code == EXIT_CONFIG
    assert "task.args.teacher = ./large: there is no " in refused.stderr


QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


def test_submit_refuses_heads_that_the_degree_does_not_divide(queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(QWEN_7B))
    words = ["model.path=./qwen", "placement.learners_per_node=8"]
    refused = submit(*words, "train.sequence_parallel=8")
    assert refused.exit_code == EXIT_CONFIG
    assert "train.sequence_parallel = 8 must divide the heads of model.path = ./qwen" in refused.stderr
    assert "num_attention_heads = 28, num_key_value_heads = 4. Set it to 1, 2, 4." in refused.stderr
    assert queue.requests == []
    assert "train.sequence_parallel" not in submit(*words, "train.sequence_parallel=4").stderr


def test_a_model_whose_context_is_too_short_is_refused_before_it_queues(queue: FakeQueue, tmp_path: Path) -> None:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(QWEN_7B | {"max_position_embeddings": 256}))
    words = ["model.path=./qwen", "data.max_prompt_tokens=512", "rollout.max_new_tokens=128"]
    says = "= 512 + 128 = 640 exceeds the context of model.path = ./qwen: 256 tokens."
    refused, planned = submit(*words), call("plan", "local/debug", *words)
    assert says in refused.stderr
    assert says in planned.stderr
    assert (refused.exit_code, planned.exit_code, queue.requests) == (EXIT_CONFIG, EXIT_CONFIG, [])


def test_submit_refuses_a_run_whose_checkpoints_have_no_room(
    queue: FakeQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "qwen", QWEN_7B)
    words = ["local/debug", "model.path=./qwen", "data.train.path=org/rows", "eval.every=null"]
    monkeypatch.setattr(plan_disk, "room_in", lambda _: Room(50 * GIB, "left of the user quota"))
    result = call("submit", *words)
    assert result.exit_code == EXIT_CONFIG
    assert "checkpoint.keep_last" in result.stderr
    assert "50 GiB are left of the user quota" in result.stderr
    assert "submit would refuse this" in call("submit", *words, "--dry-run").output
    assert queue.requests == []
    monkeypatch.setattr(plan_disk, "room_in", lambda _: Room(900 * GIB, "free"))
    assert call("submit", *words).exit_code == 0


def test_a_longrope_model_with_sequences_beyond_its_first_range_is_refused_before_it_queues(
    queue: FakeQueue, tmp_path: Path
) -> None:
    (tmp_path / "phi").mkdir()
    rope = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 600}
    (tmp_path / "phi" / "config.json").write_text(json.dumps(QWEN_7B | {"max_position_embeddings": 9000} | rope))
    words = ["model.path=./phi", "data.max_prompt_tokens=512", "rollout.max_new_tokens=128"]
    refused = submit(*words)
    assert "has other rotary frequencies (longrope) in sequences of more than 600 tokens" in refused.stderr
    assert (refused.exit_code, queue.requests) == (EXIT_CONFIG, [])
    assert "(longrope)" not in submit(*words, "rollout.max_new_tokens=64").stderr
