"""A step callback of your own: the run is complete once pass@1 of held-out prompts no longer rises.

    hpc-grpo train CONFIG eval.every=10 \\
        train.on_step='{name: examples/early_stopping.py:no_gain, args: {patience: 3}}'
"""


def no_gain(step, metrics, evals, metric="eval/pass@1", patience=3, min_gain=0.0):
    """Return why the run is complete after `step`, or None to continue.

    `evals` maps the step of each eval so far to its metrics, in order. `patience` counts evals without a gain.
    """
    best, stale = float("-inf"), 0
    for values in evals.values():
        if values[metric] > best + min_gain:
            best, stale = values[metric], 0
        else:
            stale += 1
    if stale >= patience:
        return f"{metric} has not risen above {best:.3f} in {stale} evals."
    return None
