"""A batch takes as much memory for many rows as for few."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from batches import finish, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def test_memory_stays_flat_while_many_rows_are_read(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from mlx_mtp.batch.runner import Batch
from mlx_mtp.batch.types import BatchOptions

def survey(count):
    source = Path(sys.argv[1])
    with source.open("w") as stream:
        for n in range(count):
            stream.write('{"id": "row %d", "prompt": "Count from %d to 99."}\\n' % (n, n))
    with Batch(str(source), source.with_name("out"), BatchOptions()) as batch:
        assert batch.survey() == count
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])

before = survey(10_000)
print(survey(100_000) - before)
assert "mlx" not in sys.modules
"""
    command = [sys.executable, "-c", script, str(tmp_path / "in.jsonl")]
    grown = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert grown < 5_000  # kB; 1,200 of them; the rows are 5,000 and their keys 3,000 more


@pytest.mark.slow
def test_memory_stays_flat_while_many_rows_are_answered(tmp_path: Path) -> None:
    count, row_bytes = 20_000, 400  # of the journal, and a little less than each is there
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"Spell banana {n}.\n" for n in range(count)))
    process = start(source, "-o", output, "--max-tokens", "1")
    status = Path(f"/proc/{process.pid}/status")
    resident: dict[int, int] = {}
    while process.poll() is None:
        journal = output.with_name("out.jsonl.journal")
        tenth = 10 * journal.stat().st_size // (count * row_bytes) if journal.exists() else 0
        if "VmRSS:" in (text := status.read_text()):
            resident[tenth] = int(text.split("VmRSS:")[1].split()[0])
        time.sleep(0.2)
    assert finish(process).code == 0
    assert len(output.read_text().splitlines()) == count
    assert max(resident) >= 9
    assert max(resident[n] for n in resident if n > 1) - resident[1] < 20_000  # kB
