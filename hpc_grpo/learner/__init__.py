"""The learner: gradients. `manifest.py` alone may be imported without torch."""
