"""The folder that a conversion makes. Owns: the working folder beside it, its state and lock, the
files that go along with the weights, and the moment at which all of it becomes OUT.

While a conversion of ``OUT`` is under way, everything is in ``.OUT.partial`` beside it: ``pair/``
becomes OUT, ``source/`` holds downloads that are removed after use, ``state.json`` says which plan
is being carried out. OUT itself is never half-written, and what it held stays until then.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlx_mtp.convert.plan import Plan
from mlx_mtp.convert.sources import Source
from mlx_mtp.errors import MlxMtpError, ResourceError, UsageError
from mlx_mtp.files import read_json, write_json

log = logging.getLogger("mlx_mtp")

ORIGIN = "mlx_mtp.json"
DRAFTER = "drafter"

_TOKENIZER = [
    *("tokenizer*.json", "tokenizer*.model", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*.jinja", "chat_template*.json"),
]
"""By their suffixes, too: code that comes with a checkpoint stays behind."""
_GO_ALONG = [*_TOKENIZER, "generation_config.json", "LICENSE*", "NOTICE*"]
_TOWER_FILES = ["processor_config.json", "preprocessor_config.json"]


def folder_of(out: str | Path) -> Path:
    """OUT as an absolute path. Raises UsageError where it can be none."""
    if not str(out).strip():
        raise UsageError("The output has no name.", "Give a folder that does not exist yet.")
    try:
        return Path(out).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # e.g. too long, a home that is not there
        raise UsageError(
            f"{str(out)[:80]} is no path that can be written.", "Give another folder."
        ) from error


class Workplace:
    """Where a conversion works; one process at a time.

    Args:
        out: absolute; what will be made.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.parent / f".{out.name}.partial"
        self.pair = self.folder / "pair"
        self.staging = self.folder / "source"
        self._state = self.folder / "state.json"
        self._replaced = out.parent / f".{out.name}.replaced"

    def check_free(self, *, overwrite: bool) -> None:
        """Raises UsageError: OUT is in use and may not, or must not, be replaced."""
        out = self.out
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file.", "Give a folder that does not exist yet.")
        if not out.is_dir() or not any(out.iterdir()):
            return
        if not overwrite:
            raise UsageError(
                f"{out} is not empty.", "Give a folder that does not exist yet, or --overwrite."
            )
        if not (out / ORIGIN).is_file():
            raise UsageError(
                f"{out} is no conversion of this program, so it is not replaced.",
                "Remove it yourself, or give another folder.",
            )

    def is_done(self, digest: str) -> bool:
        """Whether OUT is the result of the very same plan."""
        return _plan_of(self.out / ORIGIN) == digest

    def was_published(self, digest: str) -> bool:
        """Whether a run of this plan was killed after OUT had appeared, before it had tidied up."""
        return self.is_done(digest) and _plan_of(self._state) == digest and not self.pair.exists()

    @contextmanager
    def opened(self, digest: str) -> Iterator[dict[str, Any]]:
        """Within it the folder is ours. Gives the state of an earlier run of the same plan, or a
        new one; what another plan left is removed first.

        Raises UsageError where nothing can be written there or another process works there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(
                f"{self.out} cannot be written: {error.strerror}.", "Give a folder of your own."
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise UsageError(
                f"Another process is writing {self.out}.", "Wait for it, or choose another output."
            ) from error
        try:
            state = self._restored(digest)
            self.pair.mkdir(exist_ok=True)
            yield state
        finally:
            if not self._is_worth_keeping():
                shutil.rmtree(self.folder, ignore_errors=True)
            os.close(lock)

    def save(self, state: dict[str, Any]) -> None:
        """Put the state on the disk, in one piece."""
        new = self._state.with_suffix(".new")
        write_json(new, state)
        new.replace(self._state)

    def publish(self) -> None:
        """Let the pair become OUT, and remove everything else. Within `opened`."""
        if self.out.is_dir() and any(self.out.iterdir()):
            shutil.rmtree(self._replaced, ignore_errors=True)
            self.out.replace(self._replaced)
        self.pair.replace(self.out)
        self.forget()

    def forget(self) -> None:
        """Remove the working folder and what OUT was before."""
        shutil.rmtree(self._replaced, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def check_disk(self, plan: Plan) -> None:
        """Raises ResourceError where the disk has less room than what is still to be written."""
        there = _nearest(self.out.parent)
        written = _allocated(self.pair)
        needed = max(plan.disk_bytes - written, 0) + cache_bytes(plan, there)
        free = free_bytes(self.out)
        if needed > free:
            raise ResourceError(
                f"The conversion needs {needed / 1e9:.2f} GB on the disk of {there}, which has "
                f"{free / 1e9:.2f} GB free.",
                "Free some space, give another folder, fewer bits, or --low-disk.",
            )

    def _is_worth_keeping(self) -> bool:
        """Whether a run that goes on would save anything."""
        whole = self.pair.rglob("*.safetensors")
        return any(whole) or (self.staging.exists() and any(self.staging.rglob("*")))

    def _restored(self, digest: str) -> dict[str, Any]:
        found = _plan_of(self._state)
        state = read_json(self._state) if found == digest else None
        if state is None:
            if found is not None:
                log.info("What another command left in %s is removed.", self.folder)
            for folder in (self.pair, self.staging):
                shutil.rmtree(folder, ignore_errors=True)
            state = {"plan": digest, "checked": {}}
            self.save(state)
        return state


def free_bytes(out: Path) -> int:
    """Free on the disk where OUT is or will be."""
    return shutil.disk_usage(_nearest(out)).free


def cache_bytes(plan: Plan, folder: Path) -> int:
    """What the hub's cache will take on the disk of a folder."""
    if plan.low_disk or not (size := plan.download_bytes):
        return 0
    from huggingface_hub import constants

    cache = _nearest(Path(constants.HF_HUB_CACHE))
    return size if os.stat(cache).st_dev == os.stat(folder).st_dev else 0


def copy_along(source: Source, folder: Path, *, is_drafter: bool, towers: bool) -> None:
    """The files that belong to a model besides its weights and config.json."""
    patterns = ["generation_config.json"] if is_drafter else list(_GO_ALONG)
    if towers and not is_drafter:
        patterns += _TOWER_FILES
    for name in source.matching(patterns):
        shutil.copyfile(source.fetch(name), folder / name)


def _plan_of(file: Path) -> str | None:
    """The digest of the plan that a state or an mlx_mtp.json belongs to."""
    with suppress(MlxMtpError):
        found = read_json(file).get("plan")
        return found if isinstance(found, str) else None
    return None


def _nearest(folder: Path) -> Path:
    """It, or what exists above it."""
    while not folder.exists():
        folder = folder.parent
    return folder


def _allocated(folder: Path) -> int:
    """Bytes that the files of a folder have on the disk."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
