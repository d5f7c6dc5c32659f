from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import JsonlSink
from hpc_grpo.report.page import write_page
from hpc_grpo.report.samples import SHOWN_OF_A_STEP, SHOWN_STEPS, take_samples
from hpc_grpo.run.paths import RunDir
from tests.support.command import call
from tests.support.run_builder import RunBuilder

HOSTILE = "</script></pre><img src=x onerror=alert(1)> {{ 7*7 }} $\\frac$ \x1b[2J"
VOID = {"meta", "img", "br", "input"}


class StrictPage(HTMLParser):
    """Reads a page and fails where an element is not closed as it was opened."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def write_lines(run: RunDir, lines: Sequence[Mapping[str, float]]) -> None:
    sink = JsonlSink(run.metrics)
    for step, metrics in enumerate(lines, start=1):
        sink.write(StepRecord(step=step, total_steps=95, metrics=metrics))
    sink.close()


def write_steps(run: RunDir, num_steps: int, **more: float) -> None:
    times = {"time/step_s": 4.0, "time/train_s": 3.0, "time/eta_s": 99.0, "lag/mean": 1.0, **more}
    write_lines(run, [{"reward/mean": step / 10, **times} for step in range(1, num_steps + 1)])


def write_rollouts(run: RunDir, step: int, count: int = 1, **changes: object) -> None:
    path = run.rollouts(step)
    path.parent.mkdir(exist_ok=True)
    line = {"ordinal": 3, "source": "sums", "prompt": "1+1?", "completion": "2", "reward": 0.5}
    more = {"rewards": {"math": 1.0, "format": 0.25}, "advantage": None, "tokens": 7}
    path.write_text((json.dumps({**line, **more, **changes}) + "\n") * count)


def page_of(path: Path) -> StrictPage:
    return StrictPage(path.read_text())


def svg_of(page: StrictPage, title: str) -> str:
    (source,) = (str(image["src"]) for image in page.all("img") if image["alt"] == title)
    head, _, data = source.partition(",")
    assert head == "data:image/svg+xml;base64"
    text = base64.b64decode(data, validate=True).decode()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    return text


def test_runs_are_drawn_over_each_other_with_what_ended_them_and_their_rollouts(
    built: RunBuilder, tmp_path: Path
) -> None:
    built.attempt(1, "crash", why="torch.OutOfMemoryError: CUDA out of memory")
    built.attempt(2, "complete")
    built.chain("11", "12")
    write_steps(built.run, 5)
    write_rollouts(built.run, 4, 3, completion="It is 2.", advantage=[0.5, -0.25])
    other = RunBuilder(tmp_path / "other")
    write_steps(other.run, 3)
    page = page_of(write_page([built.run, other.run], tmp_path / "report.html"))
    assert all(f">{name}<" in svg_of(page, "reward/mean") for name in ("adder", "other"))
    for title in ("lag/mean", "adder: seconds of a step by phase", "Length of completions", "adder"):
        svg_of(page, title)
    for text in ("crash: out of GPU memory", "Learner: lower", "math 1.000, format 0.250, advantage 0.500, -0.250"):
        assert text in page.text
    assert "It is 2." in page.text
    links = {link["href"] for link in page.all("a")}
    assert all(link and (tmp_path / link).exists() for link in links), links


def test_hostile_texts_neither_become_elements_nor_run(tmp_path: Path) -> None:
    built = RunBuilder(tmp_path / "<img src=y onerror=alert(2)>")
    built.attempt(1, "crash", why=HOSTILE, lost_nodes={"n2": HOSTILE})
    write_steps(built.run, 2, **{f"reward/{HOSTILE.replace('/', '')}": 1.0})
    write_rollouts(built.run, 1, completion=HOSTILE)
    path = write_page([built.run], tmp_path / "report.html")
    page = page_of(path)
    assert all(set(image) == {"src", "alt"} for image in page.all("img"))
    assert all(svg_of(page, str(image["alt"])) for image in page.all("img"))
    assert "\x1b" not in path.read_text()
    assert HOSTILE.replace("\x1b", "\\x1b") in page.texts
    (script,) = re.findall("<script>(.*?)</script>", path.read_text(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_of_many_rollouts_a_few_of_evenly_spread_steps_are_taken(run_dir: RunDir) -> None:
    for step in range(1, 102):
        write_rollouts(run_dir, step, SHOWN_OF_A_STEP + 8, completion="x" * 10_000)
    samples = take_samples(run_dir)
    assert samples.steps == [1, 26, 51, 76, 101]
    assert len(samples.rollouts) == SHOWN_STEPS * SHOWN_OF_A_STEP
    assert samples.num_steps == 101
    assert samples.num_bytes == sum(path.stat().st_size for path in run_dir.rollouts(1).parent.iterdir())
    assert samples.rollouts[0].completion.endswith("x [… 7,000 characters more …] " + "x" * 1500)
    assert {step: len(lengths) for step, lengths in samples.lengths.items()} == {1: 40, 101: 40}


def test_numbers_that_no_float_holds_are_shown_as_infinite(built: RunBuilder, tmp_path: Path) -> None:
    write_rollouts(built.run, 1, reward=10**400, rewards={"math": -(10**400)}, tokens=10**400)
    assert take_samples(built.run).lengths == {1: []}
    assert "reward inf, math -inf, advantage -" in page_of(write_page([built.run], tmp_path / "page.html")).text


def test_runs_whose_folders_have_the_same_name_are_told_apart(tmp_path: Path) -> None:
    built = [RunBuilder(tmp_path / place) for place in ("one/july/adder", "two/july/adder")]
    for one in built:
        write_steps(one.run, 2)
    page = page_of(write_page([one.run for one in built], tmp_path / "report.html"))
    assert all(f">{name}/july/adder<" in svg_of(page, "reward/mean") for name in ("one", "two"))


def test_a_run_that_has_recorded_no_phase_has_no_picture_of_them(built: RunBuilder, tmp_path: Path) -> None:
    write_lines(built.run, [{"reward/mean": 0.5}] * 2)
    page = page_of(write_page([built.run], tmp_path / "report.html"))
    assert "Where the time went" not in page.texts
    assert "reward/mean" in [image["alt"] for image in page.all("img")]


def test_time_that_no_phase_covers_is_told(built: RunBuilder, tmp_path: Path) -> None:
    write_steps(built.run, 2)
    page = page_of(write_page([built.run], tmp_path / "report.html"))
    assert re.findall(r"(train|other) (6 s|2 s) (75%|25%)", page.text) == [
        ("train", "6 s", "75%"),
        ("other", "2 s", "25%"),
    ]


@pytest.mark.parametrize("out", [None, "both.html"])
def test_the_command_writes_pictures_and_a_page_that_is_the_users_alone(
    built: RunBuilder, tmp_path: Path, out: str | None
) -> None:
    write_steps(built.run, 2)
    words = ["--out", str(tmp_path / out)] if out else []
    result = call("report", str(built.run.path), *words)
    page = tmp_path / out if out else built.run.path / "report.html"
    assert result.output.endswith(f"Page: {page}\n")
    assert (built.run.path / "report.png").is_file()
    assert page.stat().st_mode & 0o077 == 0


def test_a_run_given_twice_is_one_and_a_folder_that_is_no_run_hides_none(
    built: RunBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(built.run, 2)
    (tmp_path / "elsewhere" / "adder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = call("report", "adder", str(built.run.path))
    assert result.output.count("Picture: ") == 1
    assert result.output.endswith(f"Page: {built.run.path / 'report.html'}\n")


def test_the_time_of_steps_is_drawn_by_node_and_the_slowest_one_is_named(built: RunBuilder, tmp_path: Path) -> None:
    times = {"node/sample_s/n1": 2.0, "node/sample_s/n2": 3.0, "node/train_s/n1": 1.0, "node/train_s/n2": 1.5}
    write_steps(built.run, 6, **times, **{"node/median_s": 3.0})
    page = page_of(write_page([built.run], tmp_path / "page.html"))
    drawn = svg_of(page, "adder: seconds of a step by node")
    assert all(f">{text}<" in drawn for text in ("n1", "n2", "sample", "train"))
    assert "the slowest node n2 takes 1.50 times as long as the others do" in page.text


def test_what_processes_use_is_drawn_as_far_as_it_is_on_record(built: RunBuilder, tmp_path: Path) -> None:
    used = {"cpu_cores/driver-0": 0.1, "cpu_cores/engine-0": 1.0, "gpu_utilization/engine-0": 0.8}
    write_steps(built.run, 3, **{f"process/{name}": value for name, value in used.items()})
    page = page_of(write_page([built.run], tmp_path / "page.html"))
    assert all(f">{name}<" in svg_of(page, "adder: CPU cores by process") for name in ("driver-0", "engine-0"))
    titles = [str(image["alt"]).removeprefix("adder: ") for image in page.all("img")]
    assert [title for title in titles if "by process" in title] == [
        "CPU cores by process",
        "GPU utilization by process",
    ]
