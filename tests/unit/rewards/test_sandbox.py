# ruff: noqa: E501 - programs as texts
"""What a sandbox bounds, hides and leaves behind; attacks through the reward `code` are in test_code_attacks.py."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards.sandbox import isolation as sandbox
from hpc_grpo.rewards.sandbox import syscalls
from hpc_grpo.rewards.sandbox.isolation import CaseResult, Limits, SandboxedScorer, run_job
from tests.support.isolation import ISOLATION, SHOWN_IN_TMP, needs_isolation
from tests.support.processes import wait_until

MOST_MIB = 2048
"""An attack stops here: the machine has other users."""
WAYS = {
    "anonymous": "held = []\nwhile grown(16): held.append(b'1' * (16 << 20))",
    "memfd_create and fallocate": "while grown(32): os.posix_fallocate(os.memfd_create('x'), 0, 32 << 20)",
    "SysV shared memory": (
        "libc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\nlibc.shmdt.argtypes = [ctypes.c_void_p]\n"
        "while grown(32):\n    n = libc.shmget(0, 32 << 20, 0o1600)\n    assert n >= 0\n    at = libc.shmat(n, None, 0)\n"
        "    ctypes.memset(at, 1, 32 << 20)\n    libc.shmdt(at)"
    ),
    "files in /tmp and /dev/shm": (
        'n = 0\nwhile grown(8):\n    n += 1\n    open(f\'{("/tmp", "/dev/shm", "/dev", "/")[n % 2]}/{n}\', \'wb\').write(b\'1\' * (8 << 20))'
    ),
    "pipes": "import fcntl\nfull = b'1' * (1 << 20)\nfor _ in range(20): os.fork() or fill()\ntime.sleep(9)",
    "sockets": "for _ in range(20): os.fork() or fill()\ntime.sleep(9)",
    "many processes": "for _ in range(60):\n    grown(64)\n    if not os.fork():\n        held = b'1' * (64 << 20)\n        time.sleep(9)\ntime.sleep(9)",
    "shared mappings that no process has resident": (
        "held = []\nos.fork(); os.fork(); os.fork()\nwhile grown(64) and taken < 400:\n    held.append(mmap.mmap(-1, 64 << 20))\n"
        "    for _ in range(64): held[-1].write(b'1' * (1 << 20))\n    held[-1].madvise(mmap.MADV_DONTNEED)\ntime.sleep(9)"
    ),
    "/dev/zero": (
        "file = os.open('/dev/zero', os.O_RDWR)\nheld = []\nwhile grown(64):\n    held.append(mmap.mmap(file, 64 << 20))\n"
        "    for _ in range(64): held[-1].write(b'1' * (1 << 20))\n    held[-1].madvise(mmap.MADV_DONTNEED)"
    ),
    "SysV messages": (
        "libc = ctypes.CDLL(None)\nwhile True:\n    n = libc.msgget(0, 0o1600)\n    assert n >= 0\n    grown(0.016)\n    libc.msgsnd(n, ctypes.create_string_buffer(8192), 8000, 0o4000)\n    libc.msgsnd(n, ctypes.create_string_buffer(8192), 8000, 0o4000)"
    ),
}
WAYS |= {
    "processes whose first thread has ended": """
import threading
def hold():
    held = b'1' * (400 << 20)
    time.sleep(9)
for _ in range(4):
    grown(400)
    if not os.fork():
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)
time.sleep(9)""",
    "page tables of empty pages": """
mmap_ = ctypes.CDLL(None).mmap
mmap_.restype = ctypes.c_void_p
mmap_.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for _ in range(8):
    grown(156)
    if not os.fork():
        for n in range(2, 20_000):
            at = mmap_(n << 30, 4096, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000, -1, 0)
            ctypes.c_char.from_address(at).value
        time.sleep(9)
time.sleep(9)""",
    "pages of a file that sockets keep": """
