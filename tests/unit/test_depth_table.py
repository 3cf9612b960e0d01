"""Round costs are kept for the next time, and whatever else stands in their file is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_mtp import SamplingParams, load
from mlx_mtp.decode.depth import DepthController
from mlx_mtp.depth_table import CACHE_VARIABLE, DepthTable
from mlx_mtp.hub import BUNDLED
from mlx_mtp.model.experts import ExpertStrategy

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


def test_exact_rounds_have_costs_of_their_own(folder: Path) -> None:
    load("pocket", exact=True).generate(["Spell banana."], SHORT)
    again = load("pocket")
    assert again.exact_controller.to_json()["cells"]
    assert not again.controller.to_json()["cells"]


def test_how_experts_are_run_is_kept(folder: Path) -> None:
    llm = load("pocket-moe")
    assert llm.target.experts.strategy == ExpertStrategy()
    llm.target.experts.use(ExpertStrategy(8, True), llm.target.body.layers)
    (answer,) = llm.generate(["Spell banana."], SHORT)
    again = load("pocket-moe")
    assert again.target.experts.strategy == ExpertStrategy(8, True)
    glus = [layer.experts.switch_glu for layer in again.target.body.layers if layer.enable_moe]
    assert glus
    assert all("gate_up_proj" in glu for glu in glus)
    assert again.generate(["Spell banana."], SHORT)[0].token_ids == answer.token_ids
    (file,) = folder.rglob("*.json")
    for nonsense in ("[8, 1]", '["8", true]', "[-1, true]", "[8]", "{}", "null"):
        file.write_text(f'{{"version": 1, "experts": {nonsense}}}')
        assert load("pocket-moe").target.experts.strategy == ExpertStrategy()
