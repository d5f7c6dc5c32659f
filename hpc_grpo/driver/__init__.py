"""The driver's process: the training loop, and its handles to learners, engines and graders."""
