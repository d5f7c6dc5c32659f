"""`hpc-grpo model eval` and `hpc-grpo model sample` up to the attempt that they start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_grpo.config import Config, load_config
from hpc_grpo.errors import EXIT_CONFIG
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.run.evals import ANSWER, RESULT, completions_file, read_request
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.paths import RunDir
from tests.support.command import call


class Started:
    """The attempts that were started, as their driver would find them."""

    def __init__(self) -> None:
        self.folders: list[RunDir] = []
        self.prompts: list[str] = []
        self.exit_code = 0
        self.config: Config

    def run_attempt(self, folder: RunDir, driver: str, *, comes_back: bool) -> int:
        assert (driver, comes_back) == ("hpc_grpo.driver.evaluation", True)
        self.folders.append(folder)
        self.config, self.request = read_config(folder), read_request(folder)
        if self.request.prompts:
            self.prompts = [line["prompt"] for line in read_jsonl(folder.path / "prompts.jsonl")]
        (folder.path / RESULT).write_text('{"models": {}}')
        (folder.path / ANSWER).write_text("56\n")
        print(f"Attempt 1 of run {folder.path.name}")
        return self.exit_code


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    started = Started()
    monkeypatch.setattr("hpc_grpo.cli.evaluate.run_attempt", started.run_attempt)
    monkeypatch.chdir(tmp_path)
    return started


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run with exports of two steps, which was started in a folder of its own."""
    words = [f"run.root={tmp_path}", "run.name=r", "model.path=org/m", "data.train.path=org/rows"]
    words += ["data.eval={path: held_out.jsonl}", "eval.num_samples=4"]
    run = freeze(load_config("local/debug", words), [], [])
    for step in (4, 12):
        run.export(step).mkdir(parents=True)
    return run


@pytest.mark.parametrize("words", [("--play", "2"), ("hi", "--source", "foo"), ("hi", "--set", "lr=2")])
def test_a_refused_command_leaves_no_folder_and_none_of_the_users_is_removed(
    words: tuple[str, ...], run: RunDir, started: Started, tmp_path: Path
) -> None:
    assert call("model", "sample", str(run.path), *words).exit_code == EXIT_CONFIG
    assert not run.evals.exists()
    (tmp_path / "mine").mkdir()
    assert call("model", "sample", str(run.path), *words, "--root", "mine").exit_code == EXIT_CONFIG
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_runs_newest_export_is_evaluated_on_its_eval_set_in_a_folder_below_the_run(
    run: RunDir, started: Started, tmp_path: Path
) -> None:
    done = call("model", "eval", str(run.path), "--num", "2", "rollout.max_new_tokens=99", "--out", "out.json")
    assert done.exit_code == 0, done.output
    assert started.request.models == {"step_12": str(run.export(12))}
    assert started.folders[0].path == run.evals / "1"
    config = started.config
    assert (config.eval.num_samples, config.rollout.max_new_tokens) == (2, 99)
    assert config.data.eval is not None
    assert (config.data.eval.path, config.model.path) == ("held_out.jsonl", str(run.export(12)))
    assert json.loads((tmp_path / "out.json").read_text()) == {"models": {}}


def test_base_and_steps_are_evaluated_side_by_side(run: RunDir, started: Started) -> None:
    assert call("model", "eval", str(run.path), "--base", "--step", "4", "--step", "12").exit_code == 0
    assert started.request.models == {
        "base": "org/m", "step_4": str(run.export(4)), "step_12": str(run.export(12))
    }  # fmt: skip
    assert call("model", "eval", str(run.path), "--base").exit_code == 0
    assert started.request.models == {"base": "org/m"}


def test_other_runs_and_models_are_evaluated_by_the_config_of_the_first(
    run: RunDir, started: Started, model: Path
) -> None:
    words = ["model", "rollout.max_new_tokens=99", str(run.path)]
    assert call("model", "eval", str(run.path), *words, "--step", "4").exit_code == 0
    assert started.request.models == {
        "step_4": str(run.export(4)), "model": str(model), "r/step_12": str(run.export(12))
    }  # fmt: skip
    assert started.config.rollout.max_new_tokens == 99


