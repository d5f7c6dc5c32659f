from __future__ import annotations

import base64
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError, EndAskedError
from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import (
    COLUMNS,
    NAMES,
    ConsoleSink,
    JsonlSink,
    RenamingSink,
    TensorBoardSink,
    WandbSink,
    make_sinks,
    shared_config,
    wandb_mode,
    wandb_run_id,
)
from hpc_grpo.run.files import space_awaited_while
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics
from tests.support.configs import minimal_config
from tests.support.stand_in_server import Reply, Serve

KEY = "0123456789" * 4


def metrics_of(config: Config, **changes: object) -> Config:
    return config.model_copy(update={"metrics": config.metrics.model_copy(update=changes)})


@pytest.fixture(autouse=True)
def no_wandb_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_without_a_key_wandb_is_off_and_the_variable_named(
    config: Config, run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = make_sinks(config, run_dir)
    assert [type(sink) for sink in sinks] == [JsonlSink, ConsoleSink]
    (line,) = capsys.readouterr().out.splitlines()
    assert "W&B is off: WANDB_API_KEY is not set" in line


@pytest.mark.parametrize(
    ("host", "environ", "expected"),
    [
        ("api.wandb.ai", {}, "online"),
        ("api.wandb.ai", {"WANDB_BASE_URL": "https://wandb.example:8080"}, None),
        ("wandb.example:8080", {"WANDB_BASE_URL": "https://wandb.example:8080"}, "online"),
        ("github.com", {}, None),
        ("api.wandb.ai", {"WANDB_MODE": "disabled"}, None),
    ],
)
def test_a_login_that_wandb_has_kept_switches_it_on(
    config: Config, tmp_path: Path, host: str, environ: dict[str, str], expected: str | None
) -> None:
    (tmp_path / ".netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    (tmp_path / ".netrc").chmod(0o600)
    environ = {"HOME": str(tmp_path), **environ}
    assert wandb_mode(metrics_of(config, wandb={"mode": "auto"}).metrics, environ) == expected


@pytest.mark.parametrize(("names", "theirs"), [("areal", "ppo_actor/task_reward/avg"), ("areal-0.3", "task_reward")])
def test_other_sinks_and_the_log_get_areals_names_and_the_file_keeps_ours(
    config: Config, run_dir: RunDir, names: str, theirs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    jsonl, others, _console = make_sinks(metrics_of(config, names=names, wandb={"mode": "disabled"}), run_dir)
    record = StepRecord(3, 9, {"reward/mean": 0.25, "lag/mean": 1.0})
    for sink in (jsonl, others):
        sink.write(record)
        sink.close()
    assert capsys.readouterr().out == f"Step 3: {theirs} 0.25\n"
    assert read_metrics(run_dir.metrics)[3]["reward/mean"] == 0.25
    inner = MagicMock()
    RenamingSink([inner], NAMES[names]).write(record)
    assert inner.write.call_args.args[0].metrics == {theirs: 0.25, "lag/mean": 1.0}


@pytest.mark.parametrize(
    ("configured", "environ", "expected"),
    [
        ("auto", {}, None),
        ("auto", {"WANDB_API_KEY": KEY}, "online"),
        ("auto", {"WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, None),
        ("offline", {}, "offline"),
        ("disabled", {"WANDB_API_KEY": KEY}, None),
    ],
)
def test_config_and_environment_decide_the_wandb_mode(
    config: Config, configured: str, environ: dict[str, str], expected: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wandb_mode(metrics_of(config, wandb={"mode": configured}).metrics, environ) == expected
    assert KEY not in "".join(capsys.readouterr())


def test_wandb_offline_really_writes_and_a_resume_keeps_the_id(
    config: Config,
    run_dir: RunDir,
    record: StepRecord,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        sinks = make_sinks(config, run_dir)
        assert isinstance(sinks[1], WandbSink)
        for sink in sinks:
            sink.write(record)
        for sink in sinks:
            sink.close()
        ended_at = int(time.time())
        while int(time.time()) == ended_at:  # W&B names its folder after the second
            time.sleep(0.01)
    run_id = run_dir.wandb_id.read_text().strip()
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("W&B")]
    assert told == [f"W&B run {run_id}: offline, below {run_dir.path / 'wandb'}"] * 2, "once an attempt"
    logs = sorted((run_dir.path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(logs) == 2
    assert {log.name for log in logs} == {f"run-{run_id}.wandb"}
    assert all(b"reward/mean" in log.read_bytes() for log in logs)


def test_a_login_logs_to_a_server_in_wandbs_protocol(
    config: Config,
    run_dir: RunDir,
    record: StepRecord,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    serve: Serve,
) -> None:
    """W&B's own client and its background service, a server of ours; `wandb login` left the key in ~/.netrc."""
    import wandb

    project = {"name": "hpc-grpo", "entity": {"id": "e", "name": "team"}}
    lines: list[dict[str, Any]] = []

    def answer(path: str, body: Any) -> Reply:
        if path.endswith("/file_stream"):
            history = body.get("files", {}).get("wandb-history.jsonl", {"content": []})["content"]
            lines.extend(map(json.loads, history))
        operation = body.get("operationName") if path == "/graphql" else None
        bucket = {"id": "b", "name": run_dir.wandb_id.read_text().strip(), "config": "{}", "project": project}
        answers = {
            "UpsertBucket": {"upsertBucket": {"bucket": bucket, "inserted": True}},
            "CreateRunFiles": {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}},
        }
        return 200, {"data": answers.get(operation, {})}

    server = serve(answer)
    (tmp_path / ".netrc").write_text(f"machine {urlsplit(server.url).netloc}\n  login user\n  password {KEY}\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    wandb.teardown()  # W&B reads the environment once in a process
    sink = WandbSink(config, run_dir, cast(Any, wandb_mode(config.metrics)))
    sink.write(record)
    sink.close()
    wandb.teardown()
    keys = {key for path, _, key in server.requests if path == "/graphql"}
    assert [(line["step"], line["reward/mean"]) for line in lines] == [(6, 0.53125)]
    assert keys == {"Basic " + base64.b64encode(f"api:{KEY}".encode()).decode()}


def test_failing_wandb_is_said_once_and_training_goes_on(
    config: Config,
    run_dir: RunDir,
    record: StepRecord,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import wandb

    def refuse(**arguments: object) -> None:
        raise wandb.errors.CommError("no such host")

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    sinks = [JsonlSink(run_dir.metrics), WandbSink(config, run_dir, "online", refuse)]
    for _ in range(3):
        for sink in sinks:
            sink.write(record)
    for sink in sinks:
        sink.close()
    told = "".join(capsys.readouterr())
    (warning,) = [line for line in told.splitlines() if "W&B failed" in line]
    assert "no such host" in warning
    assert KEY not in told
    assert list(read_metrics(run_dir.metrics)) == [6]


def test_the_address_of_an_online_run_is_told(
    config: Config, run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    online = MagicMock(id="ab12cd34", url="https://wandb.example/team/hpc-grpo/runs/ab12cd34")
    WandbSink(config, run_dir, "online", lambda **_: online)
    assert capsys.readouterr().out == f"W&B run ab12cd34: {online.url}\n"


def test_a_mistake_of_ours_is_not_taken_for_a_failure_of_wandb(config: Config, run_dir: RunDir) -> None:
    def broken(**arguments: object) -> None:
        raise TypeError("unexpected argument")

    with pytest.raises(TypeError, match="unexpected argument"):
        WandbSink(config, run_dir, "offline", broken)


def test_wandb_gets_the_arguments_of_the_config_and_an_unknown_one_is_a_config_error(
    config: Config, run_dir: RunDir
) -> None:
    start = MagicMock()
    WandbSink(metrics_of(config, wandb={"group": "seeds", "mode": "auto"}), run_dir, "offline", start)
    given = start.call_args.kwargs
    assert (given["group"], given["mode"], given["project"]) == ("seeds", "offline", "hpc-grpo")
    with pytest.raises(ConfigError, match=r"metrics\.wandb\.grop: unknown key; did you mean 'group'"):
        WandbSink(metrics_of(config, wandb={"grop": "seeds"}), run_dir, "offline", start)


def test_wandb_id_survives_in_the_run_directory(run_dir: RunDir) -> None:
    first = wandb_run_id(run_dir)
    assert len(first) == 8
    assert wandb_run_id(RunDir(Path(run_dir.path))) == first


def test_tensorboard_events_can_be_read_back(config: Config, run_dir: RunDir, record: StepRecord) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = make_sinks(metrics_of(config, tensorboard=True), run_dir)
    [sink] = [sink for sink in sinks if isinstance(sink, TensorBoardSink)]
    sink.write(record)
    sink.close()
    events = EventAccumulator(str(run_dir.tensorboard))
    events.Reload()
    [point] = events.Scalars("reward/mean")
    assert (point.step, point.value, point.wall_time) == (6, 0.53125, 1000.0)


def rollout(number: int, **changes: Any) -> dict[str, Any]:
    return {"prompt": f"{number}+1?", "answer": str(number + 1), "completion": "2", "reward": 1.0, **changes}


HOSTILE = (
    "<script>alert(1)</script> ![pixel](http://evil.test/x.png) [link](javascript:x) | **bold**\n\n"
    "    code\n</td></table>\x1b[2J\u202e\ud800 &amp; <img src=http://evil.test/y.png>"
)
SECRET = "hf_abcdefghijklmnopqrstuvwxyz012345"
WITH_ROLLOUTS = StepRecord(
    3,
    9,
    {"reward/mean": 0.5},
    rollouts=[
        rollout(1, completion=HOSTILE, answer=None),
        rollout(2, prompt=f"my token is {SECRET}", answer=["3", 3.0]),
        rollout(3, turns=[{"text": "5", "reward": 0.0}, {"observation": "No.", "text": "7", "reward": 1.0}]),
        rollout(4),
    ],
)


def test_tensorboard_shows_completions_as_a_table_whose_texts_stay_text(config: Config, run_dir: RunDir) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    sinks = make_sinks(metrics_of(config, tensorboard=True, completions=3), run_dir)
    [sink] = [sink for sink in sinks if isinstance(sink, TensorBoardSink)]
    sink.write(WITH_ROLLOUTS)
    sink.close()
    events = EventAccumulator(str(run_dir.tensorboard))
    events.Reload()
    [event] = events.Tensors("completions/text_summary")
    page = markdown_to_safe_html(event.tensor_proto.string_val[0].decode())
    rows = ElementTree.fromstring(page.replace("<br>", "\n"))
    shown = [["".join(cell.itertext()) for cell in row] for row in rows.iter("tr")]
    assert {element.tag for element in rows.iter()} == {"table", "tbody", "tr", "td"}
    assert (event.step, len(shown)) == (3, 4)
    assert shown[0] == list(COLUMNS)
    assert shown[1][3] == HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e").replace("\ud800", "\\ud800")
    assert shown[2][1:3] == ["my token is ********", '["3", 3.0]']
    assert shown[3][3] == "[turn 1, reward 0] 5\n[environment] No.\n[turn 2, reward 1] 7"


def test_wandb_offline_keeps_a_table_of_completions(
    config: Config, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    _, sink, _ = make_sinks(metrics_of(config, completions=3), run_dir)
    sink.write(WITH_ROLLOUTS)
    sink.write(StepRecord(4, 9, {"reward/mean": 0.5}))
    sink.close()
    [file] = (run_dir.path / "wandb").glob("offline-run-*/files/media/table/completions_*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == list(COLUMNS)
    assert [row[0] for row in table["data"]] == [3, 3, 3]
    assert "<script>alert(1)</script> ![pixel](http://evil.test/x.png)" in table["data"][0][3]
    assert table["data"][1] == [3, "my token is ********", '["3", 3.0]', "2", 1.0]
    assert SECRET not in "".join(path.read_text("latin-1") for path in run_dir.path.rglob("*") if path.is_file())


@pytest.mark.parametrize("changes", [{}, {"completions": 0}])
def test_no_text_of_a_rollout_leaves_the_run_directory_unasked(
    config: Config, run_dir: RunDir, changes: dict[str, int]
) -> None:
    start = MagicMock()
    WandbSink(metrics_of(config, **changes), run_dir, "offline", start).write(WITH_ROLLOUTS)
    [call] = start.return_value.log.call_args_list
    assert call.args[0] == {"reward/mean": 0.5, "step": 3, "epoch": 1, "attempt": 1}


def test_wandb_gets_nothing_of_launch_but_the_number_of_nodes() -> None:
    private = {"env": {"SITE": "of-the-site"}, "setup_lines": ["source of-the-site"], "notify": ["of-the-site"]}
    shown = shared_config(minimal_config(launch={**private, "num_nodes": 2}))
    assert shown["launch"] == {"num_nodes": 2}
    assert shown["train"]["lr"] > 0
    assert "of-the-site" not in str(shown)


def test_a_full_disk_does_not_hide_why_the_wait_for_it_ended(run_dir: RunDir, record: StepRecord) -> None:
    def refuse() -> None:
        raise EndAskedError("the disk is full", step=5)

    run_dir.metrics.symlink_to("/dev/full")
    with pytest.raises(EndAskedError), space_awaited_while(refuse), closing(JsonlSink(run_dir.metrics)) as sink:
        sink.write(record)
