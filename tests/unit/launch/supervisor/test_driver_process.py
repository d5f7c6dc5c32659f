from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_grpo.launch.supervisor.driver_process import Driver
from hpc_grpo.system.process_tree import session_members

DEADLINE_S = 30.0
READY = "import time; print('ready', flush=True); time.sleep(60)"

StartDriver = Callable[[str], Driver]


@pytest.fixture
def start_driver(tmp_path: Path) -> Iterator[StartDriver]:
    """Starts programs as drivers, and ends them after the test."""
    drivers: list[Driver] = []

    def start(program: str) -> Driver:
        drivers.append(Driver([sys.executable, "-c", program], os.environ, tmp_path, tmp_path / "driver.log"))
        return drivers[-1]

    yield start
    for driver in drivers:
        if driver.program.poll() is None:
            driver.close(5.0)


def pump_until(driver: Driver, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"after {DEADLINE_S:.0f} s: {driver.printed!r}"
        driver.pump()
        time.sleep(0.01)


def test_output_goes_without_colours_to_stdout_and_to_the_log(
    start_driver: StartDriver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "driver.log").write_text("from the driver before\n")
    driver = start_driver(r"print('\x1b[1;32mstep 1\x1b[0m')")
    pump_until(driver, lambda: driver.program.poll() is not None)
    driver.close(5.0)
    assert capfd.readouterr().out == "step 1\n"
    assert (tmp_path / "driver.log").read_text() == "from the driver before\nstep 1\n"
    assert driver.printed == "step 1\n"


def test_a_driver_ends_in_order_although_its_log_takes_nothing(
    start_driver: StartDriver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "driver.log").symlink_to("/dev/full")
    driver = start_driver("print('step 1')")
    pump_until(driver, lambda: driver.program.poll() is not None)
    driver.close(5.0)
    assert (capfd.readouterr().out, driver.printed) == ("step 1\n", "step 1\n")


def test_what_a_driver_quotes_does_not_act_on_the_terminal_of_its_user(
    start_driver: StartDriver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = start_driver(r"raise ValueError('\x1b]52;c;ZXZpbA==\x07 \x9b6n \u202egnp.exe')")
    pump_until(driver, lambda: driver.program.poll() is not None)
    driver.close(5.0)
    for text in (capfd.readouterr().out, (tmp_path / "driver.log").read_text(), driver.printed):
        assert text.endswith("ValueError: \\x1b]52;c;ZXZpbA==\\x07 \\x9b6n \\u202egnp.exe\n")


def test_a_request_spares_a_driver_that_does_not_handle_it(start_driver: StartDriver) -> None:
    driver = start_driver(READY)
    pump_until(driver, lambda: "ready" in driver.printed)
    driver.forward(signal.SIGUSR1)
    driver.forward(signal.SIGUSR2)
    driver.forward(signal.SIGTERM)
    assert driver.program.process.wait(DEADLINE_S) == -signal.SIGTERM


def test_an_interrupt_ends_a_driver_without_handlers_and_it_prints_no_traceback(start_driver: StartDriver) -> None:
    driver = start_driver(READY)
    pump_until(driver, lambda: "ready" in driver.printed)
    driver.forward(signal.SIGINT)
    assert driver.program.process.wait(DEADLINE_S) == -signal.SIGTERM
    driver.pump()
    assert driver.printed == "ready\n"


def test_a_request_reaches_a_driver_that_handles_it(start_driver: StartDriver) -> None:
    driver = start_driver(f"import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75)); {READY}")
    pump_until(driver, lambda: "ready" in driver.printed)
    driver.forward(signal.SIGUSR1)
    assert driver.program.process.wait(DEADLINE_S) == 75


def test_what_a_driver_leaves_behind_in_its_session_is_ended(start_driver: StartDriver) -> None:
    driver = start_driver("import subprocess; subprocess.Popen(['sleep', '60'])")
    driver.program.process.wait(DEADLINE_S)
    session = driver.program.pid
    assert len(session_members(session)) == 1
    driver.close(5.0)
    assert session_members(session) == []
