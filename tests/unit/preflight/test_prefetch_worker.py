"""The files that are fetched, failed downloads in one line, weights that are not whole, and a network that is off."""

from __future__ import annotations

import errno
import json
import pickle
import re
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.preflight.prefetch import Item
from hpc_grpo.preflight.prefetch_worker import needed_files, problem
from hpc_grpo.system.hugging_face import check_weights

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


def safetensors(num_bytes: int, *, kept: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(kept)


def test_every_part_of_the_weights_must_be_whole(tmp_path: Path) -> None:
    index = {"weight_map": {"a": PARTS[0], "b": PARTS[1]}}
    (tmp_path / PARTS[2]).write_text(json.dumps(index))
    (tmp_path / PARTS[0]).write_bytes(safetensors(50, kept=50))
    with pytest.raises(ConfigError, match=rf"{PARTS[1]} is missing"):
        check_weights(tmp_path, is_local=True)
    (tmp_path / PARTS[1]).write_bytes(safetensors(50, kept=49))
    with pytest.raises(ConfigError, match=rf"{PARTS[1]} \(\d+ bytes\) is cut short"):
        check_weights(tmp_path, is_local=True)
    (tmp_path / PARTS[1]).write_bytes(safetensors(50, kept=50))
    check_weights(tmp_path, is_local=True)


def test_a_torch_file_must_have_its_end(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("data.pkl", b"x" * 100)
    check_weights(tmp_path, is_local=True)
    whole = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(whole[:100])
    with pytest.raises(ConfigError, match="cut short"):
        check_weights(tmp_path, is_local=True)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has no weights.* Run hpc-grpo cluster prefetch CONFIG without --verify-only"
    ):
        check_weights(tmp_path, is_local=False)


def test_a_folder_of_the_users_is_not_to_be_deleted_or_fetched(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConfigError, match=r"Delete .*/model\.safetensors\. Run hpc-grpo cluster prefetch CONFIG"):
        check_weights(tmp_path, is_local=False)
    with pytest.raises(ConfigError, match="Copy the original model's files into the folder") as error:
        check_weights(tmp_path, is_local=True)
    assert not re.search("[Dd]elete|prefetch", str(error.value))


def test_a_torch_file_from_before_version_1_6_is_whole(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(0, protocol=2))
    check_weights(tmp_path, is_local=True)


def test_the_network_is_off_while_verifying() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = (
            "import socket; from hpc_grpo.preflight.prefetch_worker import shut_off_network; shut_off_network()\n"
            f"try: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))\n"
            "except ConnectionError as error: print(error)"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "The network is off while caches are verified (socket.getaddrinfo).\n"
