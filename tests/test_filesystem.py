"""The seam to the disk: one winner per slot, whatever is lost, raced or killed."""

import errno
import multiprocessing
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen import filesystem
from batchgen.errors import Interrupted, UsageError
from batchgen.filesystem import FileSystem, resumable

RESUMABLE = sorted(filesystem._RESUMABLE)
FILES = FileSystem()


class Killed(BaseException):
    """Stands for SIGKILL: no handler of `Exception` sees it."""


def fail_with(number: int) -> Callable[..., None]:
    def fail(path: object, *others: object, **named: object) -> None:
        raise OSError(number, os.strerror(number), None if isinstance(path, int) else str(path))

    return fail


@pytest.mark.parametrize("content", [b"", b"token", os.urandom(100_000)])
def test_a_slot_holds_what_was_put_first_and_nothing_else_lies_beside_it(tmp_path: Path, content: bytes) -> None:
    slot = tmp_path / "00000-0"
    assert FILES.put_if_absent(slot, content)
    assert not FILES.put_if_absent(slot, b"another")
    assert FILES.read(slot) == content
    assert os.listdir(tmp_path) == ["00000-0"]


def test_of_many_threads_one_wins_each_slot(tmp_path: Path) -> None:
    num_threads, num_slots = 16, 12
    winners: list[list[bytes]] = [[] for _ in range(num_slots)]
    gate = threading.Barrier(num_threads)

    def race() -> None:
        for number in range(num_slots):
            content = secrets.token_bytes(64)
            gate.wait()
            if FILES.put_if_absent(tmp_path / str(number), content):
                winners[number].append(content)

    threads = [threading.Thread(target=race) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[FILES.read(tmp_path / str(number))] for number in range(num_slots)] == winners
    assert len(os.listdir(tmp_path)) == num_slots


def put_all(folder: Path, num_slots: int, name: str, results: "multiprocessing.Queue[tuple[str, list[int]]]") -> None:
    won = [slot for slot in range(num_slots) if FILES.put_if_absent(folder / str(slot), f"{name} {slot}".encode())]
    results.put((name, won))


def test_of_many_processes_one_wins_each_slot(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[tuple[str, list[int]]] = context.Queue()
    names = [f"process {number}" for number in range(4)]
    processes = [context.Process(target=put_all, args=(tmp_path, 40, name, results)) for name in names]
    for process in processes:
        process.start()
    won = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert sorted(slot for slots in won.values() for slot in slots) == list(range(40))
    for name, slots in won.items():
        assert all(FILES.read(tmp_path / str(slot)) == f"{name} {slot}".encode() for slot in slots)


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_slot_whose_link_was_made_but_reported_as_failed_is_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    link = os.link

    def lose_the_reply(source: Path, target: Path) -> None:
        link(source, target)
        fail_with(number)(target)

    monkeypatch.setattr(os, "link", lose_the_reply)
    assert FILES.put_if_absent(tmp_path / "slot", b"ours")
    assert FILES.read(tmp_path / "slot") == b"ours"
    assert os.listdir(tmp_path) == ["slot"]


@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT])
def test_a_slot_of_another_is_lost_whatever_error_the_link_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    FILES.put_if_absent(tmp_path / "slot", b"theirs")
    monkeypatch.setattr(os, "link", fail_with(number))
    assert not FILES.put_if_absent(tmp_path / "slot", b"ours")
    assert FILES.read(tmp_path / "slot") == b"theirs"


@pytest.mark.parametrize("number", RESUMABLE)
@pytest.mark.parametrize("call", ["link", "fsync", "unlink"])
def test_an_error_that_leaves_the_outcome_open_stops_the_run_and_throws_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    monkeypatch.setattr(os, call, fail_with(number))
    with pytest.raises(Interrupted, match=str(tmp_path)):
        FILES.put_if_absent(tmp_path / "slot", b"ours")
    monkeypatch.undo()
    assert any(path.read_bytes() in (b"ours", b"") for path in tmp_path.iterdir())
    is_there = (tmp_path / "slot").exists()
    assert is_there == (call == "unlink")
    assert FILES.put_if_absent(tmp_path / "slot", b"ours again") != is_there


@pytest.mark.parametrize("number", RESUMABLE)
def test_every_error_of_a_lost_disk_is_resumable_and_names_the_path(tmp_path: Path, number: int) -> None:
    with pytest.raises(Interrupted) as caught, resumable(tmp_path / "given"):
        fail_with(number)(tmp_path / "found")
    assert str(tmp_path / "found") in str(caught.value)
    assert "run the same command again" in str(caught.value)
    with pytest.raises(Interrupted, match="given"), resumable(tmp_path / "given"):
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOTDIR, errno.ENAMETOOLONG])
def test_a_path_that_is_no_place_is_a_users_mistake(tmp_path: Path, number: int) -> None:
    with pytest.raises(UsageError, match=os.strerror(number)), resumable(tmp_path):
        fail_with(number)(tmp_path)


def test_a_missing_file_is_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), resumable(tmp_path):
        fail_with(errno.ENOENT)(tmp_path)


