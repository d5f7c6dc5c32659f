#!/usr/bin/env python3
"""Train by GRPO: `python train_grpo.py --model … --dataset … --reward_function …` is `hpc-grpo grpo …`."""

import sys

from hpc_grpo.cli import main

if __name__ == "__main__":
    main(["grpo", *sys.argv[1:]], prog_name="hpc-grpo")
