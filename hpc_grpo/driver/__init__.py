"""The driver's process: the training loop, and its handles on learners, engines and graders."""