def fill():
    file, held = os.open(str(os.getpid()), os.O_CREAT | os.O_RDWR), []
    for _ in range(60):
        os.ftruncate(file, 0)
        os.pwrite(file, b'1' * (8 << 20), 0)
        for offset in range(0, 8 << 20, 4096):
            try: os.sendfile(held[-1][0].fileno(), file, offset, 1)
            except (BlockingIOError, IndexError):
                held.append(socket.socketpair())
                held[-1][0].setblocking(False)
        grown(8)
for _ in range(5): os.fork() or fill()
time.sleep(9)""",
}
ENDS = {
    "anonymous": "MemoryError", "memfd_create and fallocate": "OSError: [Errno 38]",
    "SysV shared memory": "AssertionError", "files in /tmp and /dev/shm": "OSError: [Errno 28]", "pipes": "time",
    "sockets": "memory", "many processes": "memory", "SysV messages": "AssertionError",
    "shared mappings that no process has resident": "PermissionError", "/dev/zero": "FileNotFoundError",
    "processes whose first thread has ended": "memory", "page tables of empty pages": "memory",
    "pages of a file that sockets keep": "time",
}  # fmt: skip
"""Way to take memory -> what ends it: a refused call, or a limit. Pipes and `sendfile` take little, and then sleep."""
PRELUDE = f"""
import ctypes, mmap, os, socket, sys, time
taken = 0
def grown(mib):
    global taken
    taken += mib
    if mib >= 1: print(taken, flush=True)
    return taken < {MOST_MIB}
"""
FILL = {
    "pipes": """
def fill():
    while True:
        try:
            theirs, ours = os.pipe()
            try: fcntl.fcntl(ours, 1031, 1 << 20)
            except OSError: pass
            os.set_blocking(ours, False)
            os.write(ours, full)
        except BlockingIOError: pass
        except OSError: time.sleep(9)
""",
    "sockets": """
def fill():
    while True:
        try: pair = socket.socketpair()
        except OSError: time.sleep(9); continue
        for end in pair:
            end.setblocking(False)
            try: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 20)
            except OSError: pass
            try:
                while True: end.send(b'1' * 65536)
            except OSError: pass
        held.append(pair)
held = []
""",
}


@contextlib.contextmanager
def peak_mib() -> Iterator[list[float]]:
    """Append the most memory that this process's new pages and its children took; nothing without a memory cgroup."""
    found: list[float] = []
    root = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").exists() else "/sys/fs/cgroup")
    group, peak = (
        root / f"hpc-grpo-test-{os.getpid()}",
        "memory.max_usage_in_bytes" if root.name == "memory" else "memory.peak",
    )
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        yield found
        return
    try:
        yield found
    finally:
        found.append(int((group / peak).read_text()) / (1 << 20) if (group / peak).exists() else 0.0)
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@needs_isolation
def test_memory_is_bounded_in_every_way_to_take_it(capsys: pytest.CaptureFixture[str]) -> None:
    limits = Limits(cpu_s=3.0, memory_mib=512, processes=32, tmp_mib=64)
    rows = []
    for way, attack in WAYS.items():
        with peak_mib() as peak:
            [result] = run_job(
                ISOLATION, [sys.executable, "-I", "-c", PRELUDE + FILL.get(way, "") + attack], {}, [""], limits
            )
        said = max([0.0, *map(float, result.stdout.split())])
        why = result.ended if result.ended != "exit 1" else result.stderr.strip().splitlines()[-1]
        rows.append((way, said, peak[0] if peak else None, why))
    with capsys.disabled():
        print(f"\n{'way to take memory (limit 512 MiB, /tmp 64 MiB)':48} {'tried':>6} {'peak MiB':>9}  ended")
        for way, said, most, ended in rows:
            print(f"{way:48} {said:6.0f} {'-' if most is None else f'{most:.0f}':>9}  {ended}")
    allowed = limits.memory_mib + limits.tmp_mib + 192  # the interpreters, and 20 ms between two looks
    assert {way: most for way, _, most, _ in rows if most is not None and most > allowed} == {}
    assert {way: said for way, said, _, _ in rows if said >= MOST_MIB} == {}
    assert {way: ended for way, _, _, ended in rows if not ended.startswith(ENDS[way])} == {}


