"""The grader's process: decodes completions and sends them to reward workers."""
