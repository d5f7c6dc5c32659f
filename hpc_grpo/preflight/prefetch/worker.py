"""The worker of prefetch: `python -m hpc_grpo.preflight.prefetch.worker fetch|verify KEY...`.

A process of its own, since the Hugging Face libraries find their caches in the environment it was started with.
Consumes the resolved config (YAML) on stdin. Prints one JSON object per item as soon as it is done: `key`, and `error`
(null if there was none); `verify` adds `folder` and `num_bytes`.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.preflight.prefetch.items import Item, items_of, source_of
from hpc_grpo.system.hugging_face import WEIGHT_FORMS

_WEIGHTS = tuple(
    patterns
    for name in WEIGHT_FORMS
    for patterns in ((f"{name}.index.json", f"{Path(name).stem}-*{Path(name).suffix}"), (name,))
)
"""The files of each form of weights, the preferred form first; the first file of a form must be there."""

_SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")
_NOT_SETTINGS = ("*.index.json", "adapter_*", "*requirements*.txt", "LICENSE*", "*license*.txt")

_HTTP_PACKAGES = ("httpx", "httpx2", "requests", "urllib3", "aiohttp")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TOKEN = (
    "export HF_TOKEN (its value reaches the job by name and is written nowhere; launch.env refuses it), or log in with "
    "`hf auth login`"
)


def main(action: str, keys: list[str]) -> None:
    config = Config.model_validate(yaml.safe_load(sys.stdin))
    work = _fetched
    if action == "verify":
        from hpc_grpo.preflight.prefetch.verify import shut_off_network

        shut_off_network()
        work = _verified
    for item in items_of(config, Path.cwd()):
        if item.key in keys:
            print(json.dumps({"key": item.key, "error": None, **work(config, item)}), flush=True)


def _verified(config: Config, item: Item) -> dict[str, Any]:
    from hpc_grpo.preflight.prefetch.verify import verify

    try:
        return verify(config, item)
    except (ConfigError, OSError) as error:
        failed = "cannot be used" if item.is_local else "cannot be loaded with the network off"
        return {"error": f"{item} {failed}: {' '.join(str(error).split())}"}


def _fetched(config: Config, item: Item) -> dict[str, Any]:
    """Download the item into its cache; the libraries skip what is there already."""
    try:
        from huggingface_hub import HfApi, snapshot_download

        # A question first that fails at once: other calls try for 23 s to reach a hub that this machine has no way to.
        if item.key in config.models:
            siblings = HfApi().model_info(item.name).siblings or []
            files = needed_files(item.name, [file.rfilename for file in siblings])
            snapshot_download(item.name, allow_patterns=[glob.escape(file) for file in files])
        else:
            from hpc_grpo.data.sources import open_source

            HfApi().dataset_info(item.name)
            open_source(source_of(config, item)).identity()
    except Exception as error:  # noqa: BLE001 - the libraries raise whatever their HTTP clients do
        return {"error": problem(item, error)}
    return {}


def needed_files(name: str, files: Sequence[str]) -> list[str]:
    """Return the files of a model repository that training reads: settings, tokenizer and one form of the weights.

    Raises ConfigError when there is no form that transformers can load.

    >>> needed_files("m", ["config.json", "README.md", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx"])
    ['config.json', 'model.safetensors']
    """
    weights = next((patterns for patterns in _WEIGHTS if patterns[0] in files), None)
    if weights is None:
        raise ConfigError(
            f"model.path = {name}: the repository has no weights that training can load ({' or '.join(WEIGHT_FORMS)}, "
            f"whole or in parts). Name the repository of the original model, not of a conversion."
        )
    return [file for file in files if _matches(file, weights) or _is_setting(file)]


def _is_setting(file: str) -> bool:
    in_its_place = "/" not in file or file.startswith("additional_chat_templates/")
    return in_its_place and _matches(file, _SETTINGS) and not _matches(file, _NOT_SETTINGS)


def _matches(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)


def problem(item: Item, error: BaseException) -> str:
    """Say in one line what the failed download of `item` means, with the fix.

    Each library raises errors of its own for the same few causes: the chain of errors tells them apart.
    """
    chain = list(_chain(error))
    names = {type(one).__name__ for one in chain}
    # datasets tells a gated data set from a missing one by its text alone.
    says_gated = any(type(one).__name__ == "DatasetNotFoundError" and "gated" in str(one) for one in chain)
    if "GatedRepoError" in names or says_gated:
        return f"{item} is gated: accept its terms on the hub with your account, then {_TOKEN}."
    if _is_full(chain):
        return (
            f"{item}: the disk (or your quota) of the cache is full. Free some space, or name another folder that all "
            f"nodes share: launch.env.HF_HOME=FOLDER."
        )
    if not names.isdisjoint({"RepositoryNotFoundError", "DatasetNotFoundError"}):
        return (
            f"{item}: the hub has nothing of this name, or not for you, and there is no such folder here. "
            f"Check the spelling; for a private one, {_TOKEN}."
        )
    if (status := _http_status(chain)) is not None:
        todo = _TOKEN if status in (401, 403) else "try again later"
        return f"{item}: the hub answered with HTTP {status} ({_first_line(chain[-1])}); {todo}."
    if (cause := _network_error(chain)) is not None:
        return (
            f"{item}: no network, the hub cannot be reached from this machine ({_first_line(cause)}). "
            f"Run prefetch where there is one: on a login node; behind a proxy, with https_proxy set."
        )
    return _first_line(error) if str(item) in str(error) else f"{item} could not be fetched: {_first_line(error)}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_full(chain: list[BaseException]) -> bool:
    says_full = any(isinstance(error, OSError) and "Not enough disk space" in str(error) for error in chain)
    return says_full or any(isinstance(error, OSError) and error.errno in _FULL for error in chain)


def _http_status(chain: list[BaseException]) -> int | None:
    """Return the status that the hub answered with, or None: who refuses was reached, so the network is there."""
    responses = (getattr(error, "response", None) for error in chain)
    return next((int(answer.status_code) for answer in responses if answer is not None), None)


def _network_error(chain: list[BaseException]) -> BaseException | None:
    """Return the innermost error that says there is no connection, or None."""
    found = [
        error
        for error in chain
        if isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.split(".")[0] in _HTTP_PACKAGES
    ]
    return found[-1] if found else None


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
