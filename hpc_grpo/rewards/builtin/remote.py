"""Built-in reward: asks a server of yours, or `hpc-grpo reward-server`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import Group, reward
from hpc_grpo.rewards.http import AnswerError, Endpoint, HttpUrl, ask_all, load, wait_for
from hpc_grpo.section import Section


class RemoteSettings(Section):
    url: HttpUrl = Field(description="Address of the server.")
    protocol: Literal["hpc_grpo", "openrlhf"] = Field(
        "hpc_grpo", description="openrlhf: `query`, `prompts`, `labels`; the answer is `rewards`."
    )
    path: str | None = Field(None, description="Path to post to. Default: /score, for openrlhf /get_reward.")
    label_field: str = Field("answer", description="Column of the data with the label, for openrlhf.")
    health_path: str = Field("/health", description="Path that answers while the server can score.")
    api_key_env: str | None = Field(None, description="Environment variable with the key. Default: no key.")
    token_env: str | None = Field(
        None, description="Environment variable with the token of an hpc-grpo reward-server. Default: another server."
    )
    attempt_s: PositiveFloat = Field(60.0, description="Deadline of one request.")

    def endpoint(self) -> Endpoint:
        return Endpoint(self.url, self.api_key_env, 1, self.attempt_s, self.token_env)


async def prepare(settings: RemoteSettings, timeout_s: float, is_resume: bool) -> str:
    """Wait for the server, at most as long as one call may take; longer at a resume."""
    await wait_for(settings.endpoint(), settings.health_path, timeout_s, is_resume=is_resume)
    return f"{settings.url} answers; while it is away, training waits up to {timeout_s:g} s a group (timeout_s)"


@reward("remote", RemoteSettings, prepare=prepare, load=load)
async def remote(group: Group, settings: RemoteSettings) -> list[float]:
    """Post a group; the answer is `{"scores": […]}` or `{"rewards": […]}`, or the list alone.

    A group is one request. The server is asked again while it is away, restarts or is busy, until
    `rewards.N.timeout_s`; a group that it has not answered by then is masked, and never scored 0.
    """
    count = len(group.completions)
    path = settings.path or ("/get_reward" if settings.protocol == "openrlhf" else "/score")
    [answer] = await ask_all(settings.endpoint(), path, [_body(group, settings)], group.timeout_s)
    scores = answer.get("scores", answer.get("rewards")) if isinstance(answer, dict) else answer
    if not isinstance(scores, list):
        raise AnswerError(f"{settings.url} answers {str(answer)[:200]!r}, and not a list of scores.")
    if len(scores) != count:
        raise ConfigError(f"{settings.url} answers {len(scores)} scores for {count} completions.")
    return scores


def _body(group: Group, settings: RemoteSettings) -> dict[str, Any]:
    count = len(group.completions)
    prompts = [group.prompt] * count
    if settings.protocol == "hpc_grpo":
        fields = {name: [value] * count for name, value in group.fields.items()}
        return {"prompts": prompts, "completions": group.completions, "fields": fields}
    label = group.column(settings.label_field, "Set rewards.N.args.label_field.")
    queries = [group.prompt + completion for completion in group.completions]
    return {"query": queries, "prompts": prompts, "labels": [label] * count}
