"""What the page is told of runs, and that nobody's text gets out of its place there."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import to_yaml
from hpc_grpo.report import page
from hpc_grpo.report.page import write_page
from hpc_grpo.report.samples import held_out
from hpc_grpo.run.files import write_atomic
from tests.support.command import call
from tests.support.run_builder import RunBuilder
from tests.support.run_pages import CONFIG, DOT, EPISODE, HOSTILE, finished_run, rollout, write_lines, write_steps

VENDORED = {
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of files of uPlot 1.6.32, as npm has them."""


def blocks(path: Path) -> dict[str, Any]:
    """The JSON of the page by the ids of its elements."""
    found = re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script>', path.read_text(), re.DOTALL)
    return {name: json.loads(text) for name, text in found}


def told(*built: RunBuilder) -> list[Any]:
    return list(blocks(write_page([one.run for one in built], built[0].run.path / "page.html"))["data"]["runs"])


def test_a_resumed_run_has_each_step_once_and_what_became_of_each_attempt(tmp_path: Path) -> None:
    (run,) = told(finished_run(tmp_path / "adder"))
    assert run["steps"] == list(range(21))
    assert [run["metrics"]["reward/mean"][0][step] for step in (10, 11)] == [0.101, 0.112]
    ends = {"begin": 0, "end": 20, "from": 0.2, "to": pytest.approx(0.4), "low": 0.1, "high": 0.9}
    assert run["headline"] == {"measure": "pass@1", "metric": "eval/pass@1", **ends}
    first, second = run["attempts"]
    assert (first["kind"], first["advice"][0], first["num_steps"]) == ("crash", "out of GPU memory", 10)
    assert first["parts"] == [["bringing up Ray", 5], ["train", 30.0], ["other", 65.0]]
    assert (second["kind"], second["parts"]) == ("complete", [["train", 30.0], ["other", 70.0]])
    assert run["wandb"] == "https://wandb.ai/lab/hpc-grpo/runs/0123abcd"
    assert dict(run["facts"])["code"] == "hpc-grpo 0.1.0, commit 0123456, changed since"
    assert run["evals"][0]["points"] == [[step, pytest.approx(0.2 + step / 100), 0.1, 0.9] for step in (0, 10, 20)]


def test_rollouts_and_evals_of_steps_that_a_resume_has_undone_are_not_shown(tmp_path: Path) -> None:
    built = finished_run(tmp_path / "adder")
    write_lines(built.run.rollouts(21), rollout(0))
    write_lines(built.run.eval_rollouts(30), rollout(0, solved=False))
    (run,) = told(built)
    assert run["rollout_steps"] == [12, 20]
    assert [of_set["steps"] for of_set in run["held_out"]] == [[0, 10, 20]]


def test_prompts_are_followed_through_time_and_rollouts_grouped_by_prompt(tmp_path: Path) -> None:
    path = write_page([finished_run(tmp_path / "adder").run], tmp_path / "page.html")
    found = blocks(path)
    (of_set,) = found["data"]["runs"][0]["held_out"]
    assert of_set["steps"] == [0, 10, 20]
    assert [[own["right"] for (own,) in prompt["evals"]] for prompt in of_set["prompts"]] == [
        *[[False, True, True]] * 2,
        *[[False, False, True]] * 2,
        *[[False, False, False]] * 2,
    ]
    third, fourth = found["rollouts-0-12"]
    assert (third["asked"], third["answer"]) == ("What is 3+1?", "2")
    assert [answer["right"] for answer in third["answers"]] == [True, False]
    assert (fourth["ordinal"], third["images"], fourth["images"]) == (4, [], [DOT])
    ((episode, _),) = (group["answers"] for group in found["rollouts-0-20"])
    assert episode["text"] == EPISODE
    assert episode["turns"] == [
        {"observation": "", "text": "[8]", "reward": 0.0},
        {"observation": "Lower.", "text": "[6]", "reward": 1.0},
    ]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("<|im_start|>{}\n", "<|im_end|>\n"),
        ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<start_of_turn>{}\n", "<end_of_turn>\n"),
    ],
)
def test_the_users_last_message_is_found_in_each_template(tmp_path: Path, start: str, end: str) -> None:
    built = RunBuilder(tmp_path / "adder")
    said = (("user", "Go."), ("model", "Wall."), ("user", "Back."))
    write_steps(built.run, range(2))
    prompt = "".join(f"{start.format(who)}{text}{end}" for who, text in said) + start.format("model")
    write_lines(built.run.rollouts(1), rollout(prompt=prompt))
    write_page([built.run], tmp_path / "page.html")
    (group,) = blocks(tmp_path / "page.html")["rollouts-0-1"]
    assert group["asked"] == "Back."


