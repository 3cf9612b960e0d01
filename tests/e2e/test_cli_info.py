"""`mlx-mtp info`: what it prints, in both forms, and how it ends."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from batches import Done
from huggingface_hub import constants
from made_checkpoints import drafter_tensors, target_tensors, write_checkpoint
from published import SIZES, assistant

from mlx_mtp.cli.app import run
from mlx_mtp.hub import BUNDLED

PAIR_KEYS = {
    "schema", "model", "target", "drafter", "fits", "reads", "memory", "depth", "warnings",
    "problems",
}  # fmt: skip
MODEL_KEYS = {
    "name", "folder", "revision", "is_cached", "origin", "is_qat", "model_type", "num_layers",
    "hidden_size", "vocab_size", "files", "dtype", "weights", "bytes", "loaded_bytes", "stored_as",
    "parts", "unused",
}  # fmt: skip
TARGET_KEYS = {
    "family", "layer_types", "num_kv_layers", "sliding_window", "context", "num_experts",
    "top_k_experts",
}  # fmt: skip
CELL_KEYS = {
    "rows", "context", "kv_full_bytes", "kv_ring_bytes", "growth_bytes", "activation_bytes",
    "bytes", "fits",
}  # fmt: skip


class InfoCommand(Protocol):
    def __call__(self, *arguments: object) -> Done:
        """Run `mlx-mtp info` in this process."""


@pytest.fixture
def info(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[InfoCommand]:
    for name in ("MLX_MTP_MODEL", "MLX_MTP_DRAFTER", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MLX_MTP_CACHE", str(tmp_path / "learned"))
    monkeypatch.setenv("MLX_MTP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    log = logging.getLogger("mlx_mtp")
    level, handlers = log.level, list(log.handlers)

    def call(*arguments: object) -> Done:
        code = run(["info", *map(str, arguments)])
        return Done(code, *capsys.readouterr())

    yield call
    log.setLevel(level)
    log.handlers[:] = handlers


def document(done: Done) -> dict[str, Any]:
    assert done.out.count("\n") == 1
    loaded: dict[str, Any] = json.loads(done.out)
    return loaded


def published_pair(folder: Path, size: str, drafter: str) -> Path:
    """A pair of published shapes, without weights."""
    config = SIZES[size][0]
    write_checkpoint(folder / "target", config, target_tensors(config), shard_bytes=5 * 10**9)
    small = assistant(drafter)
    write_checkpoint(folder / "assistant", small, drafter_tensors(small))
    return folder / "target"


# A pair


def test_a_pair_on_a_screen(info: InfoCommand) -> None:
    done = info("pocket", "--memory-limit", 0.08)
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 80
    assert "\x1b" not in done.out
    assert done.out.startswith(
        """pocket with pocket/assistant: they fit together

Target
  kind       e-series, 8 layers of width 128: 3 full, 5 sliding; the last 2 read
             others' K and V; context 4k
  weights    2,266,912 in 4.5 MB
  stored as  bfloat16
  runs in    bfloat16
  folder     """
    )
    assert (
        """
  part                  weights      size  stored as
  ──────────────────────────────────────────────────
  dense MLP             983,040    2.0 MB  bfloat16
  per-layer embeddings  720,960    1.4 MB  bfloat16
  attention             426,592  853.2 kB  bfloat16
  embeddings            131,072  262.1 kB  bfloat16
  norms                   5,248   10.5 kB  bfloat16

Drafter
  kind       4 layers of width 128
  reads      K and V of the target's sliding layer 4 (3 of its own) and full
             layer 5 (1 of its own); window 32, drafts at the bonus token's
             position
  head       centroid: scores 128 tokens, those of 8 of 64 centroids
  depth      auto starts at 2 with 1 row, 1 with 2, 1 with 4, 3 with 8, before
             anything is measured
  weights    747,808 in 1.5 MB
"""
        in done.out
    )
    assert done.out.endswith(
        """
Memory in MB, limit 80.0 MB; in all sums: target 4.53, drafter 1.50
         K/V of a row           work for          in all
