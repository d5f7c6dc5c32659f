"""The page in a real Chromium: what a reader sees and does, and that nothing leaves the machine."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Browser, Dialog, Page, Request, sync_playwright

from hpc_grpo.report import page as page_module
from hpc_grpo.report.page import write_page
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.paths import RunDir
from tests.support.run_builder import RunBuilder
from tests.support.run_pages import CONFIG, HOSTILE, finished_run, write_steps
from tests.unit.report.test_dashboard import served

CHROMIUM = shutil.which("chromium")
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: make browser-install")


@dataclass
class Tab:
    """A page, with what its console said and what it asked for."""

    page: Page
    said: list[str]
    asked: list[str]

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def check(self) -> None:
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(("file:", "data:", "http://127.0.0.1:"))] == []


Open = Callable[..., Tab]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[Open]:
    tabs = []

    def open_tab(address: Path | str, width: int = 1400, scheme: Any = "light", bypass_csp: bool = False) -> Tab:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=bypass_csp
        )
        tab = Tab(context.new_page(), [], [])
        tabs.append(tab)

        def note(request: Request) -> None:
            tab.asked.append(request.url)

        def refuse(dialog: Dialog) -> None:
            tab.said.append(f"a completion ran: {dialog.message}")
            dialog.dismiss()

        tab.page.set_default_timeout(15_000)
        tab.page.on("console", lambda message: tab.said.append(message.text))
        tab.page.on("pageerror", lambda error: tab.said.append(str(error)))
        tab.page.on("request", note)
        tab.page.on("dialog", refuse)
        tab.page.goto(address.as_uri() if isinstance(address, Path) else address)
        return tab

    yield open_tab
    for tab in tabs:
        tab.check()
        tab.page.context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    return write_page([finished_run(folder / "adder").run], folder / "page.html")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, one with another learning rate, one that failed at its start, one that is new."""
    folder = tmp_path_factory.mktemp("comparison")
    failed = RunBuilder(folder / "failed")
    failed.attempt(1, "config", why="model.path: there is no such folder", exit_code=78)
    built = (finished_run(folder / "one"), finished_run(folder / "other", "2.0e-6"), failed, RunBuilder(folder / "new"))
    return write_page([one.run for one in built], folder / "page.html")


@pytest.mark.parametrize(
    ("pages", "width", "scheme"),
    [("report", 700, "light"), ("report", 1400, "dark"), ("comparison", 1400, "light"), ("comparison", 700, "dark")],
)
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(
    request: pytest.FixtureRequest, open_tab: Open, pages: str, width: int, scheme: str
) -> None:
    tab = open_tab(request.getfixturevalue(pages), width, scheme, bypass_csp=True)
    tab.page.locator(".prompts button").first.wait_for()
    tab.page.evaluate(AXE)
    for run in [None, "failed"] if pages == "comparison" else [None]:
        if run:
            tab.page.locator(f'[data-of="name {run}"]').click()
        found = tab.page.evaluate("axe.run()")["violations"]
        assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []
    assert tab.page.evaluate("document.documentElement.scrollWidth") == width


def test_a_finished_run_shows_its_result_and_a_click_on_a_curve_the_rollouts_of_that_step(
    open_tab: Open, report: Path
) -> None:
    tab = open_tab(report)
    assert tab.text("#headline") == "0.20 → 0.40 [0.10, 0.90]"
    assert "CUDA out of memory" in tab.text("#attempts")
    assert tab.page.locator("#facts a").get_attribute("href") == "https://wandb.ai/lab/hpc-grpo/runs/0123abcd"
    assert tab.text("#detail h4 >> nth=2").startswith("step 20")
    assert tab.page.locator("#chart-nodes li").all_inner_texts() == ["nid002 sample 3.5\xa0s", "nid001 train 2.5\xa0s"]
    over = tab.page.locator("#chart-speed, #chart-lag").first.locator(".u-over")
    box = over.bounding_box()
    assert box
    over.click(position={"x": box["width"] * 12.4 / 20.8, "y": 50})
    tab.page.get_by_role("button", name="Training, by step").click()
    tab.page.get_by_text("adder, step 12: 2 prompts").wait_for()
    assert tab.text(".prompts button >> nth=0").split("\n")[0].startswith("3+1?")
    about = ["reward 0.00", "advantage +0.50", "7 tokens"]
    assert tab.text("#detail .answer.wrong").split("\n") == ["It is 3.", "", "✗ wrong", *about]


