"""Built-in reward: asks a server of yours, or `hpc-grpo reward-server`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward
from hpc_grpo.rewards.http import AnswerError, Endpoint, ask_all, wait_for


async def prepare(
    url: str = "",
    api_key_env: str | None = None,
    health_path: str = "/health",
    attempt_s: float = 60.0,
    timeout_s: float = 10.0,
    is_resume: bool = False,
    **args: Any,
) -> str:
    """Wait for the server, at most as long as one call may take; longer at a resume."""
    await wait_for(Endpoint(url, api_key_env, 1, attempt_s), health_path, timeout_s, is_resume=is_resume)
    return f"{url} answers; while it is away, training waits up to {timeout_s:g} s a group (timeout_s)"


@reward("remote", prepare=prepare)
async def remote(
    prompts: Sequence[str],
    completions: Sequence[str],
    url: str = "",
    path: str = "/score",
    health_path: str = "/health",
    api_key_env: str | None = None,
    attempt_s: float = 60.0,
    timeout_s: float = 10.0,
    **fields: Any,
) -> list[float]:
    """Post `{"prompts": […], "completions": […], "fields": {…}}`; the answer is `{"scores": […]}`, or the list alone.

    A group is one request. The server is asked again while it is away, restarts or is busy, until
    `rewards.N.timeout_s`; a group that it has not answered by then is masked, and never scored 0.
    """
    endpoint = Endpoint(url, api_key_env, 1, attempt_s)
    endpoint.check()
    body = {"prompts": list(prompts), "completions": list(completions), "fields": fields}
    [answer] = await ask_all(endpoint, path, [body], timeout_s)
    scores = answer.get("scores") if isinstance(answer, dict) else answer
    if not isinstance(scores, list):
        raise AnswerError(f"{url} answers {str(answer)[:200]!r}, and not a list of scores.")
    if len(scores) != len(completions):
        raise ConfigError(f"{url} answers {len(scores)} scores for {len(completions)} completions.")
    return scores