HOSTILE_CALLS = """
import ctypes, resource, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
broke_out = []
if libc.syscall({keyctl}, 0, -3, 1) >= 0 or libc.syscall({add_key}, b'user', b'a', b'b', 1, -3) >= 0: broke_out.append('keys')
for family in (socket.AF_INET, 16, 17, 38, 40):
    try: socket.socket(family, socket.SOCK_STREAM if family in (2, 40) else socket.SOCK_RAW); broke_out.append(family)
    except OSError: pass
for pid in (1, os.getppid()):
    try: resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20)); broke_out.append('limits of another')
    except OSError: pass
    try: os.sched_setaffinity(pid, {{0}}); broke_out.append('affinity of another')
    except OSError: pass
    try: os.setpriority(os.PRIO_PROCESS, pid, 19); broke_out.append('priority of another')
    except OSError: pass
for flags in (0x10000000, 0x00020000, 0x20000000):
    if libc.unshare(flags) == 0 or libc.syscall({clone}, flags, 0, 0, 0, 0) >= 0: broke_out.append('a namespace')
print(broke_out)
"""


@needs_isolation
def test_keys_sockets_and_other_processes_are_out_of_reach() -> None:
    numbers = {"x86_64": (250, 248, 56), "aarch64": (219, 217, 220)}[os.uname().machine]
    program = HOSTILE_CALLS.format(**dict(zip(("keyctl", "add_key", "clone"), numbers, strict=True)))
    [result] = run_job(ISOLATION, [sys.executable, "-I", "-c", program], {}, [""], Limits(cpu_s=10.0))
    assert result.stdout == "[]\n", result


@needs_isolation
def test_every_call_of_the_list_is_refused_as_if_the_kernel_had_none() -> None:
    column = ["x86_64", "aarch64"].index(os.uname().machine)
    calls = {name: numbers[column] for name, numbers in syscalls.REFUSED.items() if numbers[column] is not None}
    program = (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {calls}.items():\n"
        "    ctypes.set_errno(0); answer = libc.syscall(number, 0, 0, 0, 0, 0, 0)\n"
        "    if (answer, ctypes.get_errno()) != (-1, errno.ENOSYS): print(name)"
    )
    [result] = run_job(ISOLATION, [sys.executable, "-I", "-c", program], {}, [""], Limits(cpu_s=10.0))
    assert (result.ended, result.stdout) == ("exit 0", ""), result
    assert {"mq_open", "io_uring_setup", "request_key"} <= calls.keys()


@needs_isolation
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the 32-bit calls of x86")
def test_calls_of_another_architecture_end_the_program() -> None:
    """`int 0x80` takes its numbers from another table, which a filter of one table does not see."""
    program = (
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3'))\n"  # getpid
        "at = ctypes.addressof(ctypes.c_char.from_buffer(m))\nprint(ctypes.CFUNCTYPE(ctypes.c_int)(at)())"
    )
    [result] = run_job(ISOLATION, [sys.executable, "-I", "-c", program], {}, [""], Limits(cpu_s=10.0))
    assert (result.ended, result.stdout) in [("signal 31", ""), ("signal 11", "")]  # 11: a kernel without these calls


@needs_isolation
def test_asyncio_multiprocessing_and_threads_work_inside() -> None:
    program = (
        "import asyncio, multiprocessing, threading, subprocess, tempfile\n"
        "async def f(): await asyncio.sleep(0); return 2\nassert asyncio.run(f()) == 2\n"
        "t = threading.Thread(target=lambda: None); t.start(); t.join()\n"
        "with multiprocessing.Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]\n"
        "assert multiprocessing.Value('i', 3).value == 3 and subprocess.run(['true']).returncode == 0\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x')\nprint('ok')"
    )
    [result] = run_job(ISOLATION, [sys.executable, "-I", "-c", program], {}, [""], Limits(cpu_s=20.0))
    assert result.stdout == "ok\n", result


