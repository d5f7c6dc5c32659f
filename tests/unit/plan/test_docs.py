"""docs/memory.md: its commands run, its outputs are what they print, its table is what the plan finds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpc_grpo.cli import check
from hpc_grpo.plan import budgets, disk
from hpc_grpo.plan.memory import GH200, HARDWARE, STATES, StateBytes
from hpc_grpo.plan.step import num_steps
from hpc_grpo.simulate import assumed
from hpc_grpo.simulate.placement import CARD_DEFAULT, Split, layout
from hpc_grpo.system.disk import Room
from hpc_grpo.types import GIB
from tests.unit.plan.plan_configs import PLACEMENTS, plan_7b_config, splits_of

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "memory.md").read_text()
SHOWN = re.findall(r"```bash\nhpc-grpo ([^\n]*)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(autouse=True)
def a_login_node_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCHDIR", "/scratch/me")
    monkeypatch.setattr(disk, "room_in", lambda _: Room(4096 * GIB, "left of the user quota"))


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {f"hpc-grpo {command}" for command, _ in SHOWN}))
def test_every_command_runs(command: str) -> None:
    program, name, *words = shlex.split(command)
    assert (program, name) == ("hpc-grpo", "plan")
    result = CliRunner().invoke(check.plan, words, catch_exceptions=False)
    assert result.exit_code in (0, 78)


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command for command, _ in SHOWN])
def test_outputs_are_what_the_commands_print(command: str, printed: str) -> None:
    assert CliRunner().invoke(check.plan, shlex.split(command)[1:], catch_exceptions=False).stdout == printed


def test_there_are_outputs_to_compare() -> None:
    assert len(SHOWN) == 2


def test_options_are_those_of_the_command() -> None:
    documented = set(re.findall(r"`(--[\w-]+)[^`]*`", PAGE))
    options = ("nodes", "size", "hardware", "gpu-memory-gib", "host-memory-gib")
    assert documented == {f"--{name}" for name in options}
    assert documented <= {option for param in check.plan.params for option in param.opts}


def terms(whole: int, shard: int) -> str:
    return " + ".join([f"{whole} P"] * bool(whole) + [f"{shard} P / W"] * bool(shard))


def host_terms(row: StateBytes) -> str:
    sizes = [row.host_optimizer_shard, row.host_gradients_shard, row.host_staging_shard]
    return f"({' + '.join(str(size) for size in sizes if size)}) P / W" if any(sizes) else ""


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_the_table_of_states_is_the_one_of_the_code(stage: int, is_offloaded: bool) -> None:
    row = STATES["bfloat16", stage, is_offloaded]
    cells = [
        f"stage {stage}" + (", offload" if is_offloaded else ""),
        terms(row.weights_whole, row.weights_shard),
        terms(row.gradients_whole, row.gradients_shard),
        terms(0, row.optimizer_shard),
        host_terms(row),
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    assert cells in rows


def placement_row(size: str, num_nodes: int) -> str:
    """Write a row of the page's table of placements: what is recommended, beside one learner and three engines."""
    plan = plan_7b_config(size, num_nodes)
    splits, steps = splits_of(size, num_nodes), num_steps(plan)
    if not splits or steps is None:
        return f"| {size} | {num_nodes} | nothing fits | | | | | | |"
    best, default = splits[0], next(split for split in splits if layout(split.plan) == CARD_DEFAULT)
    cells = [f"{split_name(best)}{', no room for the export' if best.plan.warnings else ''}"]
    times = (best.ahead.step_s, best.in_turn.step_s, default.ahead.step_s, default.in_turn.step_s)
    cells += [f"{seconds:,.0f}" for seconds in times]
    cells[-1] += ", offload" if default.plan.config.train.offload_optimizer == "cpu" else ""
    cells += [f"{seconds * steps * num_nodes / 3600:,.0f}" for seconds in (times[0], times[-1])]
    return f"| {size} | {num_nodes} | {' | '.join(cells)} |"


def split_name(split: Split) -> str:
    learners, engines, parallel = layout(split.plan)
    train, wide = split.plan.config.train, f" of {parallel} GPUs" if parallel > 1 else ""
    offload = ", offload" if train.offload_optimizer == "cpu" else ""
    return f"{learners} + {engines}{wide}, ZeRO-{train.zero_stage}{offload}"


