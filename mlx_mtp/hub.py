"""Where a model's files are. Owns: names to folders (local, bundled, hub cache, hub) and which
drafter belongs to a target. Knows nothing of what the files mean.

The hub is asked only for what the cache lacks: a complete snapshot costs no network round trip,
and ``HF_HUB_OFFLINE`` is honoured.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from mlx_mtp.errors import MlxMtpError, ModelNotFoundError
from mlx_mtp.files import read_json, weight_files
from mlx_mtp.hub_client import PUBLISHED, hub_errors
from mlx_mtp.links import refuse_links_out

__all__ = ["BUNDLED", "ModelFiles", "choose_drafter", "find_drafter", "resolve"]

log = logging.getLogger("mlx_mtp")

_DATA = Path(__file__).parent / "data"
BUNDLED = {name: _DATA / name / "target" for name in ("pocket", "pocket-moe")}
"""Models that come with the package: one in E-series shape, one with experts."""

_WANTED = [
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "model*.safetensors",
    "drafter/model*.safetensors",
]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_GEMMA = re.compile(
    r"(?P<base>gemma-4-(?:e2b|e4b|12b|26b-a4b|31b)-it(?:-qat)?)(?P<rest>-.*)?", re.IGNORECASE
)


@dataclass(frozen=True)
class ModelFiles:
    """A model found on disk.

    Attributes:
        name: as the user gave it, or the hub's own spelling of it.
        path: the folder that holds config.json.
        revision: the hub's commit hash where the folder is a cached snapshot, else None.
    """

    name: str
    path: Path
    revision: str | None = None

    @property
    def is_published(self) -> bool:
        """Whether the name means something on other machines: a hub id or a bundled model."""
        return self.revision is not None or self.name in BUNDLED


def resolve(name: str, revision: str | None = None) -> ModelFiles:
    """Find a model's folder; download it where the cache lacks it.

    Args:
        name: a bundled name, a folder, or a hub id such as ``google/gemma-4-E4B-it``.
        revision: branch, tag or commit of a hub id.

    Raises:
        ModelNotFoundError: no such folder or hub id, a gated or private model, no network.
        ResourceError: the disk is full.
    """
    if (local := _local(name)) is not None:
        return local
    cached, complete = _cached(name, revision)
    if cached is not None and (complete or is_offline()):
        return cached
    if is_offline():
        raise ModelNotFoundError(
            f"{name} is neither a folder nor complete in the cache, and HF_HUB_OFFLINE is set.",
            "Unset HF_HUB_OFFLINE to download it.",
        )
    try:
        return _downloaded(name, revision)
    except ModelNotFoundError as error:
        if cached is None:
            raise
        log.warning("%s Using the files in the cache.", error.message)
        return cached


def find_here(name: str, revision: str | None = None) -> ModelFiles | None:
    """As `resolve`, but None where something would have to be downloaded."""
    local = _local(name)
    if local is not None:
        return local
    cached, complete = _cached(name, revision)
    if cached is not None and complete:
        return cached
    return resolve(name, revision) if is_offline() else None


def find_drafter(name: str, path: Path) -> Path | None:
    """The drafter that belongs to a target, or None.

    In this order: ``path/drafter``; ``path/../assistant`` beside a folder named target;
    ``path-assistant``; for a hub id its ``-assistant`` names, first in the cache, then on the hub.

    Args:
        name: how the target was named; only hub ids lead to the hub.
        path: its folder.
    """
    here = find_drafter_here(name, path)
    if here is not None:
        return here.path
    for candidate in [] if is_offline() else drafters_on_hub(name, path):
        try:
            return _downloaded(candidate, None).path
        except ModelNotFoundError as error:
            log.info("no drafter %s: %s", candidate, error.message)
    return None


def find_drafter_here(name: str, path: Path | None) -> ModelFiles | None:
    """As `find_drafter`, but nothing is asked of the hub; path None: the target is there alone."""
    beside = None if path is None else drafter_beside(path)
    if beside is not None:
        return ModelFiles(_short_name(beside), _checked(beside, str(beside)), _revision(beside))
    found = (_cached(candidate, None)[0] for candidate in drafters_on_hub(name, path))
    return next((files for files in found if files is not None), None)


def drafters_on_hub(name: str, path: Path | None) -> list[str]:
    """The hub ids that a target's drafter may have, most likely first; none for a mere folder."""
    if path is None:
        return list(drafter_names(name))
    hub_name = _snapshot_name(path) or (name if _HUB_ID.fullmatch(name) else "")
    if not hub_name or (Path(name).exists() and not _snapshot_name(path)):
        return []
    return list(drafter_names(hub_name))


def _local(name: str) -> ModelFiles | None:
    """A bundled model or a folder; None for a hub id. Raises ModelNotFoundError."""
    if name in BUNDLED:
        return ModelFiles(name, _checked(BUNDLED[name], name))
    if not name.strip():
        raise ModelNotFoundError(
            "No model is named.", f"Give a folder or an id like {PUBLISHED[1]}."
        )
    path = _expanded(name)
    if path.exists() or not _HUB_ID.fullmatch(name):
        return ModelFiles(_snapshot_name(path) or name, _checked(path, name), _revision(path))
    return None


def drafter_beside(path: Path) -> Path | None:
    """The drafter in a target's folder or beside it, as `find_drafter` looks for it."""
    path = path.expanduser().absolute()
    local = [path / "drafter", path.parent / f"{path.name}-assistant"]
    if path.name == "target":
        local.insert(1, path.parent / "assistant")
    for folder in local:
        if (folder / "config.json").is_file():
            return folder
    return None