@needs_isolation
def test_folders_deeper_than_python_recurses_are_removed_before_the_next_case() -> None:
    program = (
        "import os\nprint(sorted(os.listdir()))\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n"
        "os.chmod('.', 0)\nos.chdir('/tmp')\nos.symlink('/usr', 'link')\nos.mkdir('0')\nos.chmod('/tmp', 0)"
    )
    results = run_job(ISOLATION, [sys.executable, "-I", "-c", program], {}, ["", "", ""], Limits(cpu_s=20.0))
    assert results == [CaseResult("exit 0", f"{SHOWN_IN_TMP}\n")] * 3


@needs_isolation
@pytest.mark.parametrize(
    ("program", "patience_s", "ends"),
    [
        ("while True: pass", None, ["time"]),
        ("while True: pass", 0.0, ["time"]),
        ("while True: pass", 60.0, ["time", "time"]),
        ("exit(3)", None, ["exit 3"]),
        ("exit(3)", 0.0, ["exit 3", "exit 3"]),
    ],
)
def test_a_program_that_loops_in_each_of_its_cases_is_not_run_on_all(
    program: str, patience_s: float | None, ends: list[str]
) -> None:
    argv = [sys.executable, "-I", "-c", program]
    results = run_job(ISOLATION, argv, {}, ["", ""], Limits(cpu_s=1.0), patience_s)
    assert [result.ended for result in results] == ends


