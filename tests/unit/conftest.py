"""What unit tests of several areas share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hpc_grpo.config import Config
from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config
from tests.support.run_builder import RunBuilder
from tests.support.stand_in_server import Serve, serving

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set what the shipped configs of a site expect in the environment of its users; return the folder, not there."""
    monkeypatch.setenv("SCRATCHDIR", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


@pytest.fixture
def make_tokenizer() -> Callable[..., Any]:
    """A maker of character-level tokenizers: one token per ASCII character, no download."""
    return character_tokenizer


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A starter of servers whose answers a test gives."""
    with serving() as start:
        yield start


@pytest.fixture
def chat_template() -> str:
    return CHAT_TEMPLATE


def character_tokenizer(chat_template: str | None = None) -> Any:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    for code in [10, *range(32, 127)]:
        vocabulary[chr(code)] = len(vocabulary)
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture
def quick_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a plan simulate few rollouts, which takes a third of the time: for tests of its text, not of its seconds."""
    monkeypatch.setattr("hpc_grpo.simulate.assumed._ROLLOUTS", 512)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "adder")
    run_dir.create()
    return run_dir


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the runs root that commands find by themselves; nothing is there yet."""
    monkeypatch.setenv("HPC_GRPO_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def built(root: Path) -> RunBuilder:
    """Return a builder of the run `adder`, which has a config and nothing else."""
    return RunBuilder(root / "adder")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return minimal_config(run={"name": "adder", "root": str(tmp_path)}, train={"total_steps": 95})


@pytest.fixture
def record() -> StepRecord:
    """Step 6 of 95, the first of 5 epochs."""
    return StepRecord(
        step=6,
        total_steps=95,
        attempt=1,
        epoch=1,
        total_epochs=5,
        time_s=1000.0,
        metrics={
            "reward/mean": 0.53125,
            "loss/policy": -0.0001,
            "lag/mean": 0.0,
            "mismatch/logprob_abs_diff_mean": 1.2e-6,
            "throughput/tokens_per_s": 1234.0,
            "time/train_s": 0.6,
            "time/generate_wait_s": 1.22,
            "time/publish_s": 0.08,
            "time/checkpoint_s": 0.001,
            "time/step_s": 2.0,
            "time/eta_s": 130.4,
        },
    )


@pytest.fixture(scope="session")
def small_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = tmp_path_factory.mktemp("installed") / "hpc_grpo"
    package.mkdir()
    (package / "__init__.py").touch()
    return package


@pytest.fixture(autouse=True)
def _runs_copy_a_small_package(small_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `freeze` copy one file into a run, and not the whole package: in hundreds of tests that is minutes."""
    monkeypatch.setattr("hpc_grpo.run.source.PACKAGE", small_package)
    monkeypatch.setattr("hpc_grpo.launch.freeze.PACKAGE", small_package)
