"""A task, a model and warm-start demonstrations small enough to train end to end on two CPU cores."""
