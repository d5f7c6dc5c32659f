"""The worker of prefetch: `python -m hpc_grpo.preflight.prefetch_worker fetch|verify KEY...`.

A separate process, since the Hugging Face libraries read the cache folders from the environment at import.
Reads the resolved config (YAML) from stdin. Prints a JSON object for each item: `key`, and `error` or null; `verify`
adds `folder` and `num_bytes`.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hpc_grpo.config import Config, SourceConfig
from hpc_grpo.data import tokenizer
from hpc_grpo.data.fingerprint import tokenizer_identity
from hpc_grpo.data.loading import load_rows
from hpc_grpo.data.sources import open_source
from hpc_grpo.errors import ConfigError
from hpc_grpo.preflight.prefetch import Item, items_of
from hpc_grpo.system.hugging_face import WEIGHT_FORMS, check_weights, find_model

_WEIGHTS = tuple(
    patterns
    for name in WEIGHT_FORMS
    for patterns in ((f"{name}.index.json", f"{Path(name).stem}-*{Path(name).suffix}"), (name,))
)
"""File patterns of each form of weights, the preferred form first. A repository has a form if it has its first file."""

_SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")
_NOT_SETTINGS = ("*.index.json", "adapter_*", "*requirements*.txt", "LICENSE*", "*license*.txt")

_HTTP_PACKAGES = ("httpx", "httpx2", "requests", "urllib3", "aiohttp")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOKEN = (
    "export HF_TOKEN (its value reaches the job by name and is written nowhere; launch.env refuses it), or log in with "
    "`hf auth login`"
)
_NETWORK_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.sendto")


def main(action: str, keys: list[str]) -> None:
    config = Config.model_validate(yaml.safe_load(sys.stdin))
    if action == "verify":
        shut_off_network()
        tokenizer.import_without_torch(config)
    work = _verified if action == "verify" else _fetched
    for item in items_of(config, Path.cwd()):
        if item.key in keys:
            print(json.dumps({"key": item.key, "error": None, **work(config, item)}), flush=True)


def _fetched(config: Config, item: Item) -> dict[str, Any]:
    """Download the item into its cache. The libraries skip existing files. Return {}, or the `error`."""
    try:
        from huggingface_hub import HfApi, snapshot_download

        # First make a request that fails at once. Other calls try for 23 s to reach a hub without a network.
        if item.source is None:
            siblings = HfApi().model_info(item.name).siblings or []
            files = needed_files(item.name, [file.rfilename for file in siblings])
            snapshot_download(item.name, allow_patterns=[glob.escape(file) for file in files])
        else:
            HfApi().dataset_info(item.name)
            open_source(item.source).identity()
    except Exception as error:  # noqa: BLE001 - the libraries raise whatever their HTTP clients do
        return {"error": problem(item, error)}
    return {}


def needed_files(name: str, files: Sequence[str]) -> list[str]:
    """Return the files of a model repository that training reads: settings, tokenizer and one form of the weights.

    Raises ConfigError if the repository has no weights that training can load.

    >>> needed_files("m", ["config.json", "README.md", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx"])
    ['config.json', 'model.safetensors']
    """
    weights = next((patterns for patterns in _WEIGHTS if patterns[0] in files), None)
    if weights is None:
        raise ConfigError(
            f"model.path = {name}: the repository has no weights that training can load ({' or '.join(WEIGHT_FORMS)}, "
            f"whole or in parts). Name the repository of the original model, not of a conversion."
        )
    in_place = [file for file in files if "/" not in file or file.startswith("additional_chat_templates/")]
    settings = {file for file in in_place if _matches(file, _SETTINGS) and not _matches(file, _NOT_SETTINGS)}
    return [file for file in files if _matches(file, weights) or file in settings]


def _matches(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def problem(item: Item, error: BaseException) -> str:
    """Return one line about a failed download, with the fix. Looks at all causes of `error`: libraries wrap errors."""
    chain, cause = [error], error
    while (behind := cause.__cause__ or cause.__context__) is not None:
        chain.append(cause := behind)
    names = {type(one).__name__ for one in chain}
    # The library `datasets` distinguishes a gated data set from a missing one only by the error's text.
    says_gated = any(type(one).__name__ == "DatasetNotFoundError" and "gated" in str(one) for one in chain)
    if "GatedRepoError" in names or says_gated:
        return f"{item} is gated: accept its terms on the hub with your account, then {_TOKEN}."
    of_system = [one for one in chain if isinstance(one, OSError)]
    if any(one.errno in _FULL or "Not enough disk space" in str(one) for one in of_system):
        return (
            f"{item}: the disk (or your quota) of the cache is full. Free some space, or name another folder that all "
            f"nodes share: launch.env.HF_HOME=FOLDER."
        )
    if not names.isdisjoint({"RepositoryNotFoundError", "DatasetNotFoundError"}):
        return (
            f"{item}: the hub has none of this name that you may read, and there is no such folder here. "
            f"Check the spelling; for a private repository, {_TOKEN}."
        )
    # A status means that the hub was reached, so the network works.
    answers = (getattr(one, "response", None) for one in chain)
    if (answer := next((each for each in answers if each is not None), None)) is not None:
        status = int(answer.status_code)
        todo = _TOKEN if status in (401, 403) else "try again later"
        return f"{item}: the hub answered with HTTP {status} ({_first_line(chain[-1])}); {todo}."
    cut_off = [
        one
        for one in chain
        if isinstance(one, ConnectionError | TimeoutError) or type(one).__module__.split(".")[0] in _HTTP_PACKAGES
    ]
    if cut_off:
        return (
            f"{item}: no network, the hub cannot be reached from this machine ({_first_line(cut_off[-1])}). "
            f"Run prefetch on a machine with network, such as a login node; behind a proxy, set https_proxy."
        )
    return _first_line(error) if str(item) in str(error) else f"{item} could not be fetched: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def shut_off_network() -> None:
    """Fail every connection of this process from now on, as if there were no network. Cannot be undone."""

    def refuse(event: str, _arguments: tuple[object, ...]) -> None:
        if event in _NETWORK_EVENTS:
            raise ConnectionError(f"The network is off while caches are verified ({event}).")

    sys.addaudithook(refuse)


def _verified(config: Config, item: Item) -> dict[str, Any]:
    """Load the item with the run's own code, from the caches alone; return its `folder` and `num_bytes`."""
    try:
        source = item.source
        folder, files = _verify_dataset(config, item, source) if source else _verify_model(config, item)
        return {"folder": str(folder), "num_bytes": sum(file.stat().st_size for file in files)}
    except (ConfigError, OSError) as error:
        failed = "cannot be used" if item.is_local else "cannot be loaded with the network off"
        return {"error": f"{item} {failed}: {' '.join(str(error).split())}"}


def _verify_model(config: Config, item: Item) -> tuple[Path, list[Path]]:
    folder = find_model(item.name, key=item.key)
    if item.key == "model.path":
        loaded = tokenizer.load_tokenizer(config)
        tokenizer.check_context_length(config)
        tokenizer.stop_token_ids(config, loaded)
    if item.key in config.scoring_models:
        tokenizer.refuse_other_vocabularies(config)
    check_weights(folder, is_local=item.is_local)
    return folder, [file for file in folder.rglob("*") if file.is_file()]


def _verify_dataset(config: Config, item: Item, source: SourceConfig) -> tuple[Path, list[Path]]:
    """Check and tokenize every row, which fills the cache of tokenized data for the run."""
    rows = load_rows(config, source, tokenizer.load_tokenizer(config), tokenizer_identity(config, os.environ))
    files = open_source(source).files() or list(rows.folder.iterdir())
    return files[0] if len(files) == 1 and item.is_local else files[0].parent, files


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
