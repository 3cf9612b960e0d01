"""Conversion of a target and its drafter into a pair directory. Owns: the order of the steps.

``OUT/`` is the target as mlx-lm loads it, ``OUT/drafter/`` the assistant under its Hugging Face
names, ``OUT/mlx_mtp.json`` says what they were made from and how, ``OUT/README.md`` says it to
people. `plan` decides everything from headers before a tensor is read; `writer` carries it out a
block at a time; `check` reads it back; `output` makes it OUT.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from mlx_mtp.convert.blocks import Reader
from mlx_mtp.convert.card import model_card, origin
from mlx_mtp.convert.check import (
    CheckReport,
    Decoding,
    check_decoding,
    check_part,
    check_tensor,
)
from mlx_mtp.convert.output import DRAFTER, ORIGIN, Workplace, copy_along, folder_of
from mlx_mtp.convert.parts import PartPlan
from mlx_mtp.convert.plan import Plan, make_plan, resident_bytes
from mlx_mtp.convert.recipes import UNQUANTIZED, Options
from mlx_mtp.convert.tensors import Shard, TensorPlan
from mlx_mtp.convert.writer import Observer, PartWriter, Progress, is_whole
from mlx_mtp.errors import UsageError, VerificationError
from mlx_mtp.files import write_json

__all__ = [
    "UNQUANTIZED",
    "CheckReport",
    "ConvertReport",
    "Options",
    "PartPlan",
    "Plan",
    "Progress",
    "convert",
    "plan",
]

_DEFAULT = Options()


class ConvertReport(NamedTuple):
    """What a conversion wrote.

    Attributes:
        out: the pair directory.
        plan: what was carried out.
        check: what the check found; None where it was not wanted.
        seconds: of this run.
        bytes_resumed: of source data that an earlier run had done.
        peak_bytes: the process's memory at its largest, the check included.
        was_done: OUT was there already, made by the same plan; nothing was written.
    """

    out: Path
    plan: Plan
    check: CheckReport | None
    seconds: float
    bytes_resumed: int
    peak_bytes: int
    was_done: bool

    @property
    def target(self) -> PartPlan:
        return self.plan.target

    @property
    def drafter(self) -> PartPlan | None:
        return self.plan.drafter

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.plan.warnings


def plan(
    target: str | Path,
    out: str | Path | None = None,
    options: Options = _DEFAULT,
    *,
    drafter: str | Path | None = "auto",
    revision: str | None = None,
    low_disk: bool = False,
) -> Plan:
    """What `convert` would do with the same arguments; writes nothing, downloads nothing large.

    Raises as `convert`, except for what only writing can find.
    """
    options.check()
    staging = None
    if low_disk:
        staging = Workplace(folder_of(out or "model")).staging
    return make_plan(target, options, drafter=drafter, revision=revision, staging=staging)


def convert(
    target: str | Path,
    out: str | Path,
    options: Options = _DEFAULT,
    *,
    drafter: str | Path | None = "auto",
    revision: str | None = None,
    verify: bool = True,
    overwrite: bool = False,
    low_disk: bool = False,
    observe: Observer | None = None,
) -> ConvertReport:
    """Convert a target and its drafter for MLX.

    Everything is written to ``.OUT.partial`` beside ``out`` and becomes ``out`` at the end. What
    an interruption leaves there, the same call goes on with; after other arguments it is removed.

    Args:
        target: a folder, a bundled name or a hub id.
        out: the pair directory to make; it must not exist, or be empty.
        options: what is done to the weights.
        drafter: "auto" takes the target's own where one is found, None writes the target alone.
        revision: branch, tag or commit of the target's hub id.
        verify: read back and compare what was written, and decode with it where memory allows.
        overwrite: ``out`` may be an earlier conversion; it is replaced at the end.
        low_disk: remove each weight file that was downloaded once it is used.
        observe: is told how far it is.

    Raises:
        UsageError: options that do not go together, an ``out`` that is in use, a target that is
            quantized already. Raised before anything is written.
        ModelNotFoundError, IncompatibleError: as `make_plan` says; also weights that are not
            finite, found when they are read.
        ResourceError: the disk is too small or full.
        VerificationError: what was written is not right.
    """
    began = perf_counter()
    place = Workplace(folder_of(out))
    planned = plan(target, out, options, drafter=drafter, revision=revision, low_disk=low_disk)
    _check_outside(place.out, planned)
    if _is_done(place, planned, overwrite=overwrite):
        place.forget()
        return ConvertReport(place.out, planned, None, 0.0, 0, resident_bytes(), True)
    place.check_free(overwrite=overwrite)
    place.check_disk(planned)
    with place.opened(planned.digest) as state:
        total = sum(tensor.source_bytes for part in planned.parts for tensor in part.tensors)
        progress = Progress("write", "target", 0, 0, 0, total)
        for name, part in _named(planned):
            folder = _folder(place.pair, name)
            folder.mkdir(exist_ok=True)
            inspector = _Inspector(place, state, name) if verify else None
            progress = progress._replace(part=name)
            writer = PartWriter(part, folder, progress, observe, inspector)
            writer.write()
            progress = writer.progress
        for name, part in _named(planned):
            folder = _folder(place.pair, name)
            write_json(folder / "config.json", part.config)
            towers = options.towers == "keep"
            copy_along(part.source, folder, is_drafter=name == DRAFTER, towers=towers)
        if observe is not None:
            observe(progress._replace(step="check"))
        check = _checked(planned, place, state) if verify else None
        write_json(place.pair / ORIGIN, origin(planned, check))
        (place.pair / "README.md").write_text(model_card(planned, check, place.out.name))
        place.publish()
    seconds = perf_counter() - began
    resumed = progress.bytes_skipped
    return ConvertReport(place.out, planned, check, seconds, resumed, resident_bytes(), False)


def _is_done(place: Workplace, planned: Plan, *, overwrite: bool) -> bool:
    """Whether OUT is there already, whole; asked to overwrite it, only a run that was killed at
    its very end counts."""
    digest = planned.digest
    if not (place.was_published(digest) if overwrite else place.is_done(digest)):
        return False
    return all(
        is_whole(_folder(place.out, name), shard)
        for name, part in _named(planned)
        for shard in part.shards
    )


class _Inspector:
    """Checks each tensor, and keeps what it found of a shard in the state, for runs that go on."""

    def __init__(self, place: Workplace, state: dict[str, Any], part: str) -> None:
        self._place = place
        self._checked = state["checked"]
        self._state = state
        self._part = part
        self._errors: dict[str, float] = {}

    def tensor(
        self, tensor: TensorPlan, reader: Reader, file: Path, sources: dict[str, Path]
    ) -> None:
        error = check_tensor(tensor, reader, file, sources)
        if tensor.action == "quantize":
            self._errors[tensor.part] = max(self._errors.get(tensor.part, 0.0), error)

    def shard(self, shard: Shard) -> None:
        self._checked[f"{self._part}/{shard.file}"] = self._errors
        self._errors = {}
        self._place.save(self._state)

    def found(self, shard: Shard, part: PartPlan, folder: Path) -> dict[str, float]:
        """Part -> largest relative error in a shard; checks it now where no run has done so."""
        key = f"{self._part}/{shard.file}"
        if key not in self._checked:
            written = folder / shard.file
            with Reader() as reader:
                for tensor in shard.tensors:
                    files = {file: part.source.fetch(file) for file in tensor.files}
                    try:
                        self.tensor(tensor, reader, written, files)
                    except VerificationError:
                        written.unlink()  # so that the same command writes it again
                        raise
            self.shard(shard)
        errors: dict[str, float] = self._checked[key]
        return errors


def _checked(planned: Plan, place: Workplace, state: dict[str, Any]) -> CheckReport:
    errors: dict[str, float] = {}
    tensors = 0
    for name, part in _named(planned):
        folder = _folder(place.pair, name)
        check_part(part, folder, is_drafter=name == DRAFTER)
        inspector = _Inspector(place, state, name)
        for shard in part.shards:
            for kind, error in inspector.found(shard, part, folder).items():
                errors[kind] = max(errors.get(kind, 0.0), error)
            tensors += len(shard.tensors)
    decoding: Decoding = check_decoding(place.pair, has_drafter=planned.drafter is not None)
    return CheckReport(tensors, errors, decoding)


def _named(planned: Plan) -> list[tuple[str, PartPlan]]:
    return list(zip(("target", DRAFTER), planned.parts, strict=False))


def _folder(pair: Path, part: str) -> Path:
    return pair / DRAFTER if part == DRAFTER else pair


def _check_outside(out: Path, planned: Plan) -> None:
    for name, part in _named(planned):
        where = part.source.where
        if where.is_dir() and (
            out.is_relative_to(where.resolve()) or where.resolve().is_relative_to(out)
        ):
            raise UsageError(
                f"{out} lies inside the {name}'s folder, or holds it.", "Give a folder outside it."
            )
