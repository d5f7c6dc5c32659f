"""The files that are fetched, and failed downloads in one line."""

from __future__ import annotations

import errno

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.preflight.prefetch.items import Item
from hpc_grpo.preflight.prefetch.worker import needed_files, problem

PARTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("files", "left_out"),
    [
        (["config.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", *PARTS], []),
        ([*PARTS, "consolidated.safetensors", "pytorch_model.bin.index.json", "pytorch_model-1.bin"], PARTS),
        (["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot"], ["pytorch_model.bin"]),
        (["model.safetensors", "original/config.json", "LICENSE.txt", ".gitattributes"], ["model.safetensors"]),
    ],
)
def test_of_a_repository_settings_and_one_form_of_the_weights_are_needed(files: list[str], left_out: list[str]) -> None:
    assert needed_files("m", files) == (left_out or files)


def test_a_repository_of_conversions_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no weights that training can load"):
        needed_files("m", ["config.json", "model-q4.gguf", "adapter_model.safetensors"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_deep_in_the_chain_of_errors_is_named_with_the_fix(number: int) -> None:
    try:
        try:
            raise OSError(number, "write failed")
        except OSError as error:
            raise RuntimeError("while generating") from error
    except RuntimeError as error:
        line = problem(Item("data.train.path", "org/sums", False), error)
    assert line.startswith("data.train.path = org/sums: the disk (or your quota) of the cache is full.")
    assert "launch.env.HF_HOME=FOLDER" in line