def test_hostile_completions_are_text(open_tab: Open, report: Path) -> None:
    tab = open_tab(report)
    tab.page.locator("#step").evaluate("step => { step.value = 12; step.dispatchEvent(new Event('input')); }")
    tab.page.get_by_role("button", name="Training, by step").click()
    tab.page.locator(".prompts button").nth(1).click()
    assert HOSTILE.split(" \x1b")[0] in tab.text("#detail")
    assert tab.page.locator("#detail pre img, #detail svg").count() == 0


def test_a_prompt_is_shown_with_its_images(open_tab: Open, report: Path) -> None:
    tab = open_tab(report)
    tab.page.locator("#step").evaluate("step => { step.value = 12; step.dispatchEvent(new Event('input')); }")
    tab.page.get_by_role("button", name="Training, by step").click()
    tab.page.locator(".prompts button").nth(1).click()
    shown = tab.page.locator("#detail img")
    assert shown.evaluate("async (own) => (await own.decode(), [own.naturalWidth, own.naturalHeight])") == [20, 10]


def test_the_keyboard_alone_walks_through_prompts_and_steps_and_zooms(open_tab: Open, report: Path) -> None:
    tab = open_tab(report)
    tab.page.locator(".prompts button").first.focus()
    tab.page.keyboard.press("ArrowDown")
    assert tab.page.locator(".prompts button").nth(1).get_attribute("aria-current") == "true"
    assert tab.page.evaluate("document.activeElement.getAttribute('aria-current')") == "true"
    tab.page.locator("#step").focus()
    tab.page.keyboard.press("ArrowLeft")
    assert tab.text("#step-now") == "19"
    tab.page.locator("#closer").press("Enter")
    tab.page.locator("#whole").press("Enter")
    tab.page.locator("#whole").wait_for(state="hidden")
    tab.page.locator("#smoothing").press("ArrowRight")
    assert tab.text("#smoothing-now") == "0.05"
    tab.page.locator("#theme").press("Enter")
    assert tab.page.locator("html").get_attribute("data-theme") == "dark"


def test_an_episode_is_shown_turn_by_turn(open_tab: Open, report: Path) -> None:
    tab = open_tab(report)
    tab.page.get_by_role("button", name="Training, by step").click()
    tab.page.locator(".turn").first.wait_for()
    assert [own.split("\n") for own in tab.page.locator(".turn").all_inner_texts()] == [
        ["model · reward 0.00", "[8]"],
        ["environment", "Lower."],
        ["model · reward 1.00", "[6]"],
    ]


def test_runs_are_drawn_over_each_other_with_what_differs_in_their_configs(open_tab: Open, comparison: Path) -> None:
    tab = open_tab(comparison)
    assert tab.page.locator("#chart-learned li").count() == 2
    assert (
        tab.text("#diff-table tbody tr >> nth=0").split()
        == ["data.train.path", "sums.jsonl", "sums.jsonl"] + ["default"] * 2
    )
    assert tab.text("#diff-table tr:has-text('train.lr')").split()[:3] == ["train.lr", "1e-06", "2e-06"]
    tab.page.get_by_role("button", name="failed").click()
    assert tab.text("#state") == "✗ failed"
    assert tab.text("#headline") == "No step has ended yet."
    assert "model.path: there is no such folder" in tab.text("#notes")
    tab.page.get_by_role("button", name="new", exact=True).click()
    assert tab.text("#attempts") == "No attempt has begun."