CALLS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "read": ("read_bytes", lambda folder: FILES.read(folder / "a")),
    "names": ("listdir", lambda folder: FILES.names(folder)),
    "stat": ("stat", lambda folder: FILES.stat(folder / "a")),
    "touch": ("utime", lambda folder: FILES.touch(folder / "a")),
    "make_folder": ("mkdir", lambda folder: FILES.make_folder(folder / "new")),
    "sync_folder": ("open", lambda folder: FILES.sync_folder(folder)),
    "publish_file": ("link", lambda folder: FILES.publish_file(folder / "a", folder / "b")),
    "publish_folder": ("rename", lambda folder: FILES.publish_folder(folder / "a", folder / "b")),
    "replace": ("replace", lambda folder: FILES.replace(folder / "a", folder / "b")),
    "remove": ("unlink", lambda folder: FILES.remove(folder / "a")),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_tells_a_lost_disk_as_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    system_call, act = CALLS[name]
    (tmp_path / "a").write_bytes(b"1")
    owner: object = Path if system_call in ("read_bytes", "mkdir", "unlink") else os
    monkeypatch.setattr(owner, system_call, fail_with(errno.ESTALE))
    with pytest.raises(Interrupted, match="stale"):
        act(tmp_path)


def test_what_is_not_there_is_none_or_nothing(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert FILES.read(missing) is None
    assert FILES.stat(missing) is None
    assert FILES.names(missing) == []
    FILES.remove(missing)


class Countdown:
    """Dies at the n-th system call of those that change or read the disk, before or after the call is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, deadline: int, *, is_done: bool) -> None:
        self.left = deadline
        for name in ("link", "unlink", "fsync", "open"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name), is_done=is_done))

    def _counted(self, call: Callable[..., object], *, is_done: bool) -> Callable[..., object]:
        def counted(*given: object, **named: object) -> object:
            self.left -= 1
            if self.left == 0:
                if is_done:
                    call(*given, **named)
                raise Killed
            return call(*given, **named)

        return counted


@pytest.mark.parametrize("is_done", [False, True])
def test_death_at_any_call_leaves_the_slot_empty_or_whole(tmp_path: Path, *, is_done: bool) -> None:
    content = os.urandom(1_000)
    for deadline in range(1, 20):
        slot = tmp_path / str(deadline) / "slot"
        slot.parent.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            Countdown(patch, deadline, is_done=is_done)
            try:
                FILES.put_if_absent(slot, content)
            except Killed:
                pass
            else:
                break
        settled = FILES.read(slot)
        assert settled in (None, content)
        assert FILES.put_if_absent(slot, b"the next one's") == (settled is None)
        assert all(name == "slot" or name.endswith(".tmp") for name in FILES.names(slot.parent))
    else:
        raise AssertionError("put_if_absent makes more calls than this test expects")
    assert deadline > 4


@given(st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=6, unique=True))
@settings(max_examples=20, deadline=None)
def test_the_first_of_any_puts_is_what_all_see(tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]) -> None:
    slot = tmp_path_factory.mktemp("slots") / "slot"
    assert [FILES.put_if_absent(slot, content) for content in contents] == [True] + [False] * (len(contents) - 1)
    assert FILES.read(slot) == contents[0]


def test_publishing_twice_is_harmless(tmp_path: Path) -> None:
    file, folder = tmp_path / "part.tar", tmp_path / "part"
    file.write_bytes(b"tar")
    folder.mkdir()
    (folder / "image.png").write_bytes(b"png")
    data = tmp_path / "data"
    FILES.make_folder(data)
    for _ in range(2):
        FILES.publish_file(file, data / file.name)
        FILES.publish_folder(folder, data / folder.name)
    assert (data / "part.tar").read_bytes() == b"tar"
    assert (data / "part" / "image.png").read_bytes() == b"png"


def test_a_part_that_is_nowhere_is_an_error_and_not_silence(tmp_path: Path) -> None:
    for publish in (FILES.publish_file, FILES.publish_folder):
        with pytest.raises(FileNotFoundError):
            publish(tmp_path / "nowhere", tmp_path / "target")


def test_write_never_overwrites(tmp_path: Path) -> None:
    FILES.write(tmp_path / "a", b"1")
    with pytest.raises(FileExistsError):
        FILES.write(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_replace_takes_the_place_of_a_file_or_of_none(tmp_path: Path) -> None:
    for content in (b"1", b"2"):
        FILES.write(tmp_path / "new", content)
        FILES.replace(tmp_path / "new", tmp_path / "place")
        assert (tmp_path / "place").read_bytes() == content


def test_touch_makes_the_change_time_newer(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    path.write_bytes(b"")
    os.utime(path, (1, 1))
    FILES.touch(path)
    found = FILES.stat(path)
    assert found is not None
    assert found.mtime_s > 1


def test_a_folder_that_cannot_link_is_refused_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FILES.probe(tmp_path)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(os, "link", fail_with(errno.EPERM))
    with pytest.raises(UsageError, match="cannot link"):
        FILES.probe(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_at_the_probe_is_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", fail_with(errno.ENOSPC))
    with pytest.raises(Interrupted, match="full"):
        FILES.probe(tmp_path)
