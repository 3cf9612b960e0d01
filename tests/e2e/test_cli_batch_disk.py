"""A batch whose disk is full: nothing that was finished is lost."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from batches import B_A_N_A_N_A, BANANA, answers, finished, journal, write_jsonl

if TYPE_CHECKING:
    from conftest import BatchCommand

GREEDY = ("--temperature", "0")


def test_a_full_disk_loses_nothing_that_was_finished(tmp_path: Path, batch: BatchCommand) -> None:
    rows = [{"id": f"{n}", "prompt": BANANA} for n in range(24)]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        done = batch(source, "-o", output, *GREEDY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (done.code, done.out) == (5, "")
    assert done.err == (
        f"error: {output}.journal cannot be written: File too large.\n"
        "  Free some space and run the same command again; finished rows are kept.\n"
    )
    kept = finished(output)
    assert 3 < kept < 24
    assert journal(output)[-1] == {"end": "failed"}
    assert not output.exists()
    done = batch(source, "-o", output, *GREEDY)
    assert done.code == 0
    assert f"  24 of 24 rows · {kept} from an earlier run · " in done.err
    assert "killed" not in done.err
    assert [row[:2] for row in answers(output)] == sorted((f"{n}", B_A_N_A_N_A) for n in range(24))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk of a few kB; skipped where none can be made."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(option: str, mode: str = "remount,") -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"{mode}{option}", "tmpfs", folder]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("nothing can be mounted here")

    resize("size=8k", mode="")
    yield Disk(folder, resize)
    subprocess.run(["umount", folder], check=True)


class Disk(NamedTuple):
    folder: Path
    resize: Callable[[str], None]


def test_a_disk_that_is_full_then_larger_then_read_only(
    tmp_path: Path, disk: Disk, batch: BatchCommand
) -> None:
    rows = [{"id": f"{n}", "prompt": BANANA} for n in range(24)]
    source, output = write_jsonl(tmp_path / "in.jsonl", rows), disk.folder / "out.jsonl"
    arguments = [source, "-o", output, *GREEDY]
    no_room = "cannot be written: No space left on device.\n  Free some space and run the same "
    done = batch(*arguments)  # not even the journal has room
    assert done.code == 5
    assert f"error: {output}.journal {no_room}" in done.err
    assert 3 < finished(output) < 24
    disk.resize("size=20k")
    done = batch(*arguments)  # the journal has room, OUTPUT has not
    assert done.code == 5
    assert f"error: {output} {no_room}" in done.err
    assert finished(output) == 24
    assert os.listdir(disk.folder) == ["out.jsonl.journal"]
    disk.resize("size=200k")
    done = batch(*arguments, "--json")
    assert done.code == 0
    assert json.loads(done.out)["reused"] == 24
    assert len(answers(output)) == 24
    disk.resize("ro")
    done = batch(*arguments)
    assert done == (
        2,
        "",
        f"error: The folder {disk.folder} cannot be written to.\n  Choose another output.\n",
    )
