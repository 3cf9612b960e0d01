"""Checkpoints of gigabytes convert in little memory, and no slower than mlx-lm converts them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "convert.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc"),
]


def converted(folder, *arguments):
    command = [sys.executable, str(BENCH), "--folder", str(folder), "--repeat", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("size", "layers"), [("31B", 6), ("26B-A4B", 4)])
def test_8_gb_take_little_memory_and_no_longer_than_mlx_lm(size, layers, tmp_path):
    found = converted(tmp_path, "--size", size, "--layers", str(layers))
    assert found["source_bytes"] > 7.9e9
    ours, theirs = found["engines"]["ours"], found["engines"]["mlx-lm"]
    assert ours["peak_bytes"] < 400e6
    assert ours["median_seconds"] < 1.2 * theirs["median_seconds"]


def test_one_tensor_of_3_gb_takes_no_more_memory(tmp_path):
    found = converted(tmp_path, "--size", "E4B", "--layers", "24", "--engines", "ours")
    assert found["source_bytes"] > 7e9
    assert found["engines"]["ours"]["peak_bytes"] < 400e6
