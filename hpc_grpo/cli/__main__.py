"""`python -m hpc_grpo.cli`: the command without its script, as job scripts call it."""

from hpc_grpo.cli import main

main(prog_name="hpc-grpo")
