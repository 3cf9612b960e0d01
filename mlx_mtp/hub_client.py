"""The hub, asked over the network. Owns: its client's errors as sentences, the files of a
repository one by one, their safetensors headers without the data, and uploads.

Which name means which folder, and what is in the cache, is `hub`'s business.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

from mlx_mtp.errors import MlxMtpError, ModelNotFoundError, ResourceError
from mlx_mtp.files import TensorInfo, needed_bytes
from mlx_mtp.plain import without_tokens

PUBLISHED = tuple(f"google/gemma-4-{size}-it" for size in ("E2B", "E4B", "12B", "26B-A4B", "31B"))

log = logging.getLogger("mlx_mtp")


@contextmanager
def hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Turns what the client raises into ModelNotFoundError, or ResourceError: the disk is full."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except MlxMtpError:
        raise
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name} is gated and this machine has no access to it.",
            f"Accept its terms at https://huggingface.co/{name}, then run `hf auth login`.",
        ) from error
    except RepositoryNotFoundError as error:
        near = get_close_matches(name, PUBLISHED, n=1)
        raise ModelNotFoundError(
            f"There is no folder {name}, and no such model on the hub.",
            f"Did you mean {near[0]}?" if near else "If it is private, run `hf auth login`.",
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(
            f"{name} has no revision {revision} on the hub.", "Give a branch, tag or commit hash."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"{name} is not in the cache, and the hub cannot be reached.",
            "Check the network, or give a folder.",
        ) from error
    except UnicodeEncodeError as error:
        raise ModelNotFoundError(
            "The hub's token has letters that no token has.",
            "Set HF_TOKEN anew, or run `hf auth login`.",
        ) from error
    except Exception as error:  # the hub client lets its HTTP library's errors through
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ResourceError(
                f"The disk is full; {name} could not be downloaded.",
                "Free some space and run the command again; what has arrived is kept.",
            ) from error
        reason = next(iter(str(error).splitlines()), "").strip() or type(error).__name__
        raise ModelNotFoundError(
            f"{name} could not be downloaded: {without_tokens(reason).rstrip('.')}.",
            "Check the name and the network, then run it again; what has arrived is kept.",
        ) from error


@dataclass(frozen=True)
class RemoteModel:
    """A repository on the hub at one commit, of which nothing has been downloaded.

    Attributes:
        name: its id.
        revision: the commit's hash.
        files: path -> bytes.
    """

    name: str
    revision: str
    files: dict[str, int] = field(repr=False)

    @classmethod
    def open(cls, name: str, revision: str | None) -> RemoteModel:
        """Ask the hub for a repository's commit and files. Raises as `hub_errors`."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        with hub_errors(name, revision):
            api = HfApi()
            commit = api.model_info(name, revision=revision).sha
            if commit is None:
                raise ModelNotFoundError(
                    f"The hub names no commit of {name}.", "Name a revision, or try again later."
                )
            tree = api.list_repo_tree(name, recursive=True, revision=commit)
            files = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
        return cls(name, commit, files)

    def header(self, file: str) -> dict[str, TensorInfo]:
        """The tensors of a safetensors file in the order of their data, from its first bytes.

        Raises as `hub_errors`.
        """
        from huggingface_hub import HfApi

        with hub_errors(self.name, self.revision):
            found = HfApi().parse_safetensors_file_metadata(self.name, file, revision=self.revision)
        tensors = {}
        for name, entry in sorted(found.tensors.items(), key=lambda item: item[1].data_offsets):
            begin, end = entry.data_offsets
            info = TensorInfo(str(entry.dtype), tuple(entry.shape), end - begin)
            if info.nbytes != needed_bytes(info):
                raise ModelNotFoundError(
                    f"{self.name}: {file} is damaged: {name} has {info.nbytes:,} bytes, which do "
                    "not fit its shape.",
                    "Take another revision.",
                )
            tensors[name] = info
        return tensors

    def fetch(
        self, file: str, folder: Path | None = None, report: Callable[[int], None] | None = None
    ) -> Path:
        """Download a file, or go on with its download: to the hub's cache, or to a folder.

        Args:
            report: is told the bytes that have arrived, each time some have; the client then
                shows no bar of its own. None: it shows one where it finds a terminal.

        Raises as `hub_errors`.
        """
        from huggingface_hub import hf_hub_download

        bar = None
        if report is not None and "tqdm_class" in signature(hf_hub_download).parameters:
            bar = _reporting(report)
        with hub_errors(self.name, self.revision):
            if bar is None:  # the older clients know no such argument
                return Path(
                    hf_hub_download(self.name, file, revision=self.revision, local_dir=folder)
                )
            return Path(
                hf_hub_download(
                    self.name, file, revision=self.revision, local_dir=folder, tqdm_class=bar
                )
            )


def _reporting(report: Callable[[int], None]) -> Any:
    """A progress bar for the client that reports instead of drawing."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Reporting(tqdm):
        def update(self, n: float | None = 1) -> None:
            report(int(n or 0))

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            pass

        def clear(self, nolock: bool = False) -> None:
            pass

        def close(self) -> None:
            self.disable = True

    return Reporting


def logged_in_name(name: str) -> str:
    """The hub user that uploads are made as. ``name`` is where to; it only serves messages.

    Raises ModelNotFoundError: nobody is logged in, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import LocalTokenNotFoundError

    try:
        return str(HfApi().whoami()["name"])
    except LocalTokenNotFoundError as error:
        raise ModelNotFoundError(
            f"{name} cannot be uploaded: nobody is logged in to the hub.", "Run `hf auth login`."
        ) from error
    except Exception as error:  # the hub client lets its HTTP library's errors through
        raise ModelNotFoundError(
            f"{name} cannot be uploaded: the hub does not say who is logged in.",
            "Check the network, then run `hf auth login`.",
        ) from error


def upload_folder(folder: Path, name: str, *, private: bool = True) -> str:
    """Upload a folder as a model repository, which is made where there is none. Returns its URL.

    Raises as `hub_errors`.
    """
    from huggingface_hub import HfApi

    with hub_errors(name, None):
        api = HfApi()
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload with mlx-mtp")
    return str(url)
