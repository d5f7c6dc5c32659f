"""The grader's process: decodes completions and has reward workers score them."""
