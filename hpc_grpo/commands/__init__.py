"""The subcommands of `hpc-grpo`, by what a user does with them."""