def test_the_dashboard_follows_a_run_and_rests_while_nobody_looks(open_tab: Open, tmp_path: Path) -> None:
    built = RunBuilder(tmp_path / "adder")
    built.attempt(1)
    built.hold(1)
    built.state(1, step=2)
    write_steps(built.run, range(3))
    with served(tmp_path) as server:
        tab = open_tab(server.url)
        tab.page.locator("#step-now", has_text="2").wait_for()
        assert tab.text("#state") == "● training"
        assert "As of" not in tab.text("#said")
        write_steps(built.run, range(3, 5))
        built.state(1, step=4)
        tab.page.locator("#step-now", has_text="4").wait_for()
        tab.page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
        deadline, count = time.monotonic() + 15, -1
        while count != len(tab.asked) and time.monotonic() < deadline:  # until what is under way has come
            count = len(tab.asked)
            tab.page.wait_for_timeout(300)
        for _ in range(3):
            tab.page.evaluate("poll()")
        assert len(tab.asked) == count
        with tab.page.expect_response("**/api/runs"):
            tab.page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        wrong = open_tab(server.url + "x")
        wrong.page.get_by_text("The token in the address is not that of this dashboard").wait_for()
        assert all("403" in text for text in wrong.said)
        wrong.said.clear()


def test_a_report_of_a_run_that_trains_says_when_it_was_written(open_tab: Open, tmp_path: Path) -> None:
    built = RunBuilder(tmp_path / "adder")
    built.attempt(1)
    built.hold(1)
    built.state(1, step=2, eta_s=122.0)
    write_steps(built.run, range(3))
    tab = open_tab(write_page([built.run], tmp_path / "page.html"))
    said = tab.text("#said")
    assert re.fullmatch(r"As of \d+ \w+, \d\d:\d\d\. .*About 2\xa0min\xa02\xa0s of training are left\..*", said)
    spans = tab.page.evaluate("[3.46, 12, 959.7, 3599.7, 3630, 7199, 200000].map(FORMATS.seconds)")
    assert [own.replace("\xa0", " ") for own in spans] == [
        "3.5 s",
        "12 s",
        "16 min 0 s",
        "1 h 0 min",
        "1 h 1 min",
        "2 h 0 min",
        "2 d 8 h",
    ]


def test_a_tile_judges_by_the_first_and_the_last_tenth_of_the_steps(open_tab: Open, tmp_path: Path) -> None:
    built = RunBuilder(tmp_path / "adder")
    for step in range(30):
        more = {"reward/mean": 0.13 if step == 29 else 0.35 + step / 50, "tokens/truncated_fraction": step / 10_000}
        write_steps(built.run, range(step, step + 1), **more)
    tab = open_tab(write_page([built.run], tmp_path / "page.html"))
    tiles = {own.split("\n")[0]: own.split("\n")[1:] for own in tab.page.locator(".tile").all_inner_texts()}
    assert tiles["reward, training"] == ["0.13", "▲ 0.27, better"]
    assert tiles["pass@1, held out"] == ["0.40", "▲ 0.20, better"]
    assert tiles["cut off at the limit"] == ["0\xa0%", "= 0 points"]


def test_of_a_thinned_run_the_newest_step_and_its_rollouts_are_shown(
    open_tab: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "_MOST_POINTS", 4)
    tab = open_tab(write_page([finished_run(tmp_path / "adder").run], tmp_path / "page.html"))
    assert tab.text("#step-now") == "20"
    tab.page.get_by_role("button", name="Training, by step").click()
    tab.page.get_by_text("adder, step 20: 1 prompt").wait_for()


def test_in_a_narrow_window_numbers_and_states_stay_in_one_line_and_problems_have_room(
    open_tab: Open, tmp_path: Path
) -> None:
    built = [finished_run(tmp_path / f"adder-with-a-learning-rate-{rate}", rate) for rate in ("0.00025", "1.0", "2.0")]
    for at, one in enumerate(built):
        long = CONFIG.replace("LR", f"0.0002{at}").replace("sums.jsonl", f"/scratch/{at}/" + "sums" * 9)
        write_atomic(one.run.config, long)
    failed = RunBuilder(tmp_path / "failed")
    failed.attempt(1, "config", why="model.path: there is no such folder: " + "/scratch/models" * 3, exit_code=78)
    tab = open_tab(write_page([*(one.run for one in built), failed.run], tmp_path / "page.html"), 700)
    lines = (
        "own => { const all = document.createRange(); all.selectNodeContents(own); return all.getClientRects().length }"
    )
    numbers = tab.page.locator("#diff-table tr:has-text('train.lr') td")
    assert [own.evaluate(lines) for own in numbers.all()] == [1] * 4
    assert [own.evaluate(lines) for own in tab.page.locator("#runs-table .kind").all()] == [1] * 4
    assert all(own.evaluate("own => own.clientHeight") < 100 for own in tab.page.locator("#runs-table tr").all())


