"""A pair is described from headers alone: sizes, parts, fit and memory are those of loading it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import pytest
from made_checkpoints import (
    drafter_tensors,
    nbytes,
    target_tensors,
    write_checkpoint,
    write_small,
)
from published import PARAMETERS, SIZES, assistant

from mlx_mtp import load
from mlx_mtp.convert import Options, convert
from mlx_mtp.decode.depth import DepthController
from mlx_mtp.depth_table import DepthTable
from mlx_mtp.errors import IncompatibleError, ModelNotFoundError, UsageError
from mlx_mtp.files import fingerprint
from mlx_mtp.hub import BUNDLED
from mlx_mtp.info.contents import Storage
from mlx_mtp.info.document import pair_document
from mlx_mtp.info.pair import read_pair
from mlx_mtp.model.span import SPARE_SLOTS

PARTS = {"embeddings", "attention", "dense MLP", "norms"}
MORE = {"e-series": {"per-layer embeddings"}, "experts": {"experts", "router"}}
HEADERS = 400_000
"""More bytes than the configs and all headers of a published model of 60 layers have."""


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MTP_CACHE", str(tmp_path / "learned"))


def write_published(folder: Path, size: str, context: int | None = None) -> Path:
    """A pair of a published size whose weight files are all holes. Returns the target's folder."""
    config: dict[str, Any] = json.loads(json.dumps(SIZES[size][0]))
    if context is not None:
        config["text_config"]["max_position_embeddings"] = context
    target = folder / size / "target"
    write_checkpoint(target, config, target_tensors(config), shard_bytes=5 * 10**9)
    drafter = assistant(size)
    write_checkpoint(folder / size / "assistant", drafter, drafter_tensors(drafter))
    return target


# What it holds


@pytest.mark.parametrize("size", SIZES)
def test_a_published_size_is_described_by_its_headers(size: str, tmp_path: Path) -> None:
    pair = read_pair(str(write_published(tmp_path, size)))
    config, family = SIZES[size][:2]
    target, drafter = pair.target.contents, pair.drafter and pair.drafter.contents
    assert target is not None
    assert drafter is not None
    assert (target.weights, drafter.weights) == PARAMETERS[size]
    assert {one.part for one in target.held} == PARTS | MORE.get(family, set())
    assert {one.part for one in drafter.held} == {"drafter head", "drafter body"}
    stored = sum(nbytes(*entry) for entry in target_tensors(config).values())
    assert target.bytes + sum(one.bytes for one in target.unused) == stored
    assert target.storages == {Storage("bfloat16"): target.bytes}
    unused = {one.why: one.tensors for one in target.unused}
    assert unused.pop("towers") == 2
    assert sum(unused.values()) == 3 * config["text_config"]["num_kv_shared_layers"]
    assert (pair.fits, pair.problems, pair.warnings) == (True, [], [])
    donors = {one["type"]: one["layer"] for one in pair_document(pair)["reads"]["donors"]}
    assert donors == SIZES[size][2]
    assert pair.tokens_scored == (32 * 128 if size in ("E2B", "E4B") else 262_144)


def test_quantized_weights_are_counted_as_what_they_stand_for(tmp_path: Path) -> None:
    convert("pocket", tmp_path / "out", Options(), verify=False)
    pair, original = read_pair(str(tmp_path / "out")), read_pair("pocket")
    assert pair.drafter is not None
    assert original.drafter is not None
    for one, other in [(pair.target, original.target), (pair.drafter, original.drafter)]:
        assert one.contents is not None
        assert other.contents is not None
        assert one.contents.weights == other.contents.weights
        sizes = [file for name, file in one.files.items() if name.endswith(".safetensors")]
        assert 0 < sum(sizes) - one.contents.bytes < 50_000  # the headers
    storages = pair.target.contents.storages if pair.target.contents else {}
    by_bits = {how.bits: taken for how, taken in storages.items()}
    # the tables of 1024 tokens: 128 and 4 * 128 numbers of 6 bit, and 4 bytes for 64 of them
    assert by_bits[6] == 1024 * 5 * 128 * 6 // 8 + 1024 * 5 * 2 * 4
    assert list(by_bits) == [4, 6, 8, None]
    assert pair.target.origin is not None
    assert pair.target.origin._asdict() == {
        "source": "pocket",
        "revision": None,
        "recipe": "mtp-4bit",
        "is_qat": False,
    }
    assert pair.drafter.origin is not None
    assert pair.drafter.origin.source == "pocket/assistant"
    assert original.target.origin is None


def test_a_checkpoint_trained_for_a_grid_is_known_by_its_name(tmp_path: Path) -> None:
    target = write_small(tmp_path / "gemma-4-31B-it-qat-q4_0-unquantized", "31B", data=False)
    assert read_pair(str(target)).target.is_qat
    assert not read_pair("pocket").target.is_qat


# What it takes


