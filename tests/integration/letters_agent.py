"""An agent that talks to the model three times, with the standard library alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from pathlib import Path


class LettersAgent:
    """Earns the share of letters in what the model writes.

    Its process leaves a file with its number in the folder `pids`. A process that finds a file in the folder `deaths`
    takes the file away, and is killed between two answers of the model.
    """

    def __init__(self, pids: str, deaths: str) -> None:
        self._deaths = Path(deaths)
        (Path(pids) / str(os.getpid())).touch()

    def play(self, row, seed, base_url, api_key):
        messages, written = [{"role": "user", "content": row["question"]}], ""
        for _ in range(3):
            body = json.dumps({"model": "any", "messages": messages}).encode()
            headers = {"Authorization": f"Bearer {api_key}"}
            request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
            with urllib.request.urlopen(request) as answer:
                message = json.load(answer)["choices"][0]["message"]
            written += message["content"]
            for death in self._deaths.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another process has taken it
                    death.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
            messages += [message, {"role": "user", "content": "\n1\n"}]
        return sum(map(str.isalpha, written)) / max(len(written), 1)