PIXELS = """([chart, name]) => { const canvas = document.querySelector(`#chart-${chart} canvas`), rows = [];
  const wanted = color(name).match(/[0-9a-f]{2}/g).map((part) => parseInt(part, 16));
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4)
    if (wanted.every((part, of) => data[at + of] === part)) rows.push(Math.floor(at / 4 / canvas.width));
  return new Set(rows).size; }"""
"""How many rows of a chart have a pixel of a color."""


def test_a_change_of_the_theme_changes_the_bars_too(open_tab: Open, report: Path) -> None:
    tab = open_tab(report)
    tab.page.locator("#theme").click()
    tab.page.wait_for_function(f"own => ({PIXELS})(own) > 20", arg=["phases", "a"])


def test_a_long_run_has_no_lines_of_attempts_and_no_dots_that_touch(
    open_tab: Open, report: Path, tmp_path: Path
) -> None:
    built = RunBuilder(tmp_path / "adder")
    for number in range(1, 23):
        built.attempt(number, "crash", first_step=10 * number)
        more = {"eval/pass@1": 0.5, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.6}
        write_steps(built.run, range(10 * number - 10, 10 * number), number, **more)
    few, many = open_tab(report), open_tab(write_page([built.run], tmp_path / "page.html"))
    assert few.page.evaluate(PIXELS, ["lag", "g"]) > 20
    assert many.page.evaluate(PIXELS, ["lag", "g"]) == 0
    assert many.page.evaluate(PIXELS, ["learned", "a"]) < 6
    many.page.evaluate("zoom(0, 20)")
    many.page.wait_for_function(f"own => ({PIXELS})(own) > 6", arg=["learned", "a"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phases_stand_out_from_the_page_and_neighbors_from_each_other(
    open_tab: Open, report: Path, scheme: str
) -> None:
    own = "Object.entries({ ...PHASE_COLORS, card: 'card' }).map(([name, of]) => [name, color(of)])"
    colors = dict(open_tab(report, scheme=scheme).page.evaluate(own))

    def light(phase: str) -> float:
        digits = colors[phase][1:] if len(colors[phase]) == 7 else "".join(2 * one for one in colors[phase][1:])
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    def contrast(one: str, other: str) -> float:
        return max(light(one), light(other)) / min(light(one), light(other))

    assert all(contrast(phase, "card") >= 3 for phase in colors if phase != "card")
    greys = ("bringing up Ray", "loading the model", "other")
    assert all(contrast(one, other) > 1.4 for one, other in itertools.combinations(greys, 2))


def test_the_dashboard_draws_on_while_it_compares_and_while_another_run_is_read(open_tab: Open, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_steps(RunBuilder(tmp_path / name).run, range(3))
    with served(tmp_path) as server:
        tab = open_tab(server.url)
        for name in ("one", "two"):
            tab.page.locator(f'[data-of="box {name}"]').check()
        tab.page.locator("#chart-learned li").nth(1).wait_for()
        write_steps(RunDir(tmp_path / "two"), range(3, 11))
        tab.page.locator("#chart-learned li", has_text="two 0.30 [0.10, 0.90]").wait_for()
        RunBuilder(tmp_path / "three")
        tab.page.route("**/api/run?run=three*", lambda route: None)
        tab.page.locator('[data-of="name three"]').click()
        tab.page.get_by_text("Reading three …").wait_for()
        tab.page.evaluate("for (const { chart } of drawn) chart.redraw()")
        tab.page.locator("#smoothing").press("ArrowRight")
        tab.page.locator("#step").press("ArrowLeft")
        tab.page.wait_for_timeout(300)


def test_a_chart_of_zeros_has_an_axis_to_1(open_tab: Open, tmp_path: Path) -> None:
    built = RunBuilder(tmp_path / "adder")
    write_steps(built.run, range(3), **{"correction/masked_fraction": 0.0})
    tab = open_tab(write_page([built.run], tmp_path / "page.html"))
    own = "drawn.find(({ chart }) => chart.root.closest('#chart-correction')).chart.scales.y"
    assert tab.page.evaluate(f"[{own}.min, {own}.max]") == [0, 1]
