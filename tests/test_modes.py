"""What the first worker settles for all others."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.errors import UsageError
from batchgen.filesystem import FileSystem
from batchgen.ledger import Ledger
from batchgen.modes import settle_dtype
from batchgen.owners import this_process


def make_ledger(folder: Path, files: FileSystem | None = None) -> Ledger:
    ledger = Ledger(folder, files or FileSystem(), this_process())
    ledger.make_folders()
    return ledger


def slots(folder: Path) -> list[str]:
    return [path.name for path in (folder / "modes").iterdir()]


def test_the_first_dtype_is_the_runs(tmp_path: Path) -> None:
    settle_dtype(make_ledger(tmp_path), "float16")
    settle_dtype(make_ledger(tmp_path), "float16")
    with pytest.raises(UsageError, match="begun in float16, and this worker would make its rows in float32"):
        settle_dtype(make_ledger(tmp_path), "float32")
    assert slots(tmp_path) == ["dtype"]


def test_a_model_without_a_dtype_settles_none(tmp_path: Path) -> None:
    settle_dtype(make_ledger(tmp_path), None)
    assert slots(tmp_path) == []
    settle_dtype(make_ledger(tmp_path), "float16")
    settle_dtype(make_ledger(tmp_path), None)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 40, b'{"token": "a", "dty', b"{}", b"[1]", b"null", b"\xff", b"[" * 10**5]
)
def test_a_slot_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    ledger = make_ledger(tmp_path)
    (tmp_path / "modes" / "dtype").write_bytes(content)
    with pytest.raises(UsageError, match="modes/dtype cannot be read"):
        settle_dtype(ledger, "float16")


class Late(FileSystem):
    """Sees the slot only when it puts it: another worker was first in between."""

    def __init__(self) -> None:
        self.is_late = True

    def read(self, path: Path) -> bytes | None:
        is_late, self.is_late = self.is_late, False
        return None if is_late else super().read(path)


def test_whoever_loses_the_race_takes_what_was_settled(tmp_path: Path) -> None:
    settle_dtype(make_ledger(tmp_path), "float16")
    settle_dtype(make_ledger(tmp_path, Late()), "float16")
    with pytest.raises(UsageError, match="begun in float16"):
        settle_dtype(make_ledger(tmp_path, Late()), "bfloat16")


def test_of_many_workers_at_once_all_agree_or_are_told(tmp_path: Path) -> None:
    dtypes = ["float16", "bfloat16"] * 6
    gate, refused = threading.Barrier(len(dtypes)), list[str]()
    me = this_process()

    def settle(number: int) -> None:
        ledger = make_ledger(tmp_path)
        ledger.owner = replace(me, token=f"{number:016x}")
        gate.wait()
        try:
            settle_dtype(ledger, dtypes[number])
        except UsageError:
            refused.append(dtypes[number])

    threads = [threading.Thread(target=settle, args=(number,)) for number in range(len(dtypes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 6
    assert len(set(refused)) == 1
