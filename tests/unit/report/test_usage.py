"""What nodes and processes took, on the page."""

from __future__ import annotations

from pathlib import Path

from hpc_grpo.report.page import write_page
from hpc_grpo.report.usage import draw_nodes, draw_processes
from tests.support.run_builder import RunBuilder
from tests.unit.report.test_page import page_of, svg_of, write_steps


def test_the_time_of_steps_is_drawn_by_node_and_the_slowest_one_is_named(built: RunBuilder, tmp_path: Path) -> None:
    times = {"node/sample_s/n1": 2.0, "node/sample_s/n2": 3.0, "node/train_s/n1": 1.0, "node/train_s/n2": 1.5}
    write_steps(built.run, 6, **times, **{"node/median_s": 3.0})
    page = page_of(write_page([built.run], tmp_path / "page.html"))
    (drawn,) = [image for image in page.all("img") if str(image["alt"]).endswith("seconds of a step by node")]
    assert all(f">{text}<" in svg_of(drawn) for text in ("n1", "n2", "sample", "train"))
    assert "the slowest node n2 takes 1.50 times as long as the others do" in page.text


def test_cores_and_memory_are_drawn_by_process(built: RunBuilder, tmp_path: Path) -> None:
    used = {"process/cpu_cores/driver-0": 0.1, "process/cpu_cores/engine-0": 1.0, "process/memory_gib/engine-0": 0.8}
    write_steps(built.run, 3, **used)
    page = page_of(write_page([built.run], tmp_path / "page.html"))
    images = {str(image["alt"]): image for image in page.all("img")}
    cores = svg_of(images[f"{built.run.path.name}: CPU cores by process"])
    assert all(f">{name}<" in cores for name in ("driver-0", "engine-0"))
    assert f"{built.run.path.name}: memory in GiB by process" in images
    assert not any("GPU" in title for title in images)


def test_gpus_are_drawn_by_process_of_a_run_that_has_some() -> None:
    used = {"process/gpu_memory_gib/learner-0": 5.0, "process/gpu_utilization/learner-0": 0.5}
    pictures = draw_processes("run", {1: used, 2: used})
    assert [picture.title for picture in pictures] == [
        "run: GPU memory in GiB by process",
        "run: GPU utilization by process",
    ]


def test_a_run_without_such_metrics_has_no_such_pictures() -> None:
    metrics = {1: {"time/step_s": 3.0}}
    assert draw_nodes("run", metrics) == draw_processes("run", metrics) == []
