"""Where tensors come from. Owns: a folder or a hub repository as a list of stored tensors, known
from headers alone, and its files one by one. Knows nothing of what the tensors mean.

A hub repository is downloaded file by file, when the writer comes to it; with a staging folder
each weight file is removed from there after use. A folder is never written to.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mlx_mtp.errors import IncompatibleError, MlxMtpError, ModelNotFoundError, UsageError
from mlx_mtp.files import (
    INDEX,
    TensorInfo,
    fingerprint,
    indexed_files,
    read_json,
    read_places,
    weight_files,
)
from mlx_mtp.hub import ModelFiles, drafters_on_hub, find_drafter_here, find_here
from mlx_mtp.hub_client import RemoteModel

_AGAIN = "Download the model again, or use another revision."


class Stored(NamedTuple):
    """One tensor of a checkpoint: its name there, its weight file, and its header's entry."""

    name: str
    file: str
    info: TensorInfo


class Source(Protocol):
    """A checkpoint.

    Attributes:
        name: as the user gave it, or the hub's spelling of it.
        label: what records of the conversion call it; no path of this machine.
        revision: the hub's commit hash, or None.
        where: what messages call its files.
    """

    name: str
    label: str
    revision: str | None
    where: Path

    def config(self) -> dict[str, Any]:
        """Its config.json."""

    def tensors(self) -> list[Stored]:
        """All tensors, in the order in which they are stored. Reads headers alone.

        Raises ModelNotFoundError: files missing or damaged, a name stored twice.
        """

    def identity(self) -> str:
        """Changes whenever the checkpoint does."""

    def download_bytes(self) -> int:
        """What is not on this machine yet."""

    def largest_download(self) -> int:
        """Of `download_bytes`, the largest file's."""

    def matching(self, patterns: list[str]) -> list[str]:
        """The names of its files that match any of these, sorted."""

    def files(self) -> dict[str, int]:
        """Its files by name, and their bytes; not those in folders of its own."""

    def fetch(self, file: str, report: Callable[[int], None] | None = None) -> Path:
        """A file of it on this machine; ``report`` is told each time that bytes have arrived."""

    def release(self, file: str) -> None:
        """The weight file is not needed again."""


class FolderSource:
    """A checkpoint in a folder; see `Source`."""

    def __init__(self, files: ModelFiles) -> None:
        self.name, self.revision, self.where = files.name, files.revision, files.path
        # of a folder its last two parts: the rest is nobody's business
        self.label = (
            files.name if files.is_published else "/".join(files.path.absolute().parts[-2:])
        )

    def config(self) -> dict[str, Any]:
        return read_json(self.where / "config.json")

    def tensors(self) -> list[Stored]:
        refuse_gguf(self.where)
        files = weight_files(self.where)
        headers = {}
        for file in files:
            places = sorted(read_places(file).items(), key=lambda item: item[1].offset)
            headers[file.name] = {name: placed.info for name, placed in places}
        return _merged(headers, str(self.where))

    def identity(self) -> str:
        return fingerprint(self.where)

    def download_bytes(self) -> int:
        return 0

    def largest_download(self) -> int:
        return 0

    def matching(self, patterns: list[str]) -> list[str]:
        found = {
            file.name for pattern in patterns for file in self.where.glob(pattern) if file.is_file()
        }
        return sorted(found)

    def files(self) -> dict[str, int]:
        found = (file for file in sorted(self.where.iterdir()) if file.is_file())
        return {file.name: file.stat().st_size for file in found}

    def fetch(self, file: str, report: Callable[[int], None] | None = None) -> Path:
        return self.where / file

    def release(self, file: str) -> None:
        pass


