"""An advantage of one's own: prompts that are rarely solved count more than those that nearly always are.

    hpc-grpo train CONFIG \
        loss.advantage=examples/hard_prompts_advantage.py:hard_prompts 'loss.advantage.args={power: 2}'

An advantage sees the rewards of one whole prompt, in the driver, as floats; where `valid` is False there is no reward.
"""


def hard_prompts(rewards, valid, power=1.0):
    """Return (reward - mean) * (share of rollouts without a reward)^power for each rollout; 0.0 where not valid."""
    counted = [reward for reward, ok in zip(rewards, valid, strict=True) if ok]
    if not counted:
        return (0.0,) * len(rewards)
    mean = sum(counted) / len(counted)
    difficulty = (sum(reward <= 0.0 for reward in counted) / len(counted)) ** power
    return tuple((r - mean) * difficulty if ok else 0.0 for r, ok in zip(rewards, valid, strict=True))