@pytest.mark.parametrize(
    ("judged_by", "right"), [({}, False), ({"reward": "format"}, True), ({"reward": "format", "solved_at": 3}, False)]
)
def test_the_reward_that_decides_evals_says_what_is_right(
    tmp_path: Path, judged_by: dict[str, Any], right: bool
) -> None:
    built = RunBuilder(tmp_path / "adder")
    write_atomic(built.run.config, json.dumps({"eval": judged_by}))
    write_steps(built.run, range(2))
    write_lines(built.run.rollouts(1), rollout(rewards={"length": 0.5, "format#2": 2}))
    write_page([built.run], tmp_path / "page.html")
    assert blocks(tmp_path / "page.html")["rollouts-0-1"][0]["answers"][0]["right"] is right


def test_an_empty_run_and_one_that_failed_before_a_step_have_a_page(tmp_path: Path) -> None:
    empty, failed = RunBuilder(tmp_path / "empty"), RunBuilder(tmp_path / "failed")
    failed.attempt(1, "config", why="model.path: there is no such folder", exit_code=78)
    new, lost = told(empty, failed)
    assert (new["state"], new["headline"], new["steps"], new["attempts"]) == ("new", None, [], [])
    assert (lost["state"], lost["problem"]) == ("failed", "model.path: there is no such folder")
    assert lost["attempts"][0]["advice"][1].startswith("A retry gives the same")


def test_a_run_that_trains_says_what_needs_a_look(tmp_path: Path) -> None:
    built = RunBuilder(tmp_path / "adder")
    built.attempt(1)
    built.hold(1, beat_age_s=40)
    slow = "node n2 takes 1.5 times as long as the others do"
    built.state(1, slow_node=slow, heartbeat=time.time() - 40)
    write_steps(built.run, range(3), **{"tokens/truncated_fraction": 0.75})
    (run,) = told(built)
    assert (run["state"], run["attempts"][0]["kind"]) == ("training", "running")
    silent, slowest, cut = run["alerts"]
    assert silent.startswith("no sign of life for 4")
    assert slowest == slow
    assert cut.startswith("half of the completions")


def test_hostile_texts_stay_in_json_and_nothing_but_the_pages_own_scripts_may_run(tmp_path: Path) -> None:
    built = RunBuilder(tmp_path / "<img src=y onerror=alert(2)>")
    built.attempt(1, "crash", why=HOSTILE, lost_nodes={"n2": HOSTILE})
    write_steps(built.run, range(2), **{f"reward/{HOSTILE.replace('/', '')}": 1.0})
    write_lines(built.run.rollouts(1), rollout(completion=HOSTILE, prompt=HOSTILE, answer=HOSTILE, source=HOSTILE))
    html = write_page([built.run], tmp_path / "page.html").read_text()
    assert "<img" not in html
    assert not {"\x1b", "\u202e"} & set(html)
    spelled = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert blocks(tmp_path / "page.html")["rollouts-0-1"][0]["answers"][0]["text"] == spelled
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    parts = {name: own for name, *own in (part.split() for part in policy.split(";"))}
    assert (parts["default-src"], parts["connect-src"]) == (["'none'"], ["'none'"])
    for tag in ("script", "style"):
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert parts[f"{tag}-src"] == [f"'sha256-{own}'" for own in hashes]


def test_numbers_that_no_float_holds_are_left_out(tmp_path: Path) -> None:
    built = RunBuilder(tmp_path / "adder")
    write_steps(built.run, range(2))
    write_lines(built.run.rollouts(1), rollout(reward=10**400, rewards={"math": -(10**400)}, advantage=float("inf")))
    write_page([built.run], tmp_path / "page.html")
    (answer,) = blocks(tmp_path / "page.html")["rollouts-0-1"][0]["answers"]
    assert (answer["reward"], answer["parts"], answer["advantage"]) == (None, {"math": None}, None)


def test_of_many_rollouts_those_of_evenly_spread_steps_are_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = RunBuilder(tmp_path / "adder")
    write_steps(built.run, range(102))
    for step in range(1, 102):
        write_lines(built.run.rollouts(step), *(rollout(n, completion="x" * 10_000) for n in range(3)))
    monkeypatch.setattr(page, "MOST_ROLLOUT_BYTES", 160_000)
    (run,) = told(built)
    found = blocks(built.run.path / "page.html")
    assert (run["rollout_steps"], run["num_rollout_steps"]) == ([1, 26, 51, 76, 101], 101)
    assert all(len(found[f"rollouts-0-{step}"]) == 3 for step in run["rollout_steps"])
    assert "x [… 4,000 characters more …] x" in found["rollouts-0-1"][0]["answers"][0]["text"]