@pytest.mark.parametrize(("size", "num_nodes"), PLACEMENTS)
def test_the_table_of_placements_is_what_the_plan_finds(size: str, num_nodes: int) -> None:
    assert placement_row(size, num_nodes) in PAGE.splitlines()


def test_assumed_numbers_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"{budgets.FRAGMENTATION:.0%} that torch's allocator cannot use" in text
    assert f"{budgets.LEARNER_CONTEXT_BYTES // GIB} GiB for CUDA and NCCL" in text
    graphs_gib = (budgets.ENGINE_CONTEXT_BYTES + budgets.CUDA_GRAPH_BYTES) // GIB
    assert f"CUDA and its graphs need {graphs_gib} GiB (assumed)" in text
    assert f"{budgets.GPU_PROCESS_GIB:g} GiB for each learner" in text
    assert f"{budgets.GRADING_PROCESS_GIB:g} GiB for each reward process" in text
    assert f"{budgets.SYSTEM_GIB:g} GiB for driver" in text
    shares = (assumed.TRAINING_SHARE, assumed.READING_SHARE, assumed.NETWORK_SHARE, assumed.HOST_SHARE)
    assert shares == (0.4, 0.6, 0.8, 0.3)
    assert "(W · 0.4 · 989e12)" in text
    assert "(0.6 · 4.0e12)" in text
    cpu = assumed.CPU_DECODING
    assert f"{cpu.fixed_s * 1e3:g} ms and {cpu.part_s * 1e6:g} µs per sequence" in text
    assert f"all-reduces of {assumed.ALL_REDUCE_S * 1e6:g} µs" in text
    assert f"is {assumed.NETWORK_SHARE:.0%} of {GH200.network_bytes_per_s / 1e9:g} GB/s between nodes" in text
    assert f"{assumed.NETWORK_SHARE:.0%} of {GH200.nvlink_bytes_per_s / 1e9:g} GB/s" in text
    assert f"{assumed.READING_SHARE:.0%} of {GH200.host_link_bytes_per_s / 1e9:g} GB/s" in text
    assert f"{assumed.HOST_SHARE:.0%} of {GH200.host_memory_bytes_per_s / 1e9:g} GB/s of host memory" in text
    assert f"lognormal with sigma 1, a mean of {assumed.MEAN_SHARE:.0%} of `rollout.max_new_tokens`" in text
    assert f"with more than {assumed.MOST_ROLLOUTS:,} rollouts" in text
    assert budgets.REDUCE_BUCKET_ELEMENTS == 5 * 10**8
    assert budgets.SHARED_MEMORY_SHARE == 0.5


@pytest.mark.parametrize(
    ("name", "sequences", "shown"), [("h100-sxm", 64, 13.0), ("h100-sxm", 120, 21.4), ("h200", 120, 14.9)]
)
def test_published_decode_steps_stand_beside_what_the_plan_expects(name: str, sequences: int, shown: float) -> None:
    """Llama 7B in FP8: 6.74e9 bytes of weights, and 2 x 32 x 4,096 of cache for each of 128 + 1,024 tokens."""
    byte_s = 1 / (HARDWARE[name].gpu_bytes_per_s * assumed.READING_SHARE)
    rate = assumed.DecodeRate(6.74e9 * byte_s, 1152 * 2 * 32 * 4096 * byte_s, held=sequences, is_ahead=True)
    assert rate(sequences) * 1e3 == pytest.approx(shown, abs=0.05)
    assert f"| {shown} ms |" in PAGE


def test_published_training_stands_beside_what_the_plan_expects() -> None:
    rates = [assumed.TRAINING_SHARE * GH200.gpu_flops_per_s / (flops * 8.03e9) for flops in (8, 6)]
    assert "{:,.0f} with, {:,.0f} without".format(*rates) in PAGE


def test_the_export_of_32b_on_two_nodes_is_warned_about() -> None:
    assert "32B | 2 | ZeRO-3 with `train.offload_optimizer=cpu`; the export does not fit" in PAGE
    for gib in (1, 16):
        plan = plan_7b_config("32B", 2, "train.offload_optimizer=cpu", f"launch.object_store_gib={gib}")
        assert plan.fits
        assert plan.warnings
