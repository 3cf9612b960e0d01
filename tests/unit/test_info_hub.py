"""Models in the hub cache and on the hub: described without a download, listed without asking."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hubs import SHA, Hub
from made_checkpoints import drafter_tensors, target_tensors, write_checkpoint, write_small
from published import SIZES, assistant

from mlx_mtp.errors import ModelNotFoundError
from mlx_mtp.hub import BUNDLED, find_drafter
from mlx_mtp.info.document import environment_document
from mlx_mtp.info.environment import read_environment
from mlx_mtp.info.pair import read_pair

TARGET = "google/gemma-4-E4B-it"
TOKEN = "hf_nobodysbusiness"


def snapshot(cache: Path, name: str) -> Path:
    """An empty snapshot of a repository, its newest."""
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(SHA)
    return repo / "snapshots" / SHA


def cached_target(cache: Path, name: str, size: str = "E4B") -> Path:
    config, folder = SIZES[size][0], snapshot(cache, name)
    write_checkpoint(folder, config, target_tensors(config), shard_bytes=5 * 10**9)
    return folder


def cached_drafter(cache: Path, name: str, size: str = "E4B") -> Path:
    folder = snapshot(cache, name)
    write_checkpoint(folder, assistant(size), drafter_tensors(assistant(size)))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


# A pair


def test_a_cached_pair_needs_no_network(cache: Path, hub: Hub) -> None:
    target = cached_target(cache, TARGET)
    cached_drafter(cache, f"{TARGET}-assistant")
    pair = read_pair("google/gemma-4-e4b-IT")
    assert hub.asked == []
    assert (pair.target.name, pair.target.revision) == (TARGET, SHA)
    assert (pair.target.folder, pair.target.is_cached) == (target, True)
    assert pair.drafter is not None
    assert (pair.drafter.name, pair.drafter.revision) == (f"{TARGET}-assistant", SHA)
    assert pair.fits


def test_a_pair_on_the_hub_is_described_and_not_downloaded(cache: Path, hub: Hub) -> None:
    hub.repos[TARGET] = files_of(BUNDLED["pocket"])
    hub.repos[f"{TARGET}-assistant"] = files_of(BUNDLED["pocket"].parent / "assistant")
    pair, local = read_pair(TARGET), read_pair("pocket")
    assert pair.target.contents == local.target.contents
    assert pair.target.files == local.target.files
    assert (pair.target.folder, pair.target.revision, pair.target.is_cached) == (None, SHA, False)
    assert pair.drafter is not None
    assert (pair.drafter.name, pair.drafter.folder) == (f"{TARGET}-assistant", None)
    assert pair.memory == local.memory
    assert (pair.fits, pair.problems) == (True, [])
    assert not list(cache.rglob("*.safetensors"))


def test_the_drafter_is_the_one_that_loading_takes(cache: Path, hub: Hub) -> None:
    """A likelier name is on the hub, but another one is here."""
    name = "mlx-community/gemma-4-e4b-it-4bit"
    target = cached_target(cache, name)
    cached_drafter(cache, f"{TARGET}-assistant")
    hub.repos["mlx-community/gemma-4-e4b-it-assistant-4bit"] = {"config.json": b"{}"}
    drafter = read_pair(name).drafter
    assert drafter is not None
    assert drafter.name == f"{TARGET}-assistant"
    assert drafter.folder == find_drafter(name, target)
    assert hub.asked == []


def test_what_is_not_here_is_said_offline(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nor complete in the cache") as caught:
        read_pair(TARGET)
    assert (caught.value.exit_code, caught.value.hint) == (
        3,
        "Unset HF_HUB_OFFLINE to download it.",
    )


# This machine


def test_the_cache_is_listed_without_asking_the_hub(
    cache: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    cached_target(cache, TARGET)
    cached_drafter(cache, f"{TARGET}-assistant")
    partial = cached_target(cache, "google/gemma-4-31B-it", "31B")
    (partial / "model-00002-of-00013.safetensors").unlink()
    empty = snapshot(cache, "me/gemma-4-26b-a4b-it")
    empty.mkdir(parents=True)
    (empty / "config.json").write_text(json.dumps(SIZES["26B-A4B"][0]))
    write_small(snapshot(cache, "me/mine"), data=False)
    other = snapshot(cache, "org/llama")
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"model_type": "llama"}')
    (snapshot(cache, "org/damaged")).mkdir(parents=True)

    environment = read_environment()
    assert hub.asked == []
    found = {model.name: model for model in environment.found}
    assert list(found) == [
        "google/gemma-4-31B-it",
        TARGET,
        f"{TARGET}-assistant",
        "me/gemma-4-26b-a4b-it",
        "me/mine",
    ]
    assert [model.kind for model in environment.found].count("drafter") == 1
    assert found["google/gemma-4-31B-it"].missing == ("model-00002-of-00013.safetensors",)
    complete = {name for name, model in found.items() if model.is_complete}
    assert complete == {TARGET, f"{TARGET}-assistant", "me/mine"}
    drafters = {name: model.drafter for name, model in found.items() if model.drafter}
    assert drafters == {TARGET: f"{TARGET}-assistant"}
    assert found[TARGET].bytes == sum(f.stat().st_size for f in found[TARGET].folder.iterdir())
    assert (environment.is_offline, environment.has_token) == (False, True)
    assert TOKEN not in json.dumps(environment_document(environment))


def test_the_bundled_pairs_are_there_and_an_empty_cache_is_no_error(cache: Path) -> None:
    shutil.rmtree(cache)
    environment = read_environment()
    assert environment.found == ()
    assert [(model.name, model.drafter) for model in environment.bundled] == [
        ("pocket", "pocket/assistant"),
        ("pocket-moe", "pocket-moe/assistant"),
    ]
    assert all(model.is_complete for model in environment.bundled)
    assert environment.is_offline


def test_folders_and_defaults_are_those_of_the_environment(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLX_MTP_CACHE", "MLX_MTP_HOME", "MLX_MTP_MODEL"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("MLX_MTP_DRAFTER", raising=False)
    environment = read_environment()
    assert environment.folders == (tmp_path / "MLX_MTP_CACHE", tmp_path / "MLX_MTP_HOME", cache)
    assert (environment.model, environment.drafter) == (str(tmp_path / "MLX_MTP_MODEL"), None)
