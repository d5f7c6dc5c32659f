from __future__ import annotations

import asyncio
import socket

import pytest

from hpc_grpo.errors import ConfigError, RewardAwayError
from hpc_grpo.rewards.builtin import servers
from hpc_grpo.rewards.builtin.servers import Endpoint, wait_for


@pytest.mark.parametrize(
    ("is_resume", "error", "words"),
    [
        (False, ConfigError, r"Start the server before the run"),
        (True, RewardAwayError, r"It did when the run began: start it, and the run goes on\."),
    ],
)
def test_a_server_that_is_away_is_a_mistake_at_a_start_and_none_at_a_resume(
    is_resume: bool, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_RESUME_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"http://127.0.0.1:{there.getsockname()[1]}"
    endpoint = Endpoint(address, None, concurrency=1, attempt_s=1.0)
    with pytest.raises(error, match=words):
        asyncio.run(wait_for(endpoint, "/health", 0.2, is_resume=is_resume))
