"""Code that a model brings along is not run, and nobody is asked whether it should be."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import hpc_grpo
from hpc_grpo.data.tokenizer import (
    check_context_length,
    decoder_of,
    installed_packages,
    load_tokenizer,
    read_vocabulary,
    refuse_other_vocabularies,
    stop_token_ids,
)
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config
from tests.support.model_folders import make_model

_CODE = "from pathlib import Path\nPath({marker!r}).touch()\n"


@pytest.fixture
def hostile_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """A model folder whose every class is code of its own, and a user who says yes to all; returns whether it ran."""
    folder, marker = tmp_path / "model", tmp_path / "it-ran"
    folder.mkdir()
    (folder / "evil.py").write_text(_CODE.format(marker=str(marker)))
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": classes}))
    tokenizer = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return marker.exists


def load_model(config: Any) -> None:
    from hpc_grpo.learner.model import _from_pretrained

    _from_pretrained(config.model.path, f"model.path = {config.model.path}", has_images=False)


@pytest.mark.parametrize("load", [load_tokenizer, check_context_length, load_model])
def test_code_in_a_models_folder_is_not_run(
    hostile_model: Callable[[], bool], tmp_path: Path, load: Callable[[Any], None]
) -> None:
    with pytest.raises(ConfigError, match=r"model\.path = "):
        load(minimal_config(model={"path": str(tmp_path / "model")}))
    assert not hostile_model()


def test_transformers_is_imported_without_torch_unless_a_function_of_the_user_may_want_a_model() -> None:
    program = (
        "import os, sys; from hpc_grpo.data.tokenizer import import_without_torch as load\n"
        "from tests.support.configs import minimal_config as config; before = dict(os.environ)\n"
        "load(config(eval={'metrics': ['mine:similarity']})); print('transformers' in sys.modules)\n"
        "load(config()); from transformers import AutoTokenizer; print('torch' in sys.modules, before == os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\nFalse True\n", "")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python's own function is used")
def test_the_installed_packages_are_those_that_python_finds() -> None:
    found, wanted = installed_packages(), importlib.metadata.packages_distributions()
    assert {name: sorted(own) for name, own in found.items()} == {name: sorted(own) for name, own in wanted.items()}
    assert found["transformers"] == ["transformers"]


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *arguments: Any, **options: Any) -> str:
        return super()._decode(*arguments, **options).upper()


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Shouting])
def test_a_decoder_gives_the_tokenizers_own_text(make_tokenizer: Callable[..., Any], kind: type[Any]) -> None:
    tokenizer = make_tokenizer()
    tokenizer = kind(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=True)
    decode, ids = decoder_of(tokenizer), [*tokenizer("so , it is .")["input_ids"], 1, 99_999]
    for skip in (True, False):
        wanted = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert decode(ids, skip_special_tokens=skip) == wanted
        assert wanted.lower() == "so , it is ." + "<eos>" * (not skip)


def test_a_process_that_only_decodes_does_not_import_transformers(make_tokenizer: Callable[..., Any]) -> None:
    pickled = pickle.dumps(decoder_of(make_tokenizer()))
    program = (
        "import pickle, sys; from hpc_grpo.grading.grader import Grader\n"
        "decode = pickle.load(sys.stdin.buffer)\n"
        "print(decode([5], skip_special_tokens=True), 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickled, capture_output=True, check=True)
    assert done.stdout.decode() == f"{make_tokenizer().decode([5])} False\n"


_LOADERS = {"load_dataset", "EngineArgs", "load_dataset_builder"}
_NO_CODE = {"GenerationConfig.from_pretrained"}
"""Reads a JSON file, and has no such argument."""


def test_a_folder_without_a_tokenizer_is_refused_though_transformers_would_make_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ConfigError, match=r"model\.path = .*: the folder has no tokenizer"):
        load_tokenizer(minimal_config(model={"path": str(tmp_path)}))


@pytest.mark.parametrize(
    ("file", "content"), [("config.json", "[]"), ("tokenizer.json", "[]"), ("tokenizer_config.json", '"x"')]
)
def test_a_damaged_file_of_a_tokenizer_is_one_clear_error(
    file: str, content: str, tmp_path: Path, make_tokenizer: Callable[..., Any]
) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=r"model\.path = .*: no tokenizer can be loaded from it \(\w+Error: "):
        load_tokenizer(minimal_config(model={"path": str(tmp_path)}))


def test_every_loader_is_told_not_to_run_code() -> None:
    untold = set()
    for path in sorted(Path(hpc_grpo.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) in _NO_CODE:
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            told = {ast.unparse(word) for word in node.keywords}
            if (name == "from_pretrained" or name in _LOADERS) and "trust_remote_code=False" not in told:
                untold.add(f"{path.name}: {ast.unparse(node)}")
    assert untold == {"vllm.py: EngineArgs(**engine_options(config, on_gpu=on_gpu, reads_weights=reads_weights))"}, (
        "see test_vllm for that one"
    )


@pytest.mark.parametrize("key", ["task.args.teacher", "loss.kl.reference"])
def test_a_model_that_scores_must_have_the_tokens_of_the_policy_under_the_same_ids(
    make_tokenizer: Callable[..., Any], tmp_path: Path, key: str
) -> None:
    student = make_tokenizer()
    student.save_pretrained(tmp_path / "student")
    student.save_pretrained(tmp_path / "twin")
    student.add_tokens(["<new>"])
    student.save_pretrained(tmp_path / "other")
    for name in ("student", "twin", "other"):
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen2"}))

    def config_with(other: str) -> Any:
        path, own = str(tmp_path / other), {"path": str(tmp_path / "student")}
        if key == "task.args.teacher":
            return minimal_config(task={"name": "distill", "args": {"teacher": path}}, model=own)
        return minimal_config(loss={"kl": {"coef": 0.1, "reference": path}}, model=own)

    refuse_other_vocabularies(config_with("twin"))
    with pytest.raises(ConfigError, match=rf"^{key} = .*other: 1 tokens have other ids .*'<new>' \(\d+, not none\)"):
        refuse_other_vocabularies(config_with("other"))
    with pytest.raises(ConfigError, match=rf"{key} = .*/nowhere: there is no folder"):
        refuse_other_vocabularies(config_with("nowhere"))
    for name in ("student", "other"):
        loaded = load_tokenizer(minimal_config(model={"path": str(tmp_path / name)}))
        assert read_vocabulary(tmp_path / name) == loaded.get_vocab()


@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_damaged_generation_config_is_an_error_and_a_missing_one_is_none(tmp_path: Path, content: str) -> None:
    """Without its end tokens, completions would go on to their limit."""
    config = minimal_config(model={"path": str(make_model(tmp_path / "m", {}))})
    tokenizer = SimpleNamespace(eos_token_id=7)
    assert stop_token_ids(config, tokenizer) == (7,)
    (tmp_path / "m" / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json is damaged\. Copy the original"):
        stop_token_ids(config, tokenizer)
