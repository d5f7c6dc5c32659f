"""A learner's files on the head's disk: a real Keeper behind Ray's calls, which are futures here."""

from __future__ import annotations

import errno
import io
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hpc_grpo.errors import HpcGrpoError, LaunchError
from hpc_grpo.learner import head_disk
from hpc_grpo.learner.head_disk import HeadDisk
from hpc_grpo.learner.record import read_batches, save_share
from hpc_grpo.learner.staging import StagedFiles
from hpc_grpo.run.checkpoint import FileEntry, Manifest, hash_files, write_manifest
from hpc_grpo.run.keeper import Keeper
from hpc_grpo.types import Minibatch
from tests.support.ray_futures import answered
from tests.support.sequences import ordinary_sequence

CHUNK = 1000


class KeeperActor:
    """The handle of a keeper: its calls are made at once, and noted; `fails` raises instead of a write."""

    def __init__(self, root: Path) -> None:
        self.keeper = Keeper(root)
        self.chunks: list[int] = []
        self.read_names: list[str] = []
        self.fails: Exception | None = None

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._call(method, *args))

    def _call(self, method: str, *args: Any) -> Future[Any]:
        if method == "write":
            self.chunks.append(len(args[2]))
            if self.fails is not None:
                return answered(self.fails)
        if method == "read":
            self.read_names.append(args[0])
        try:
            return answered(getattr(self.keeper, method)(*args))
        except (OSError, HpcGrpoError) as error:
            return answered(error)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeeperActor:
    monkeypatch.setattr(head_disk, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr("hpc_grpo.run.keeper.CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(head_disk.ray, "get", lambda reference: reference.result())
    return KeeperActor(tmp_path / "run")


@pytest.fixture
def disk(head: KeeperActor, tmp_path: Path) -> HeadDisk:
    (tmp_path / "here").mkdir()
    return HeadDisk(head, tmp_path / "run", tmp_path / "here")


def write_checkpoint(folder: Path, states: dict[str, Any]) -> None:
    for name, state in states.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / name)
    write_manifest(folder, Manifest(4, 2, 1, tuple(hash_files(folder, list(states)))))


def test_a_checkpoints_files_lie_at_the_head_as_if_written_there_and_nothing_lies_here(
    head: KeeperActor, disk: HeadDisk, tmp_path: Path
) -> None:
    staging = tmp_path / "run" / "checkpoints" / ".step_2.tmp"
    here, files, weights = disk.here(staging), StagedFiles(), torch.randn(2000)
    files.disk = disk
    with files.new_checkpoint(keeps=True):
        files.makedirs(f"{here}/deepspeed", exist_ok=True)
        files.save({"weights": weights, "step": 3}, f"{here}/deepspeed/rank_1.pt")
        (here / "script.py").write_text("x" * 2500)
        files.written.append(here / "script.py")
    before, _ = weights.clone(), weights.zero_()
    entries = disk.settle(here, files.write())
    assert not list(here.parent.iterdir())
    assert entries == hash_files(staging, ["script.py", "deepspeed/rank_1.pt"])
    assert (staging / "script.py").read_text() == "x" * 2500
    assert torch.equal(torch.load(staging / "deepspeed" / "rank_1.pt")["weights"], before)
    assert max(head.chunks) == CHUNK
    assert sum(head.chunks) == sum(entry.size for entry in entries)


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, 5 * CHUNK])
def test_a_file_of_any_size_arrives_whole(disk: HeadDisk, tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    with disk.new_file(tmp_path / "run" / "batches" / "share") as file:
        file.write(content)
    assert (tmp_path / "run" / "batches" / "share").read_bytes() == content
    assert [path.name for path in (tmp_path / "run" / "batches").iterdir()] == ["share"]


def test_a_longer_file_of_an_attempt_before_leaves_no_end_behind(disk: HeadDisk, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "batches"
    folder.mkdir(parents=True)
    (folder / ".share.tmp").write_bytes(b"y" * 3 * CHUNK)
    with disk.new_file(folder / "share") as file:
        file.write(b"short")
    assert (folder / "share").read_bytes() == b"short"


def test_no_more_than_two_chunks_are_underway(
    head: KeeperActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    underway, most = 0, 0

    def begin(*_args: Any) -> Any:
        nonlocal underway, most
        underway += 1
        most = max(most, underway)
        return answered(None)

    def end(_reference: Any) -> None:
        nonlocal underway
        underway -= 1

    monkeypatch.setattr(head_disk.ray, "get", end)
    sending = head_disk.Sending(SimpleNamespace(write=SimpleNamespace(remote=begin)), "file")
    with io.BufferedWriter(sending, CHUNK) as file:
        file.write(bytes(20 * CHUNK + 1))
    assert (underway, most) == (0, 2)


def test_a_full_disk_at_the_head_is_the_error_of_a_full_disk(head: KeeperActor, disk: HeadDisk) -> None:
    head.fails = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left on device") as caught:
        disk.save({"weights": torch.ones(3000)}, disk.here(head.keeper.root / ".step_1.tmp" / "rank_1.pt"))
    assert caught.value.errno == errno.ENOSPC


def test_a_file_that_changed_underway_is_refused(head: KeeperActor, disk: HeadDisk) -> None:
    disk.save([1], disk.here(head.keeper.root / "a.pt"))
    there = hash_files(head.keeper.root, ["a.pt"])[0]
    with pytest.raises(HpcGrpoError, match="is not what its learner sent"):
        head.keeper.commit(FileEntry("a.pt", there.size, "0" * 32), "a.pt")


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/config.yaml"])
def test_a_file_outside_of_the_run_is_not_written(head: KeeperActor, name: str) -> None:
    with pytest.raises(ValueError, match="outside"):
        head.keeper.write(name, 0, b"x")


def test_of_an_opened_checkpoint_only_what_is_loaded_is_fetched(
    head: KeeperActor, disk: HeadDisk, tmp_path: Path
) -> None:
    folder, weights, files = tmp_path / "run" / "checkpoints" / "step_2", torch.randn(1500), StagedFiles()
    write_checkpoint(folder, {f"deepspeed/rank_{rank}.pt": weights + rank for rank in range(3)})
    files.disk = disk
    with disk.opened(folder) as here:
        assert sorted(path.name for path in here.rglob("rank_*.pt")) == ["rank_0.pt", "rank_1.pt", "rank_2.pt"]
        assert (here / "deepspeed" / "rank_2.pt").stat().st_size == (folder / "deepspeed" / "rank_2.pt").stat().st_size
        for _ in range(2):
            assert torch.equal(files.load(str(here / "deepspeed" / "rank_1.pt")), weights + 1)
    assert {Path(name).name for name in head.read_names} == {"manifest.json", ".manifest.json.copy", "rank_1.pt"}
    assert not here.exists()


def test_a_node_without_room_for_its_part_of_a_checkpoint_says_where_to_put_it(disk: HeadDisk, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step_2"
    write_checkpoint(folder, {"model.pt": torch.ones(9000)})
    with disk.opened(folder) as here:
        (tmp_path / "here" / ".fetched-checkpoints--step_2--model.pt").symlink_to("/dev/full")
        with pytest.raises(LaunchError, match=r"has no space for model\.pt .* set launch\.local_dir"):
            disk.fetch(here / "model.pt")


def test_of_one_opened_whole_every_file_is_there(disk: HeadDisk, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / ".step_2_universal.tmp"
    write_checkpoint(folder, {"zero/weight/fp32.pt": torch.ones(3), "zero/bias/fp32.pt": torch.zeros(3000)})
    with disk.opened(folder, whole=True) as here:
        names = ["zero/weight/fp32.pt", "zero/bias/fp32.pt"]
        assert hash_files(here, names) == hash_files(folder, names)


def test_learners_of_a_node_share_what_they_fetch_and_the_last_removes_it(
    head: KeeperActor, disk: HeadDisk, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step_2"
    write_checkpoint(folder, {"model.pt": torch.ones(9000)})
    other = HeadDisk(head, tmp_path / "run", tmp_path / "here")
    with other.opened(folder) as here:
        with ThreadPoolExecutor(2) as pool, disk.opened(folder):
            list(pool.map(lambda own: own.fetch(here / "model.pt"), [disk, other]))
        assert hash_files(here, ["model.pt"]) == hash_files(folder, ["model.pt"])
    num_chunks = -(-(folder / "model.pt").stat().st_size // CHUNK)
    assert head.read_names.count("checkpoints/step_2/model.pt") == num_chunks  # once, not twice
    assert not here.exists()


def test_learners_of_a_node_fetch_their_own_files_side_by_side(
    head: KeeperActor, disk: HeadDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, names = tmp_path / "run" / "checkpoints" / "step_2", ["rank_1.pt", "rank_2.pt"]
    write_checkpoint(folder, {name: torch.ones(9000) for name in names})
    other, both = HeadDisk(head, tmp_path / "run", tmp_path / "here"), threading.Barrier(2)

    def read(name: str, offset: int) -> Future[Any]:
        if offset == 0 and Path(name).name in names:
            both.wait(30)  # neither goes on before the other has begun
        return head._call("read", name, offset)

    monkeypatch.setattr(head, "read", SimpleNamespace(remote=read), raising=False)
    with disk.opened(folder) as here, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda own, name: own.fetch(here / name), [disk, other], names))
        assert hash_files(here, names) == hash_files(folder, names)
    assert not list((tmp_path / "here").glob(".fetched-*"))


def test_what_is_on_its_way_has_arrived_before_the_writers_error_is_raised(
    head: KeeperActor, disk: HeadDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Future[Any]] = []

    def write(*_args: Any) -> Future[Any]:
        sent.append(Future())
        return sent[-1]

    def get(reference: Future[Any]) -> Any:
        reference.set_result(None)
        return reference.result()

    monkeypatch.setattr(head, "write", SimpleNamespace(remote=write), raising=False)
    monkeypatch.setattr(head_disk.ray, "get", get)
    with pytest.raises(RuntimeError, match="cannot be saved"), disk.new_file(tmp_path / "run" / "share") as file:
        file.write(bytes(3 * CHUNK))
        raise RuntimeError("it cannot be saved")
    assert len(sent) == 3
    assert all(each.done() for each in sent)


def test_a_share_of_a_steps_batch_is_read_as_one_that_was_written_at_the_head(disk: HeadDisk, tmp_path: Path) -> None:
    sequence = ordinary_sequence(1, 0, range(2000), 900, np.linspace(-3, 0, 900, dtype=np.float32), advantage=0.5)
    save_share(disk, tmp_path / "run" / "batches" / "step_3", 0, 1, [Minibatch((sequence,), 900, 1)])
    (minibatch,), num_learners = read_batches(tmp_path / "run" / "batches" / "step_3")
    assert num_learners == 1
    assert np.array_equal(minibatch.sequences[0].token_ids, sequence.token_ids)