def test_memory_is_what_loading_takes(pair: Path) -> None:
    check_memory(str(pair / "target"))


@pytest.mark.parametrize("name", BUNDLED)
def test_memory_is_what_loading_takes_of_a_bundled_pair(name: str) -> None:
    check_memory(name)


def test_memory_is_what_loading_takes_of_a_conversion(tmp_path: Path) -> None:
    convert("pocket", tmp_path / "out", Options(), verify=False)
    check_memory(str(tmp_path / "out"))


def check_memory(name: str) -> None:
    llm, memory = load(name, memory_limit=10**9), read_pair(name, memory_limit=10**9).memory
    assert memory is not None
    assert memory.target + memory.drafter == llm.memory.weights
    assert memory.contexts[-1] == llm.context
    for cell in memory.cells:
        assert cell.needed == llm.memory.parts(cell.rows, cell.context + SPARE_SLOTS)
        assert cell.needed.total == llm.memory.needed(cell.rows, cell.context + SPARE_SLOTS)


def test_a_cell_is_what_a_hand_counts(tmp_path: Path) -> None:
    memory = read_pair(str(write_published(tmp_path, "E4B"))).memory
    assert memory is not None
    (cell,) = (cell for cell in memory.cells if (cell.rows, cell.context) == (2, 8192))
    slots = 8448  # 8192 and 8 spare ones, in steps of 256
    full_layers, sliding_layers, kv_heads = 4, 20, 2
    wide = 2 * 10240 + 4 * 2560 + 8 * (256 + 512) + 42 * 256
    assert cell.needed._asdict() == {
        "weights": 2 * (PARAMETERS["E4B"][0] + PARAMETERS["E4B"][1]) + 2 * (42 + 4) + 4 * 262_144,
        "rings": 2 * sliding_layers * 2 * kv_heads * 256 * 768 * 2,
        "full": 2 * full_layers * 2 * kv_heads * 512 * slots * 2,
        "growth": 2 * slots * kv_heads * 512 * 2,
        "activations": 256 * 2 * (wide + 3 * 8 * slots) * 2,
    }


@pytest.mark.parametrize(
    ("context", "shown"),
    [
        (1000, [1000]),
        (8192, [2048, 8192]),
        (131_072, [2048, 8192, 32_768, 131_072]),
        (262_144, [2048, 8192, 32_768, 131_072, 262_144]),
    ],
)
def test_contexts_go_as_far_as_the_models(context: int, shown: list[int], tmp_path: Path) -> None:
    memory = read_pair(str(write_published(tmp_path, "31B", context))).memory
    assert memory is not None
    assert memory.contexts == shown
    assert [cell.rows for cell in memory.row(context)] == [1, 2, 4, 8]


def test_what_fits_is_said_by_the_limit(tmp_path: Path) -> None:
    target = write_published(tmp_path, "E4B", 8192)
    memory = read_pair(str(target), memory_limit=15_500_000_000).memory
    assert memory is not None
    assert memory.limit == 15_500_000_000
    fitting = {(cell.rows, cell.context) for cell in memory.cells if cell.fits}
    assert {cell.needed.total <= memory.limit for cell in memory.cells if cell.fits} == {True}
    assert fitting == {
        (cell.rows, cell.context) for cell in memory.cells if cell.needed.total <= 15_500_000_000
    }
    assert 0 < len(fitting) < len(memory.cells)
    with pytest.raises(UsageError, match="memory limit is 0"):
        read_pair(str(target), memory_limit=0)


# What is read for it


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's /proc/self/io")
def test_62_gb_are_described_without_reading_a_weight(tmp_path: Path) -> None:
    target = write_published(tmp_path, "31B")
    assert sum(file.stat().st_size for file in target.iterdir()) > 61e9
    read_pair("pocket")  # what is imported first is not counted
    allocated = [file.stat().st_blocks for file in sorted(target.iterdir())]
    before, began = bytes_read(), perf_counter()
    pair = read_pair(str(target))
    assert perf_counter() - began < 2
    assert bytes_read() - before < HEADERS
    assert [file.stat().st_blocks for file in sorted(target.iterdir())] == allocated
    assert pair.target.contents is not None


def bytes_read() -> int:
    """By this process so far, from whatever file."""
    return int(Path("/proc/self/io").read_text().split("\n", 1)[0].removeprefix("rchar: "))


# What is expected of drafts


@pytest.mark.parametrize("size", SIZES)
def test_the_depth_is_what_auto_starts_with(size: str, tmp_path: Path) -> None:
    depth = read_pair(str(write_published(tmp_path, size))).depth
    assert depth is not None
    assert not depth.is_measured
    for rows, expected in depth.by_rows.items():
        controller = DepthController(SIZES[size][1])
        assert controller.settled(rows) == expected
        assert controller.choose(rows).depth == expected
        assert controller.settled(rows) == expected


