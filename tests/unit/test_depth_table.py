"""Round costs are kept for the next time, and whatever else stands in their file is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_mtp import SamplingParams, load
from mlx_mtp.decode.depth import DepthController
from mlx_mtp.depth_table import CACHE_VARIABLE, DepthTable
from mlx_mtp.hub import BUNDLED

TARGET = BUNDLED["pocket"]
DRAFTER = TARGET.parent / "assistant"
SHORT = SamplingParams(temperature=0, max_tokens=30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_costs_are_kept_and_read_again(folder: Path) -> None:
    llm = load("pocket")
    llm.generate([f"Count from {n} to {n + 20}." for n in range(9)], SHORT, batch_size=1)
    (file,) = folder.rglob("*.json")
    kept = load("pocket").controller.to_json()
    assert [cell[:2] for cell in kept["cells"]] == [
        cell[:2] for cell in llm.controller.to_json()["cells"]
    ]
    assert kept["cells"]
    assert [path for path in file.parent.iterdir() if path != file] == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"version": 99}', b"[" * 9999])
def test_a_damaged_file_is_as_good_as_none(folder: Path, content: bytes) -> None:
    table = DepthTable(TARGET, DRAFTER, "bfloat16")
    table.write({"version": 1})
    table.path.write_bytes(content)
    controller = DepthController.from_json("e-series", table.read())
    assert controller.to_json()["cells"] == []


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("a file")
    DepthTable(TARGET, DRAFTER, "bfloat16").write({"version": 1})
    (result,) = load("pocket").generate(["Spell banana."], SHORT)
    assert result.text == "b-a-n-a-n-a"


def test_other_pairs_and_dtypes_have_files_of_their_own(folder: Path) -> None:
    moe = BUNDLED["pocket-moe"]
    tables = [
        DepthTable(TARGET, DRAFTER, "bfloat16"),
        DepthTable(TARGET, DRAFTER, "float32"),
        DepthTable(moe, DRAFTER, "bfloat16"),
        DepthTable(TARGET, moe.parent / "assistant", "bfloat16"),
    ]
    assert len({table.path for table in tables}) == 4
