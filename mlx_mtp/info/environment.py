"""What this machine has. Owns: versions and folders, and the Gemma 4 models that are here already:
in the hub cache and in the package. Asks nobody and reads nothing but configs.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import mlx.core as mx

from mlx_mtp.chat.store import home
from mlx_mtp.depth_table import cache_folder
from mlx_mtp.errors import MlxMtpError
from mlx_mtp.files import read_json, wanted_weights
from mlx_mtp.hub import BUNDLED, find_drafter_here, is_offline, resolve
from mlx_mtp.measure.machine import Machine, this_machine
from mlx_mtp.model.memory import device_limit
from mlx_mtp.pair import DRAFTER_TYPES, TARGET_TYPES
from mlx_mtp.versions import OWN, versions

MODEL_VARIABLE, DRAFTER_VARIABLE = "MLX_MTP_MODEL", "MLX_MTP_DRAFTER"


class Folders(NamedTuple):
    """Where things are kept: what is learned, conversations, and the hub's files."""

    cache: Path
    conversations: Path
    hub_cache: Path


@dataclass(frozen=True)
class FoundModel:
    """A model on this machine.

    Attributes:
        kind: what it serves as.
        name: its hub id, or a bundled name.
        folder: its snapshot.
        revision: the hub's commit; None of a bundled one.
        bytes: of the files that are there.
        weight_files: how many it has when it is complete; 0: no weights are known of.
        missing: the names of those that are not there.
        drafter: what `auto` would take without asking the hub; None for a drafter, or where there
            is none.
    """

    kind: Literal["target", "drafter"]
    name: str
    folder: Path
    revision: str | None
    bytes: int
    weight_files: int
    missing: tuple[str, ...]
    drafter: str | None

    @property
    def is_complete(self) -> bool:
        return self.weight_files > 0 and not self.missing


@dataclass(frozen=True)
class Environment:
    """This machine, its settings and its models.

    Attributes:
        versions: by package, and Python's.
        working_set_bytes: what MLX recommends to take at most; None on the CPU.
        limit_bytes: what models may take where nothing else is said.
        is_offline: the hub is not asked for anything.
        has_token: one for the hub is set; which one is nobody's business.
        model, drafter: what the environment names instead of the defaults.
        found: in the hub's cache, by name.
        bundled: those that come with the package.
    """

    versions: dict[str, str | None]
    machine: Machine
    working_set_bytes: int | None
    limit_bytes: int
    folders: Folders
    is_offline: bool
    has_token: bool
    model: str | None
    drafter: str | None
    found: tuple[FoundModel, ...]
    bundled: tuple[FoundModel, ...]


def read_environment() -> Environment:
    """Look around."""
    from huggingface_hub import constants, get_token

    hub_cache = Path(constants.HF_HUB_CACHE)
    working_set = mx.device_info().get("max_recommended_working_set_size")
    return Environment(
        versions=versions((*OWN, "huggingface_hub")) | {"python": platform.python_version()},
        machine=this_machine(),
        working_set_bytes=None if working_set is None else int(working_set),
        limit_bytes=device_limit(),
        folders=Folders(cache_folder(), home(), hub_cache),
        is_offline=is_offline(),
        has_token=bool(get_token()),
        model=os.environ.get(MODEL_VARIABLE) or None,
        drafter=os.environ.get(DRAFTER_VARIABLE) or None,
        found=tuple(_cached_models(hub_cache)),
        bundled=tuple(_bundled()),
    )


def _bundled() -> Iterator[FoundModel]:
    for name in BUNDLED:
        found = _model(name, resolve(name).path, None)
        if found is not None:
            yield found


def _cached_models(cache: Path) -> Iterator[FoundModel]:
    """Gemma 4 models among the snapshots of a hub cache, by name."""
    for repo in sorted(cache.glob("models--*--*"), key=lambda path: path.name.lower()):
        name = repo.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted(repo.glob("snapshots/*")):
            found = _model(name, snapshot, snapshot.name)
            if found is not None:
                yield found


def _model(name: str, folder: Path, revision: str | None) -> FoundModel | None:
    """What a folder holds; None where it is no model of ours."""
    try:
        model_type = read_json(folder / "config.json").get("model_type")
    except MlxMtpError:
        return None
    if model_type not in (*TARGET_TYPES, *DRAFTER_TYPES):
        return None
    wanted: list[str] = []
    with suppress(MlxMtpError):  # a damaged index is as good as none
        wanted = wanted_weights(folder)
    is_target = model_type in TARGET_TYPES
    drafter = find_drafter_here(name, folder) if is_target else None
    return FoundModel(
        kind="target" if is_target else "drafter",
        name=name,
        folder=folder,
        revision=revision,
        bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        weight_files=len(wanted),
        missing=tuple(name for name in wanted if not (folder / name).is_file()),
        drafter=None if drafter is None else drafter.name,
    )
