"""The advantages that `loss.advantage` chooses from, one file each.

An advantage is `f(rewards, valid, normalize_std) -> advantages`, each `[G]`: the rollouts of one whole prompt, before
any filter. `valid` is False where the reward could not be computed; such a rollout is not trained on. One that is
registered with `whole_step=True` takes and gives one such sequence for each group of a step.
"""