def _listing(python: Path, home: Path, *looked_for: Path) -> str:
    """Have another Python run a program in a sandbox that looks for files; return what it printed."""
    inside = f"import os; print([os.path.exists(each) for each in {list(map(str, looked_for))!r}])"
    program = (
        "import sys; from hpc_grpo.rewards.sandbox.isolation import *\n"
        f"found = find_isolation('strong')\n[r] = run_job(found, [sys.executable, '-I', '-c', {inside!r}], {{}}, [''], Limits(cpu_s=20.0))\n"
        "print(r.ended, r.stdout, r.stderr)"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, sys.path)])
    done = subprocess.run(
        [python, "-c", program],
        env={**os.environ, "PYTHONPATH": paths, "HOME": str(home)},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@needs_isolation
def test_an_environment_that_is_the_project_folder_shows_no_run_and_no_data(tmp_path: Path) -> None:
    project = tmp_path / "home" / "project"
    venv.create(project, symlinks=True)
    for name in ("runs/a/token", "data/test.jsonl", "library/x"):
        (project / name).parent.mkdir(parents=True)
        (project / name).write_text("planted")
    hidden = [project / "runs", project / "data/test.jsonl", project / "library"]
    assert _listing(project / "bin/python", tmp_path / "home", *hidden, project / "bin").startswith(
        "exit 0 [False, False, False, True]"
    )


@needs_isolation
def test_a_home_below_what_programs_see_is_refused(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    home = tmp_path / "env/lib/home"
    home.mkdir()
    assert f"would see {home}" in _listing(tmp_path / "env/bin/python", home)


@needs_isolation
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/mnt"])
def test_a_python_below_a_folder_that_the_sandbox_mounts_over_works(folder: str) -> None:
    if not os.access(folder, os.W_OK):
        pytest.skip(f"{folder} takes no files of this user's")
    environment = Path(folder, f"hpc-grpo-test-{os.getpid()}", "env")
    try:
        venv.create(environment, symlinks=True)
        (environment.parent / "secret").write_text("planted")
        said = _listing(
            environment / "bin/python", Path("/nonexistent"), environment.parent / "secret", environment / "bin"
        )
        assert said.startswith("exit 0 [False, True]")
    finally:
        shutil.rmtree(environment.parent)


@needs_isolation
def test_a_run_or_data_below_what_programs_see_is_refused(tmp_path: Path) -> None:
    sandbox.refuse_shown([tmp_path])
    with pytest.raises(ConfigError, match="would see"):
        sandbox.refuse_shown([Path(sys.base_prefix) / "lib" / "run"])


@needs_isolation
def test_a_shown_folder_is_read_only_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b\tc\\d\né"
    folder.mkdir()
    folder.chmod(0o777)  # root becomes nobody in a sandbox
    shown = sandbox.shown_paths()
    monkeypatch.setattr(sandbox, "shown_paths", lambda: [*shown, str(folder)])
    program = f"import errno\ntry: open({str(folder / 'written')!r}, 'w')\nexcept OSError as error: print(errno.errorcode[error.errno])"
    [result] = run_job(ISOLATION, [sys.executable, "-I", "-c", program], {}, [""], Limits(cpu_s=10.0))
    assert (result.stdout, list(folder.iterdir())) == ("EROFS\n", []), result


@needs_isolation
def test_a_text_that_is_run_as_code_changes_no_other_text_s_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile.py").write_text("def scorer():\n    return lambda text: float(eval(text))")
    tmp_path.chmod(0o755)  # root becomes nobody in a sandbox
    shown = sandbox.shown_paths()
    monkeypatch.setattr(sandbox, "shown_paths", lambda: [*shown, str(tmp_path)])
    monkeypatch.syspath_prepend(str(tmp_path))
    attacks = [
        "__import__('os')._exit(0)",
        "__import__('os').kill(1, 9)",
        "__import__('os').kill(-1, 9)",
        '[__import__(\'os\').write(n, b\'[{"ended": "exit 0", "verdict": "9"}]\\n\') for n in range(3, 99)]',
        "__import__('resource').prlimit(1, __import__('resource').RLIMIT_NPROC, (0, 0))",
        "'x' * (4 << 30)",
        "exec('while True: pass')",
        "[__import__('os').fork() for _ in range(99)]",
        "float('nan')",
        "1 / 0",
        "__import__('os').makedirs('/'.join(['d'] * 900))",
    ]
    scoring = SandboxedScorer(ISOLATION, Limits(cpu_s=1.0, processes=16))
    try:
        for attack in attacks:
            forged = scoring.score("hostile:scorer", attack, 2.0)
            assert forged is None or math.isnan(forged), attack
            assert scoring.score("hostile:scorer", "6 * 7", 20.0) == 42.0, f"after {attack}"
    finally:
        scoring.close()


@needs_isolation
def test_forks_of_a_worker_share_a_sandbox_and_none_reads_the_answer_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's child is killed at its deadline; the next child scores the rest of the group."""
    tmp_path.chmod(0o755)  # root becomes nobody in a sandbox
    (tmp_path / "slow.py").write_text(
        "import time\ndef scorer():\n    def score(text):\n        time.sleep(float(text) / 10)\n        return float(text)\n    return score\n"
    )
    shown = sandbox.shown_paths()
    monkeypatch.setattr(sandbox, "shown_paths", lambda: [*shown, str(tmp_path)])
    monkeypatch.syspath_prepend(str(tmp_path))
    scoring = SandboxedScorer(ISOLATION, Limits(cpu_s=5.0))

    def in_fork(act: Callable[[], float | None]) -> int:
        """Return a fork's exit code: ten times what it scored; killed, minus the signal."""
        if (child := os.fork()) == 0:
            os._exit(round(10 * (act() or 0.0)))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def killed_in_the_middle() -> float:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return scoring.score("slow:scorer", "7", 20.0) or 0.0

    def ends_the_sandbox() -> float:
        for child in psutil.Process(os.getppid()).children():
            if "rewards/sandbox" in " ".join(child.cmdline()):
                child.kill()
        return 0.0

    try:
        assert scoring.score("slow:scorer", "1", 20.0) == 1.0
        assert in_fork(killed_in_the_middle) == -signal.SIGALRM
        assert in_fork(lambda: scoring.score("slow:scorer", "2", 20.0)) == 20
        assert in_fork(ends_the_sandbox) == 0
        assert in_fork(lambda: scoring.score("slow:scorer", "3", 20.0)) == 30
        assert scoring.score("slow:scorer", "4", 20.0) == 4.0
    finally:
        scoring.close()


@needs_isolation
def test_a_sandbox_of_namespaces_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is killed would leave one behind."""
    monkeypatch.delattr(sandbox, "TemporaryDirectory")
    [result] = run_job(ISOLATION, [sys.executable, "-I", "-c", "print(1)"], {}, [""], Limits(cpu_s=10.0))
    assert result.stdout == "1\n"


def test_without_namespaces_a_program_ends_with_its_worker(tmp_path: Path) -> None:
    program = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(99)"
    work = (
        "import sys; from hpc_grpo.rewards.sandbox.isolation import *\n"
        f"run_job('limits', [sys.executable, '-I', '-c', {program!r}], {{}}, [''], Limits(cpu_s=60.0))"
    )
    worker = subprocess.Popen([sys.executable, "-c", work], env={**os.environ, "TMPDIR": str(tmp_path)})
    wait_until(
        lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"), "the program runs"
    )
    running = psutil.Process(int((tmp_path / "pid").read_text()))
    worker.kill()
    worker.wait()
    wait_until(lambda: not running.is_running() or running.status() == psutil.STATUS_ZOMBIE, "the program ends")


@needs_isolation
def test_a_user_without_rights_has_the_same_sandbox(tmp_path: Path) -> None:
    """Root's sandbox goes through other steps: it binds the paths before it gives its rights up."""
    python = Path("/usr/bin/python3")
    version = subprocess.run(
        [python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True
    )
    if os.geteuid() != 0 or version.stdout != "True\n":
        pytest.skip("root tries another user here, whose Python must be one that this user may read")
    folder = Path("/tmp", f"hpc-grpo-test-{os.getpid()}")
    try:
        shutil.copytree(Path(__file__).parents[3] / "hpc_grpo", folder / "hpc_grpo")
        folder.chmod(0o755)
        (folder / "secret").write_text("planted")
        (folder / "secret").chmod(0o644)
        attack = f"import os, sys\nprint(os.path.exists({str(folder / 'secret')!r}), os.getuid(), os.listdir('/proc/1/fd') if os.access('/proc/1/fd', os.R_OK) else 'hidden', os.path.exists('/dev/ptmx'))\n"
        attack += "for _ in range(3): os.fork() or os._exit(0)\n" + PRELUDE + WAYS["memfd_create and fallocate"]
        program = (
            "import sys; from hpc_grpo.rewards.sandbox.isolation import *\n"
            f"for found in STRONG:\n    [r] = run_job(found, [sys.executable, '-I', '-c', {attack!r}], {{}}, [''], Limits(cpu_s=20.0))\n"
            "    print(found, r.ended, r.stdout.split()[:4], r.stderr.strip().splitlines()[-1])"
        )
        user = [
            "setpriv",
            "--reuid=12345",
            "--regid=12345",
            "--clear-groups",
            "env",
            f"PYTHONPATH={folder}",
            "HOME=/nonexistent",
        ]
        done = subprocess.run([*user, python, "-c", program], capture_output=True, text=True)
    finally:
        shutil.rmtree(folder)
    ends = "exit 1 ['False', '1000', 'hidden', 'False'] OSError: [Errno 38] Function not implemented"
    assert done.stdout.splitlines()[0] == f"namespaces {ends}", done.stdout + done.stderr
    if shutil.which("bwrap"):
        assert done.stdout.splitlines()[1] == f"bubblewrap {ends}", done.stdout + done.stderr