def test_runs_whose_folders_have_the_same_name_are_told_apart_and_their_configs_compared(tmp_path: Path) -> None:
    runs = told(*(finished_run(tmp_path / place, lr) for place, lr in (("a/adder", "1.0e-6"), ("b/adder", "2.0e-6"))))
    assert [(run["name"], run["config"]["train.lr"]) for run in runs] == [("a/adder", "1e-06"), ("b/adder", "2e-06")]
    assert runs[0]["config"]["rewards.0.name"] == "math"


@pytest.mark.parametrize("out", [None, "both.html"])
def test_the_command_writes_a_page_that_is_the_users_alone(tmp_path: Path, out: str | None) -> None:
    built = finished_run(tmp_path / "adder")
    words = ["--out", str(tmp_path / out)] if out else []
    result = call("report", str(built.run.path), str(built.run.path), *words)
    path = tmp_path / out if out else built.run.path / "report.html"
    assert result.output.endswith(f"Page: {path}\n")
    assert len(blocks(path)["data"]["runs"]) == 1
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", VENDORED)
def test_the_library_for_charts_is_as_npm_has_it(name: str) -> None:
    content = (Path(page.__file__).parent / "vendor" / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == VENDORED[name]


def test_a_null_of_the_config_is_no_default(tmp_path: Path) -> None:
    (run,) = told(finished_run(tmp_path / "adder"))
    assert (run["config"]["eval.reward"], run["config"].get("eval.every")) == ("null", None)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_an_observation_is_shown_without_the_words_of_a_template_that_is_known(tmp_path: Path, role: str) -> None:
    built = finished_run(tmp_path / "adder")
    turns = [{"observation": "", "text": "[8]"}, {"observation": f"{role}\nLower.\nassistant", "text": "[6]"}]
    made_up = f"[8]<|im_start|>{role}\nHigher.<|im_end|> USER: Lower. BOT: [6]"  # by the model
    texts = (EPISODE.replace("user", role), "[8] USER: Lower. BOT: [6]", made_up)
    write_lines(built.run.rollouts(20), *(rollout(turns=turns, completion=text) for text in texts))
    told(built)
    ((known, *others),) = (group["answers"] for group in blocks(built.run.path / "page.html")["rollouts-0-20"])
    assert [turn["observation"] for turn in known["turns"]] == ["", "Lower."]
    for other in others:
        assert [turn["observation"] for turn in other["turns"]] == ["", f"{role}\nLower.\nassistant"]


def test_files_of_many_steps_are_not_looked_at_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = finished_run(tmp_path / "adder")
    write_lines(built.run.eval_rollouts(20, "hard"), rollout())
    for step in range(13, 20):
        write_lines(built.run.rollouts(step), rollout())
    looked: list[Path] = []
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: bool(looked.append(path)) or is_dir(path))
    assert [own["set"] for own in held_out(built.run, range(21))] == ["", "hard"]
    assert [path for path in looked if path.suffix] == []


def test_a_damaged_config_hides_no_run(tmp_path: Path) -> None:
    built = finished_run(tmp_path / "adder")
    write_atomic(built.run.config, CONFIG[:40] + ": [")
    assert told(built)[0]["config"] == {}


def test_a_text_of_the_config_that_looks_like_a_time_stays_text(tmp_path: Path) -> None:
    built = finished_run(tmp_path / "adder")
    write_atomic(built.run.config, to_yaml({"data": {"system_prompt": "24:00:00"}}))
    assert told(built)[0]["config"] == {"data.system_prompt": "24:00:00"}


@pytest.mark.parametrize("value", ["2026-30-11", "!!int x", "[" * 2000])
def test_a_value_of_the_config_that_python_cannot_make_hides_no_run(tmp_path: Path, value: str) -> None:
    built = finished_run(tmp_path / "adder")
    write_atomic(built.run.config, f"run: {{name: {value}}}\n")
    assert told(built)[0]["config"] == {}


def test_a_page_without_a_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("report", str(finished_run(tmp_path / "adder").run.path), "--out", "")
    assert (result.exit_code, "cannot be written (" in result.stderr) == (78, True)


def test_a_page_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "adder").run
    (tmp_path / "file").touch()
    result = call("report", str(run.path), "--out", str(tmp_path / "file" / "a.html"))
    assert (result.exit_code, result.stderr[:7]) == (78, "error: ")
    assert f"{tmp_path}/file/a.html cannot be written (" in result.stderr