class HubSource:
    """A checkpoint on the hub, downloaded file by file; see `Source`.

    Args:
        remote: the repository.
        staging: where weight files are downloaded to, and removed from after use; None: the
            hub's cache, which keeps them.
    """

    def __init__(self, remote: RemoteModel, staging: Path | None) -> None:
        self.name = self.label = remote.name
        self.revision: str | None = remote.revision
        self.where = Path(remote.name)
        self._remote = remote
        self._names: list[str] | None = None
        # two repositories have files of the same names
        self._staging = None if staging is None else staging / remote.name.replace("/", "--")

    def config(self) -> dict[str, Any]:
        return read_json(self.fetch("config.json"))

    def tensors(self) -> list[Stored]:
        names = self._weight_files()
        headers = {name: self._remote.header(name) for name in names}
        return _merged(headers, self.name)

    def identity(self) -> str:
        return f"{self.name} {self.revision}"

    def download_bytes(self) -> int:
        return sum(self._remote.files[name] for name in self._weight_files())

    def largest_download(self) -> int:
        return max(self._remote.files[name] for name in self._weight_files())

    def matching(self, patterns: list[str]) -> list[str]:
        found = (n for n in self._remote.files if any(fnmatch(n, p) for p in patterns))
        return sorted(name for name in found if "/" not in name)

    def files(self) -> dict[str, int]:
        return {name: size for name, size in self._remote.files.items() if "/" not in name}

    def fetch(self, file: str, report: Callable[[int], None] | None = None) -> Path:
        if file not in self._remote.files:
            raise ModelNotFoundError(f"{self.name} has no {file} on the hub.", _AGAIN)
        staged = self._staging if file.endswith(".safetensors") else None
        return self._remote.fetch(file, staged, report)

    def release(self, file: str) -> None:
        if self._staging is not None:
            (self._staging / file).unlink(missing_ok=True)

    def _weight_files(self) -> list[str]:
        if self._names is None:
            self._names = self._listed()
        return self._names

    def _listed(self) -> list[str]:
        names = [
            name for name in self._remote.files if re.fullmatch(r"model[^/]*\.safetensors", name)
        ]
        if INDEX in self._remote.files:
            names = indexed_files(self.fetch(INDEX))
            missing = [name for name in names if name not in self._remote.files]
            if missing:
                raise ModelNotFoundError(f"{self.name} lacks {', '.join(missing[:5])}.", _AGAIN)
        if not names:
            if any(name.endswith(".gguf") for name in self._remote.files):
                raise _gguf(self.name)
            raise ModelNotFoundError(
                f"{self.name} holds no model*.safetensors.",
                "Use a checkpoint in safetensors format.",
            )
        return sorted(names)


def open_source(name: str, revision: str | None = None, staging: Path | None = None) -> Source:
    """A checkpoint by folder, bundled name or hub id; nothing large is downloaded.

    Args:
        revision: branch, tag or commit of a hub id.
        staging: see `HubSource`.

    Raises:
        ModelNotFoundError: no such folder or hub id.
        IncompatibleError: a GGUF file.
        UsageError: a revision of a folder.
    """
    refuse_gguf(Path(name))
    found = find_here(name, revision)
    if found is None:
        return HubSource(RemoteModel.open(name, revision), staging)
    if revision is not None and found.revision is None:
        raise UsageError(
            f"{name} is a folder and has no revision.", "Give a hub id, or no revision."
        )
    return FolderSource(found)


def open_drafter(target: Source, drafter: str | None, staging: Path | None) -> Source | None:
    """The drafter that is asked for; None where it is None, or "auto" and there is none.

    Raises as `open_source` where one is named.
    """
    if drafter is None:
        return None
    if drafter != "auto":
        return open_source(drafter, None, staging)
    folder = target.where if isinstance(target, FolderSource) else None
    found = find_drafter_here(target.name, folder)
    if found is not None:
        return FolderSource(found)
    for candidate in drafters_on_hub(target.name, folder):
        try:
            return open_source(candidate, None, staging)
        except MlxMtpError:
            continue
    return None


def refuse_gguf(path: Path) -> None:
    """Raises IncompatibleError for a GGUF file and for a folder with no other weights."""
    try:
        is_one = path.suffix.lower() == ".gguf" or (
            any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
        )
    except OSError:
        return
    if is_one:
        raise _gguf(str(path))


def _gguf(name: str) -> IncompatibleError:
    return IncompatibleError(
        f"{name} holds GGUF weights, which cannot be read.",
        "Give the original checkpoint in safetensors, e.g. google/gemma-4-E4B-it.",
    )


def _merged(headers: dict[str, dict[str, TensorInfo]], where: str) -> list[Stored]:
    found: dict[str, Stored] = {}
    for file, tensors in headers.items():
        for name, info in tensors.items():
            if name in found:
                raise ModelNotFoundError(
                    f"{where}: {name} is both in {found[name].file} and in {file}.",
                    "Remove the files of another conversion from the folder.",
                )
            found[name] = Stored(name, file, info)
    return list(found.values())