def test_data_named_by_the_user_are_found_from_where_the_user_is(run: RunDir, started: Started, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").touch()
    words = ["--data", "mine.jsonl", "--data", "reasoning_gym:gcd", "--max-items", "5"]
    assert call("model", "eval", str(run.path), *words, "data.eval.mix.1.args={size: 9}").exit_code == 0
    sources = [source for _, source in started.config.data.sources(for_eval=True)]
    assert [(source.path, source.max_items) for source in sources] == [
        (str(tmp_path / "mine.jsonl"), 5), ("reasoning_gym:gcd", 5)
    ]  # fmt: skip
    assert sources[1].args == {"size": 9}


def test_a_models_folder_is_evaluated_by_defaults_or_by_a_config(started: Started, tmp_path: Path, model: Path) -> None:
    assert call("model", "eval", "model", "--data", "reasoning_gym:gcd").exit_code == 0
    assert started.request.models == {"model": str(model)}
    assert started.folders[0].path == tmp_path / "runs" / "evals" / "1"
    (tmp_path / "rows.jsonl").touch()
    words = ["--config", "local/debug", "--data", "rows.jsonl", "--folder", str(tmp_path / "work")]
    assert call("model", "eval", "model", *words).exit_code == 0
    assert started.folders[1].path == tmp_path / "work" / "1"
    assert started.config.engine == load_config("local/debug").engine


def test_options_hold_for_eval_sets_with_values_of_their_own(run: RunDir, started: Started) -> None:
    sets = "data.eval_sets={contest: {path: c.jsonl, num_samples: 32, temperature: 1.0}}"
    words = [f"run.root={run.path.parent}", "run.name=s", "model.path=org/m", "data.train.path=d", sets]
    other = freeze(load_config("local/debug", [*words, "data.eval=null"]), [], [])
    other.export(1).mkdir(parents=True)
    assert call("model", "eval", str(other.path), "--num", "4", "--temperature", "0").exit_code == 0
    settings = started.config.eval_settings("contest")
    assert (settings.num_samples, settings.temperature) == (4, 0.0)


def test_a_sample_shows_completions_and_leaves_nothing_behind(run: RunDir, started: Started) -> None:
    done = call(
        "model", "sample", str(run.path), "What is 7 * 8?", "And 2 + 2?", "--num", "3", "--temperature", "0", "--base"
    )
    assert done.exit_code == 0, done.output
    assert (done.stdout, done.stderr) == ("56\n", "Attempt 1 of run 1\n")
    assert started.prompts == ["What is 7 * 8?", "And 2 + 2?"]
    assert (started.config.eval.num_samples, started.config.eval.temperature) == (3, 0.0)
    assert started.request.prompts == started.prompts
    assert not started.folders[0].path.exists()


def test_a_sample_plays_rows_of_the_data_in_the_runs_environment(run: RunDir, started: Started) -> None:
    words = [f"run.root={run.path.parent}", "run.name=p", "model.path=org/m", "data.train.path=org/rows"]
    words += ["environment={name: guess.py:Guess, max_turns: 3}", "rewards=[]"]
    other = freeze(load_config("local/debug", words), [], [])
    other.export(1).mkdir(parents=True)
    done = call("model", "sample", str(other.path), "--play", "2", "--num", "3")
    assert done.exit_code == 0, done.output
    ((_, source),) = started.config.data.sources(for_eval=True)
    assert (source.path, source.max_items, started.config.eval.num_samples) == ("org/rows", 2, 3)
    assert started.config.environment is not None
    assert (started.config.environment.max_turns, started.request.plays, started.request.prompts) == (3, True, [])


def test_an_attempt_that_failed_keeps_its_folder_and_ends_with_its_code(run: RunDir, started: Started) -> None:
    started.exit_code = EXIT_CONFIG
    done = call("model", "sample", str(run.path), "Hi")
    assert done.exit_code == EXIT_CONFIG
    assert started.folders[0].path.exists()
    assert done.stderr.endswith(f"and its logs: {started.folders[0].path}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model", "eval", "RUN", "--step", "5"], "--step = 5: run r has exports of these steps: 4, 12."),
        (["model", "eval", "RUN", "--config", "local/debug"], "--config is for a MODEL"),
        (["model", "eval", "nothing"], "RUN = 'nothing' must be a run directory"),
        (["model", "eval", "MODEL"], "A MODEL has no eval set: give a data set (--data PATH)"),
        (["model", "eval", "MODEL", "--base", "--data", "org/d"], "--step and --base are for a RUN"),
        (["model", "eval", "RUN", "--data", "d.jsonl"], "--data = d.jsonl: there is no /"),
        (["model", "eval", "RUN", "--data", "rows.csv"], "rows.csv: files must end in"),
        (["model", "eval", "RUN", "--data", "./rows.csv"], "rows.csv: files must end in"),
        (["model", "eval", "RUN", "nothing"], "RUN = 'nothing' must be a run directory"),
        (["model", "sample", "RUN"], "Give prompts to answer, --interactive for a conversation, or --play N"),
        (["model", "sample", "RUN", "Hi", "--interactive"], "Give prompts to answer, --interactive"),
        (["model", "sample", "RUN", "Hi", "--play", "2"], "or --play N for episodes: one of the three."),
        (["model", "sample", "RUN", "--play", "2"], "--play = 2: data.train has no environment. Give prompts instead."),
        (["model", "sample", "RUN", "--interactive", "--num", "2"], "--num does not work with --interactive"),
        (["model", "eval", "RUN", "--max-items", "9"], "--max-items = 9 needs --data"),
        (["model", "eval", "RUN", "--out", "nowhere/out.json"], "there is no folder"),
        (["model", "eval", "RUN", "run.name=mine"], "run.name cannot be changed for an eval: --root sets it"),
        (
            ["model", "eval", "RUN", "model.path=org/other"],
            "model.path cannot be changed for an eval: RUN|MODEL sets it",
        ),
        (
            ["model", "sample", "RUN", "Hi", "--source", "x"],
            "--source = 'x' must be the name of a source of data",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_one_error_before_anything_starts(
    run: RunDir, started: Started, tmp_path: Path, model: Path, words: list[str], said: str
) -> None:
    names = {"RUN": str(run.path), "MODEL": str(model)}
    (tmp_path / "rows.csv").touch()
    done = call(*(names.get(word, word) for word in words))
    assert (done.exit_code, done.stderr[:7], started.folders) == (EXIT_CONFIG, "error: ", [])
    assert said in done.stderr
    assert [path for parent in (run.evals, tmp_path / "runs") for path in parent.glob("*/*")] == []


def test_a_run_without_an_export_says_when_there_will_be_one(run: RunDir, started: Started) -> None:
    for step in (4, 12):
        run.export(step).rmdir()
    done = call("model", "eval", str(run.path))
    assert done.exit_code == EXIT_CONFIG
    assert "has no export yet" in done.stderr


def test_an_eval_prints_its_results_as_json(run: RunDir, started: Started) -> None:
    done = call("model", "eval", str(run.path), "--json")
    assert json.loads(done.stdout) == {"models": {}}, "the table is not printed"


def test_samples_are_printed_as_json_by_model(run: RunDir, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def answered(folder: RunDir, driver: str, *, comes_back: bool) -> int:
        code = started.run_attempt(folder, driver, comes_back=comes_back)
        for name in started.request.models:
            path = completions_file(folder, name)
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps({"ordinal": 0, "prompt": "7*8?", "completion": f"56 by {name}"}) + "\n")
        return code

    monkeypatch.setattr("hpc_grpo.cli.evaluate.run_attempt", answered)
    words = ["model", "sample", str(run.path), "7*8?", "--step", "4", "--step", "12", "--json"]
    assert [(line["model"], line["completion"]) for line in json.loads(call(*words).stdout)] == [
        ("step_4", "56 by step_4"),
        ("step_12", "56 by step_12"),
    ]
    assert "--json does not work" in call("model", "sample", str(run.path), "--interactive", "--json").stderr