def test_kept_costs_decide_on_the_depth_where_there_are_some() -> None:
    target = BUNDLED["pocket"]
    table = DepthTable(target, target.parent / "assistant", str(mx.bfloat16))
    # drafting costs nothing with one row and everything with two
    cells = [[1, depth, 1.0 + 0.001 * depth, 9] for depth in range(8)]
    cells += [[2, depth, 1.0 + 99 * depth, 9] for depth in range(8)]
    table.write({"version": 1, "family": "e-series", "cells": cells})
    depth = read_pair("pocket").depth
    assert depth is not None
    assert depth.is_measured
    assert (depth.by_rows[1], depth.by_rows[2]) == (3, 0)
    assert read_pair("pocket-moe").depth != depth


def test_no_weight_file_is_sampled_where_no_costs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def counted(folder: Path) -> str:
        asked.append(folder)
        return fingerprint(folder)

    monkeypatch.setattr("mlx_mtp.depth_table.fingerprint", counted)
    read_pair("pocket")
    assert asked == []
    (tmp_path / "learned" / "depth").mkdir(parents=True)
    (tmp_path / "learned" / "depth" / "other.json").write_text("{}")
    assert read_pair("pocket").depth is not None
    assert len(asked) == 2


# What is wrong is said in the loader's words, and the rest is still there


def test_a_drafter_of_another_target_is_described_all_the_same(tmp_path: Path) -> None:
    target, other = write_published(tmp_path, "E2B"), write_published(tmp_path, "E4B")
    drafter = other.parent / "assistant"
    pair = read_pair(str(target), str(drafter))
    (problem,) = pair.problems
    assert isinstance(problem, IncompatibleError)
    assert (pair.fits, pair.depth) == (False, None)
    assert pair.drafter is not None
    assert pair.drafter.contents is not None
    assert pair.drafter.contents.weights == PARAMETERS["E4B"][1]
    assert pair.memory is not None
    with pytest.raises(IncompatibleError) as caught:
        load(target, drafter=drafter)
    assert str(caught.value) == str(problem)


def cut_header(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def cut_data(folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    os.truncate(folder / "model.safetensors", size - 10)


def lose_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def add_tensor(folder: Path) -> None:
    rewrite(folder, {"model.language_model.layers.0.mlp.extra.weight": ("BF16", (8, 8))})


def lose_tensor(folder: Path) -> None:
    rewrite(folder, {"model.language_model.norm.weight": None})


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    tensors = target_tensors(config) | changes
    kept = {name: entry for name, entry in tensors.items() if entry is not None}
    write_checkpoint(folder, config, kept)


@pytest.mark.parametrize("damage", [cut_header, cut_data, lose_file, add_tensor, lose_tensor])
def test_a_damaged_target_is_the_loaders_sentence(damage: Any, tmp_path: Path) -> None:
    target = write_small(tmp_path / "target", data=False)
    damage(target)
    pair = read_pair(str(target))
    (problem,) = pair.problems
    with pytest.raises((ModelNotFoundError, IncompatibleError)) as caught:
        load(target)
    assert (str(problem), problem.exit_code) == (str(caught.value), caught.value.exit_code)
    assert (pair.target.contents, pair.memory) == (None, None)
    assert pair.config.num_layers == 12
    assert "config.json" in pair.target.files
    assert pair_document(pair)["target"]["weights"] is None


def test_a_damaged_drafter_leaves_the_target(tmp_path: Path) -> None:
    target = write_published(tmp_path, "31B")
    drafter = target.parent / "assistant"
    cut_header(drafter)
    pair = read_pair(str(target))
    assert [problem.exit_code for problem in pair.problems] == [3]
    assert pair.drafter is not None
    assert (pair.fits, pair.drafter.contents, pair.memory) == (True, None, None)
    assert pair.target.contents is not None
    (drafter / "config.json").write_text("{")
    pair = read_pair(str(target))
    assert [problem.exit_code for problem in pair.problems] == [3]
    assert (pair.fits, pair.drafter, pair.depth) == (None, None, None)


def test_a_target_is_no_drafter() -> None:
    pair = read_pair("pocket", "pocket-moe")
    assert [problem.exit_code for problem in pair.problems] == [4]
    assert (pair.fits, pair.drafter) == (False, None)
    with pytest.raises(IncompatibleError, match="is a drafter"):
        read_pair(str(BUNDLED["pocket"].parent / "assistant"))


def test_without_a_drafter_nothing_is_said_of_one(tmp_path: Path) -> None:
    target = write_small(tmp_path / "alone", data=False)
    found, unwanted = read_pair(str(target)), read_pair(str(target), None)
    assert found.warnings == [f"No drafter was found for {target}; it decodes plainly."]
    assert unwanted.warnings == []
    for pair in (found, unwanted):
        assert (pair.drafter, pair.fits, pair.depth, pair.problems) == (None, None, None, [])
        assert pair.memory is not None
        assert pair.memory.drafter == 0