def drafter_names(target: str) -> Iterator[str]:
    """Hub ids a target's drafter may have, most likely first. MLX conversions of drafters keep
    the assistant's name and add their precision, mostly bf16."""
    owner, _, repo = target.partition("/")
    match = _GEMMA.fullmatch(repo)
    if match is None or owner.lower() == "google":
        yield f"{target}-assistant"
        return
    base, rest = match["base"], match["rest"] or ""
    yield f"{owner}/{base}-assistant{rest}"
    if rest.lower() != "-bf16":
        yield f"{owner}/{base}-assistant-bf16"
    official = {name.lower(): name for name in PUBLISHED}.get(f"google/{base}".lower())
    if official is not None:
        yield f"{official}-assistant"


def _expanded(name: str) -> Path:
    """The path a name may be. Raises ModelNotFoundError where it can be none."""
    try:
        path = Path(name).expanduser()
        path.exists()  # of a name that is too long, too
        return path
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelNotFoundError(
            f"There is no folder {name[:80]}, and it is not a hub id.",
            f"Give a folder or an id like {PUBLISHED[1]}.",
        ) from error


def _checked(path: Path, name: str) -> Path:
    """The folder itself, if it holds a model, all of it in there."""
    try:
        _check(path, name)
    except OSError as error:
        raise ModelNotFoundError(
            f"{name} cannot be read: {error.strerror}.", "Check its permissions."
        ) from error
    return path


def _check(path: Path, name: str) -> None:
    if path.suffix.lower() == ".gguf":
        raise ModelNotFoundError(
            f"{name} is a GGUF file, which this program cannot read.",
            "Give the original checkpoint in safetensors format.",
        )
    if path.is_file():
        raise ModelNotFoundError(f"{name} is a file.", "Give the folder that holds config.json.")
    if not path.is_dir():
        near = get_close_matches(name, [*PUBLISHED, *BUNDLED], n=1)
        raise ModelNotFoundError(
            f"There is no folder {name}, and it is not a hub id.",
            f"Did you mean {near[0]}?" if near else f"Give a folder or an id like {PUBLISHED[1]}.",
        )
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ModelNotFoundError(
                f"{name} holds an adapter and no model.",
                "Merge it into the model that it was trained on.",
            )
        inside = [sub.name for sub in sorted(path.iterdir()) if (sub / "config.json").is_file()]
        raise ModelNotFoundError(
            f"{name} holds no config.json.",
            f"Did you mean {Path(name) / inside[-1]}?" if inside else "Give a model's folder.",
        )
    if not path.is_relative_to(_DATA):  # an installer may have linked those to its own store
        refuse_links_out(path)


def _is_complete(path: Path) -> bool:
    """Whether a snapshot has its config and all its weights."""
    try:
        read_json(path / "config.json")
        weight_files(path)
    except MlxMtpError:
        return False
    return True


def _cached(name: str, revision: str | None) -> tuple[ModelFiles | None, bool]:
    """A cached snapshot that can be run (names compared without case), and whether the hub's
    client knows of no file of it that is missing."""
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    folders = Path(constants.HF_HUB_CACHE).glob("models--*--*")
    ids = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
    same = sorted((i for i in ids if i.lower() == name.lower()), key=lambda found: found != name)
    for found in same:
        config = try_to_load_from_cache(found, "config.json", revision=revision)
        if not isinstance(config, str) or not _is_complete(Path(config).parent):
            continue
        path = Path(config).parent
        try:
            snapshot_download(
                found, revision=revision, allow_patterns=_WANTED, local_files_only=True
            )
            complete = True
        except LocalEntryNotFoundError:
            complete = False  # e.g. the tokenizer never arrived
        return ModelFiles(found, path, _revision(path)), complete
    return None, False


def _downloaded(name: str, revision: str | None) -> ModelFiles:
    from huggingface_hub import snapshot_download

    with hub_errors(name, revision):
        path = Path(snapshot_download(name, revision=revision, allow_patterns=_WANTED))
    return ModelFiles(name, _checked(path, name), _revision(path))


def is_offline() -> bool:
    """Whether the hub is not to be asked."""
    from huggingface_hub import constants

    # the client reads the variable once, at its import
    now = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    return now or bool(constants.HF_HUB_OFFLINE)


def _revision(path: Path) -> str | None:
    """The commit hash in a snapshot folder's own name."""
    return None if _snapshot_name(path) is None else path.name


def choose_drafter(
    target: ModelFiles, drafter: str | Path | None
) -> tuple[Path | None, str | None]:
    """The folder of the drafter asked for and what to call it; None, None where there is none.

    Args:
        target: the model it is for.
        drafter: "auto", a folder or hub id, or None for no drafter.

    Raises ModelNotFoundError: one that is named is not there; "auto" may find none.
    """
    if drafter is None:
        return None, None
    if drafter == "auto":
        found = find_drafter(target.name, target.path)
        return found, None if found is None else _short_name(found)
    files = resolve(str(drafter))
    return files.path, files.name


def _short_name(path: Path) -> str:
    """What to call a model's folder: a snapshot's hub id, else its last two parts."""
    return _snapshot_name(path) or "/".join(path.parts[-2:])


def _snapshot_name(path: Path) -> str | None:
    """The hub id in a snapshot folder's own path."""
    path = path.absolute()
    repo = path.parent.parent.name
    if path.parent.name != "snapshots" or not repo.startswith("models--"):
        return None
    return repo.removeprefix("models--").replace("--", "/", 1)
