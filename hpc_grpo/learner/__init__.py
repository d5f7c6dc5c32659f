"""The learner: gradients. `learner/manifest.py` alone may be imported without torch."""
