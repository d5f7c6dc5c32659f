from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.cli.request import load_request, read_shell_config
from hpc_grpo.config import load_resolved
from hpc_grpo.errors import ConfigError
from tests.support.command import call
from tests.support.places import FakeQueue


def script(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.learning_rate=1e-6", "learning_rate is TRL's: here set train.lr."),
        ("train.num_train_epochs=2", "num_train_epochs is TRL's: here set train.total_epochs."),
        ("loss.epsilon=0.3", "epsilon is TRL's: here set loss.clip_low, loss.clip_high."),
        ("loss.epsilon=0.2", "epsilon is TRL's: here set loss.clip_low, loss.clip_high."),
        (
            "logging_steps=1",
            "logging_steps is TRL's: leave it out (part of the hub and of logging; the same command resumes a run).",
        ),
        ("use_vllm=true", "use_vllm is TRL's: leave it out (vLLM samples always)."),
        ("train.use_vllm=false", "use_vllm is TRL's: leave it out (vLLM samples always)."),
        ("critic={optim: {lr: 1e-5}}", "critic.optim.lr is verl's: here set task=ppo task.args.critic_lr=VALUE."),
        (
            "critic={ppo_epochs: 2}",
            "critic is verl's: here set task=ppo, which has a critic. Its keys are in task.args.",
        ),
        ("algorithm={lam: 0.9}", "algorithm.lam is verl's: here set task=ppo task.args.gae_lambda=VALUE."),
        ("model.torch_dtype=bfloat16", "torch_dtype is TRL's: here set model.dtype."),
        ("top_k=50", "top_k is TRL's: leave it out (top-k sampling is not supported: use top_p)."),
        ("train.warmup_ratio=0.1", "warmup_ratio is TRL's: here set train.warmup_steps."),
        ("trainer={total_epochs: 2}", "trainer.total_epochs is verl's: here set train.total_epochs."),
        ("actor_rollout_ref={rollout: {n: 4}}", "actor_rollout_ref.rollout.n is verl's: here set rollout.group_size."),
        ("rollout.n=4", "actor_rollout_ref.rollout.n is verl's: here set rollout.group_size."),
        ("model.max_response_length=9", "data.max_response_length is verl's: here set rollout.max_new_tokens."),
    ],
)
def test_a_key_of_another_system_is_an_error_with_the_key_here(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_request("local/debug", [override])
    assert str(caught.value).splitlines()[1:] == [f"  {override.partition('=')[0]}: unknown key. {line}"]


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("lr", "train.lr"),
        ("train.group_size", "rollout.group_size"),
        ("reward", "rewards"),
        ("lora.modules", "lora.targets"),
        ("lora.target_modules", "lora.targets"),
        ("lora.r", "lora.rank"),
        ("lora_r", "lora.rank"),
        ("model.lora_alpha", "lora.alpha"),
        ("train.lora_dropout", "lora.dropout"),
        ("num_epochs", "train.total_epochs"),
        ("data.path", "data.train.path"),
        ("launch.gpus", "launch.slurm.gpus_per_node"),
        ("model.name", "path"),
        ("eval.path", "data.eval.path"),
        ("train.path", "data.train.path"),
        ("data.eval_path", "data.eval.path"),
    ],
)
def test_a_key_in_the_wrong_section_is_an_error_with_its_place(key: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_request("local/debug", [f"{key}=4"])
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(f"  {key}: unknown key; did you mean {place!r}?")


@pytest.mark.parametrize("override", ["data.test.path=x", "data.train.weight=2"])
def test_no_key_is_suggested_that_belongs_elsewhere_or_cannot_be_set(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_request("local/debug", [override])
    (line,) = str(caught.value).splitlines()[1:]
    assert ": unknown key. Valid here: " in line


def test_a_misspelt_key_of_no_system_is_an_error_of_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_request("local/debug", ["train.lrr={a: 1}"])
    assert len(str(caught.value).splitlines()) == 2


def test_a_script_with_the_line_ends_of_windows_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.sh has Windows line ends\. Remove them: sed -i "):
        read_shell_config(script(tmp_path, "TRAINING_ARGS=(local/debug)\r\n"))
    assert read_shell_config(script(tmp_path, "# mine\r\nTRAINING_ARGS=(local/debug)\n")).config_name == "local/debug"


def test_an_array_keeps_words_with_spaces(tmp_path: Path) -> None:
    path = script(tmp_path, 'TRAINING_ARGS=(local/debug --set "data.system_prompt=be brief" train.lr=1e-6)\n')
    shell = read_shell_config(path)
    assert shell.config_name == "local/debug"
    assert shell.overrides == ["data.system_prompt=be brief", "train.lr=1e-6"]


def test_a_string_is_split_as_a_shell_would(tmp_path: Path) -> None:
    path = script(tmp_path, "export TRAINING_ARGS=\"local/debug --set=train.lr=1e-6 'run.name=a b'\"\n")
    assert read_shell_config(path).overrides == ["train.lr=1e-6", "run.name=a b"]


def test_settings_become_keys_and_explicit_overrides_win(tmp_path: Path) -> None:
    path = script(tmp_path, "TRAINING_ARGS=(local/debug)\nMAX_JOB_CHAINS=5\nNUM_NODES=4\n")
    request = load_request(str(path), ["launch.num_nodes=2"])
    assert request.config.launch.slurm.max_job_chains == 5
    assert request.config.launch.num_nodes == 2


def test_a_setting_of_the_callers_shell_is_not_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_NODES", "9")
    assert read_shell_config(script(tmp_path, "TRAINING_ARGS=local/debug\n")).overrides == []


def test_exports_reach_training_by_name_and_no_value_reaches_the_config(tmp_path: Path) -> None:
    text = (
        "TRAINING_ARGS=(local/debug)\nexport NCCL_DEBUG=INFO JUDGE_URL='http://j ?' JUDGE_API_KEY=abc\nexport RANK=3\n"
        "NOT_EXPORTED=1\necho hello\n"
    )
    request = load_request(str(script(tmp_path, text)), [])
    assert request.exported["NCCL_DEBUG"] == "INFO"
    assert request.exported["JUDGE_API_KEY"] == "abc"
    assert "NOT_EXPORTED" not in request.exported
    assert request.config.launch.env == {}
    assert sorted(request.config.launch.pass_env) == ["JUDGE_API_KEY", "JUDGE_URL"]
    assert not any(value in str(request.config) for value in ("abc", "http://j ?"))


def test_a_config_beside_the_script_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: other.yaml\nrun: {name: mine}\n")
    (tmp_path / "other.yaml").write_text(
        "model: {path: m}\ndata: {train: {path: d}}\ntrain: {total_steps: 1}\nlaunch: {interface: hsn0}\n"
    )
    request = load_request(str(script(tmp_path, "TRAINING_ARGS=mine.yaml\n")), [])
    assert request.config.run.name == "mine"
    assert request.config.launch.interface == "hsn0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X=1\n", "does not set TRAINING_ARGS"),
        ("false\n", "failed: bash ended with 1"),
        ("echo broken >&2; exit 3\n", "failed: bash ended with 3: broken"),
        ("exit 0\n", "ended the shell"),
        ("TRAINING_ARGS=(a.yaml b.yaml)\n", "exactly one config"),
        ("TRAINING_ARGS=()\n", "exactly one config"),
        ("TRAINING_ARGS=(a.yaml --learning_rate 1)\n", "'--learning_rate'; valid are"),
        ("TRAINING_ARGS=(a.yaml --set)\n", "ends with --set"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        read_shell_config(script(tmp_path, text))


OPEN_INSTRUCT = """
EXP_NAME="${EXP_NAME:-debug}"
export MAX_JOB_CHAINS=3 NCCL_DEBUG=INFO
BASE=%s
TRAINING_ARGS="\\
    --exp_name ${EXP_NAME} \\
    --model_name_or_path Qwen/Qwen2.5-0.5B --chat_template_name %s \\
    --dataset_mixer_list ai2-adapt-dev/math_ground_truth_zs 1.0 \\
    --num_learners_per_node 1 --vllm_num_engines 3 --stop_strings '</answer>' --total_episodes 100 \\
    --save_freq 10 --keep_last_n_checkpoints -1 --output_dir /models --push_to_hub false --with_tracking \\
"
"""
"""As the fork of open-instruct for Slurm has its configs, in our own layout."""


def test_options_of_open_instruct_are_translated_and_what_is_different_is_told(tmp_path: Path) -> None:
    request = load_request(str(script(tmp_path, OPEN_INSTRUCT % ("", "qwen"))), ["train.lr=1e-6"])
    config = request.config
    assert (config.run.name, str(config.run.root), config.model.path) == ("debug", "/models", "Qwen/Qwen2.5-0.5B")
    assert (config.placement.learners_per_node, config.engine.engines_per_node) == (1, 3)
    assert (config.train.lr, config.train.total_episodes, config.rollout.stop) == (1e-6, 100, ["</answer>"])
    # Where the fork's defaults are not those of today: advantages, clip, temperature, lag, correction.
    assert (config.loss.advantage.normalize_std, config.loss.clip_high) == (True, 0.2)  # type: ignore[union-attr]
    assert (config.rollout.temperature, config.rollout.max_policy_lag) == (0.7, 1)
    assert config.loss.correction.name == "none"
    # Its flags for exports and W&B.
    assert (str(config.checkpoint.export_every), config.checkpoint.keep_exports) == ("10 steps", None)
    assert config.metrics.wandb == {"mode": "auto", "project": "geodesic-grpo", "entity": "geodesic"}
    assert config.launch.slurm.max_job_chains == 3
    assert request.exported["NCCL_DEBUG"] == "INFO"
    assert "has options of open-instruct. What is different here:" in request.told
    assert "a verifier for each item's `dataset` there" in request.told


def test_options_of_open_instruct_are_submitted_for_the_nodes_that_are_asked_for(
    tmp_path: Path, queue: FakeQueue
) -> None:
    path = script(tmp_path, OPEN_INSTRUCT % ("", "qwen"))
    result = call("submit", str(path), "--nodes", "2", "run.root=runs", "launch.slurm.gpus_per_node=4")
    assert result.exit_code == 0, result.stderr
    assert "has options of open-instruct. What is different here:" in result.stderr
    request, config = queue.requests[0], load_resolved(queue.requests[0].run.config)
    assert (request.launch.num_nodes, request.launch.slurm.gpus_per_node, len(queue.requests)) == (2, 4, 3)
    assert (config.placement.learners_per_node, config.engine.engines_per_node) == (1, 3)
    assert (config.run.name, config.train.total_episodes) == ("debug", 100)


@pytest.mark.parametrize(
    ("overrides", "base", "job", "engines"),
    [
        (["launch.num_nodes=2", "launch.slurm.gpus_per_node=4"], "", 0, 3),
        (["launch.num_nodes=2"], "site.yaml", 0, 7),
        ([], "", 6, 5),
    ],
)
def test_nodes_and_gpus_are_those_of_the_job_of_base_or_of_the_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], base: str, job: int, engines: int
) -> None:
    (tmp_path / "site.yaml").write_text("launch: {interface: hsn0, slurm: {gpus_per_node: 8}}\n")
    monkeypatch.chdir(tmp_path)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", str(job))
    config = load_request(str(script(tmp_path, OPEN_INSTRUCT % (base, "qwen"))), overrides).config
    assert (config.placement.learners_per_node, config.engine.engines_per_node) == (1, engines)
    assert config.launch.interface == ("hsn0" if base else None)


def test_what_open_instruct_asks_for_and_is_not_here_is_refused_unless_it_is_given(tmp_path: Path) -> None:
    path = script(tmp_path, OPEN_INSTRUCT % ("", "olmo_thinker"))
    with pytest.raises(ConfigError, match=r"into a Jinja file: set data\.template"):
        load_request(str(path), [])
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    given = [f"data.template={tmp_path / 'mine.jinja'}"]
    assert load_request(str(path), given).config.data.template == str(tmp_path / "mine.jinja")
    path.write_text('TRAINING_ARGS="--use_lora true"')
    with pytest.raises(ConfigError, match="use_lora = True: set section lora instead"):
        load_request(str(path), given)


def test_a_missing_script_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_request(str(tmp_path / "nope.sh"), [])
