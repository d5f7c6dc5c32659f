"""Copy an exported model to a folder, or upload it to the Hugging Face hub by the hub's client."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.system.hugging_face import OFFLINE_VARIABLES, is_offline
from hpc_grpo.system.readable import one_line
from hpc_grpo.system.secret import without_secrets

_LONGEST_ERROR = 400
_REFUSED = (401, 403)


def copy_export(export: Path, output: Path) -> None:
    """Copy the files of an export to a folder. config.json comes last, so it marks a complete model."""
    for file in sorted(export.iterdir(), key=lambda path: (path.name == "config.json", path.name)):
        if file.is_file():
            staged = output / f".{file.name}.new"
            shutil.copyfile(file, staged)
            staged.replace(output / file.name)


class HubRepository:
    """A model's repository on the hub of $HF_ENDPOINT. The token comes from $HF_TOKEN or `hf auth login`."""

    def __init__(self, name: str, *, is_public: bool) -> None:
        """Raises ConfigError for a wrong name, and without a token, hub client or network. Creates no repository."""
        if is_offline(os.environ):
            named = ", ".join(variable for variable in OFFLINE_VARIABLES if os.environ.get(variable))
            raise ConfigError(f"--push-to-hub = {name}: {named} keeps this process from the hub. Unset the variable.")
        try:
            from huggingface_hub import HfApi, get_token
            from huggingface_hub.errors import HFValidationError
            from huggingface_hub.utils._validators import validate_repo_id
        except ImportError as error:
            raise ConfigError("--push-to-hub needs huggingface_hub: pip install huggingface_hub") from error
        self._name, self._api, self._is_public = name, HfApi(), is_public
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ConfigError(f"--push-to-hub = {name}: {_in_a_line(error)} Give ORG/NAME.") from error
        if name.count("/") != 1:
            raise ConfigError(f"--push-to-hub = {name}: must be ORG/NAME, such as my-group/my-model.")
        if get_token() is None:
            raise ConfigError(
                f"--push-to-hub = {name}: there is no token. Run `hf auth login`, or export HF_TOKEN; the token must "
                f"be allowed to write."
            )

    def upload(self, export: Path, texts: Mapping[str, str], message: str) -> str:
        """Upload the files of an export and texts by name, in one commit; return the address of the repository.

        Creates a missing repository. After an interruption, a second upload sends only the missing files. Raises
        ConfigError for a token that may not write, and HpcGrpoError for all other failures.
        """
        from huggingface_hub import CommitOperationAdd

        files = {path.name: path for path in sorted(export.iterdir()) if path.is_file()}
        every: dict[str, Path | bytes] = {**files, **{name: text.encode() for name, text in texts.items()}}
        try:
            self._api.create_repo(self._name, private=not self._is_public, exist_ok=True)
            operations = [CommitOperationAdd(name, content) for name, content in every.items()]
            self._api.create_commit(self._name, operations, commit_message=message)
        except Exception as error:
            # The client raises any exception of its libraries.
            raise self._explained(error) from error
        return f"{self._api.endpoint}/{self._name}"

    def _explained(self, error: Exception) -> HpcGrpoError:
        """Return an error for the user, with a fix, for an exception of the client."""
        said = f"{type(error).__name__}: {_in_a_line(error)}"
        if getattr(getattr(error, "response", None), "status_code", None) in _REFUSED:
            return ConfigError(
                f"--push-to-hub = {self._name}: {self._api.endpoint} refuses the token ({said}) Give one that may "
                f"write there: `hf auth login`, or export HF_TOKEN."
            )
        return HpcGrpoError(
            f"--push-to-hub = {self._name}: {self._api.endpoint} did not take the model ({said}) The export stays on "
            f"this disk. Repeat the command to try again."
        )


def _in_a_line(error: Exception) -> str:
    return one_line(without_secrets(str(error)).rstrip(". \n"), _LONGEST_ERROR) + "."