context   full layers  sliding     1 row  8 rows   1 row  2 rows  4 rows  8 rows
────────────────────────────────────────────────────────────────────────────────
     2k          1.18     0.26      30.6    32.6    38.0    39.8    43.3    50.2
     4k          2.23     0.26      56.0    59.9    64.5    67.6    73.7  (85.9)
  in brackets: does not fit
  work: activations, and the buffer that growing K/V are copied into
"""
    )


def test_a_large_pair_on_a_screen(info: InfoCommand, tmp_path: Path) -> None:
    done = info(published_pair(tmp_path, "26B-A4B", "26B-A4B"), "--memory-limit", 64)
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 80
    for line in (
        "  kind       experts, 30 layers of width 2816: 5 full, 25 sliding; 8 of 128\n",
        "  not used   towers: 5.5 MB in 2 tensors\n",
        "  experts     22,837,985,280  45.7 GB  bfloat16\n",
        "  head       dense: scores all 262,144 tokens\n",
    ):
        assert line in done.out
    shards = "model-00001-of-00011.safetensors and 10 more like it 50.5 GB"
    assert shards in " ".join(done.out.split())
    assert re.search(r"^ +128k .*\)$", done.out, re.MULTILINE)


def test_a_pair_as_a_document(info: InfoCommand) -> None:
    done = info("pocket-moe", "--json", "--memory-limit", 2)
    assert (done.code, done.err) == (0, "")
    found = document(done)
    assert found.keys() == PAIR_KEYS
    assert found["target"].keys() == MODEL_KEYS | TARGET_KEYS
    assert found["drafter"].keys() == MODEL_KEYS
    assert (found["model"], found["drafter"]["name"]) == ("pocket-moe", "pocket-moe/assistant")
    assert found["target"]["folder"] == str(BUNDLED["pocket-moe"])
    assert (found["target"]["family"], found["fits"]) == ("experts", True)
    assert (found["target"]["num_experts"], found["target"]["top_k_experts"]) == (8, 2)
    for one in (found["target"], found["drafter"]):
        for key in ("weights", "bytes"):
            assert one[key] == sum(part[key] for part in one["parts"]) > 0
        assert one["stored_as"][0]["dtype"] == one["dtype"] == "bfloat16"
        assert sum(how["bytes"] for how in one["stored_as"]) == one["bytes"]
        assert {"config.json", "model.safetensors"} <= {file["name"] for file in one["files"]}
    memory = found["memory"]
    assert memory["limit_bytes"] == 2_000_000_000
    assert memory["target_bytes"] == found["target"]["loaded_bytes"]
    for cell in memory["cells"]:
        assert cell.keys() == CELL_KEYS
        parts = [value for key, value in cell.items() if key.endswith("_bytes")]
        assert cell["bytes"] == sum(parts) + memory["target_bytes"] + memory["drafter_bytes"]
        assert cell["fits"]
    assert found["depth"].keys() == {"by_rows", "is_measured"}
    assert (found["warnings"], found["problems"]) == ([], [])


def test_without_a_drafter_nothing_is_shown_of_one(info: InfoCommand) -> None:
    done = info("pocket", "--drafter", "none", "--memory-limit", 0.08)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("pocket without a drafter\n")
    assert "Drafter" not in done.out
    assert "Memory in MB, limit 80.0 MB; in all sums: target 4.53\n" in done.out
    found = document(info("pocket", "--drafter", "none", "--json"))
    assert (found["drafter"], found["fits"], found["reads"], found["depth"]) == (None,) * 4


# What is wrong


def test_a_pair_that_does_not_fit_is_shown_and_named(info: InfoCommand, tmp_path: Path) -> None:
    target = published_pair(tmp_path, "E2B", "E4B")
    done = info(target)
    assert done.code == 4
    first, _, _ = done.out.partition("\n\n")
    drafter = f"{tmp_path.name}/assistant"
    assert " ".join(first.split()) == f"{target} with {drafter}: they do not fit together"
    assert "4,628,569,344" in done.out
    assert "78,517,760" in done.out
    assert "Memory in GB" in done.out
    assert done.err == (
        "error: This drafter belongs to another target: hidden size is 1536 in the target "
        "and 2560 in the drafter.\n  Use the -assistant checkpoint of the same target.\n"
    )
    done = info(target, "--json")
    found = document(done)
    assert (done.code, found["fits"]) == (4, False)
    (problem,) = found["problems"]
    assert problem["exit_code"] == 4
    assert f"error: {problem['message']}\n  {problem['hint']}\n" == done.err


def test_a_missing_shard_is_named_beside_what_is_known(info: InfoCommand, tmp_path: Path) -> None:
    target = published_pair(tmp_path, "31B", "31B")
    (target / "model-00003-of-00013.safetensors").unlink()
    done = info(target)
    assert (done.code, done.err) == (
        3,
        f"error: {target} lacks model-00003-of-00013.safetensors.\n  Download the model again.\n",
    )
    assert "dense, 60 layers of width 5376" in done.out
    assert "469,518,592" in done.out
    assert "Memory" not in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/nowhere"], 3, "error: There is no folder /nowhere, and it is not a hub id.\n"),
        (["google/gemma-4-E4B-it"], 3, "error: google/gemma-4-E4B-it is neither a folder nor "),
        ([""], 3, "error: No model is named.\n"),
        ([BUNDLED["pocket"].parent / "assistant"], 4, "is a drafter (gemma4_assistant), not a "),
        (["pocket", "--memory-limit", "0"], 2, "error: The memory limit is 0 GB.\n"),
        (["--memory-limit", "8"], 2, "error: --memory-limit is given without a model.\n"),
        (["--drafter", "none"], 2, "error: --drafter is given without a model.\n"),
        (["--nonsense"], 2, "error: No such option: --nonsense"),
    ],
)
def test_what_cannot_be_described_is_a_sentence(
    info: InfoCommand, arguments: list[object], code: int, message: str
) -> None:
    done = info(*arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert "Traceback" not in done.err


# This machine


def test_the_machine_on_a_screen(info: InfoCommand, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MLX_MTP_DRAFTER", "none")
    monkeypatch.setenv("HF_TOKEN", "hf_nobodysbusiness")
    config = SIZES["31B"][0]
    snapshot = tmp_path / "hub" / "models--google--gemma-4-31B-it" / "snapshots" / "abc"
    write_checkpoint(snapshot, config, target_tensors(config), shard_bytes=5 * 10**9)
    (snapshot / "model-00003-of-00013.safetensors").unlink()
    done = info()
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines()[2:])) <= 80
    flat = re.sub(r"\n {19}(?=\S)", "", done.out)  # paths may be longer than a line
    for line in (
        f"  learned          {tmp_path / 'learned'}\n",
        f"  conversations    {tmp_path / 'home'}\n",
        f"  hub cache        {tmp_path / 'hub'}\n",
        "  hub              is not asked (HF_HUB_OFFLINE); a token is set\n",
        "  MLX_MTP_DRAFTER  none\n",
        "56.5 GB  1 of 13 missing  google/gemma-4-31B-it\n",
        "with no drafter that is here\n",
        "with pocket-moe/assistant",
    ):
        assert line in flat
    assert "nobodysbusiness" not in done.out


def test_an_empty_cache_is_said(info: InfoCommand) -> None:
    assert "In the hub cache\n  no Gemma 4 models; `mlx-mtp chat " in info().out


def test_the_machine_as_a_document(info: InfoCommand, monkeypatch: Any) -> None:
    monkeypatch.setenv("MLX_MTP_MODEL", "./mine")
    found = document(info("--json"))
    assert {"mlx", "mlx-lm", "mlx-mtp", "python"} <= found["versions"].keys()
    assert found["machine"].keys() == {"chip", "os", "memory_bytes", "device"}
    assert found["folders"].keys() == {"cache", "conversations", "hub_cache"}
    assert (found["is_offline"], found["model"], found["found"]) == (True, "./mine", [])
    assert [one["name"] for one in found["bundled"]] == ["pocket", "pocket-moe"]
    assert all(one["is_complete"] and one["drafter"] for one in found["bundled"])
