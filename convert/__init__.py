"""Conversion of a target and its drafter into a pair directory. Owns: the order of the steps.

``OUT/`` is the target as mlx-lm loads it, ``OUT/drafter/`` the assistant under its Hugging Face
names, ``OUT/mlx_mtp.json`` says what they were made from and how. What is quantized and how is
`recipes`' business, files are `writer`'s.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mlx_mtp.convert.recipes import Recipe
from mlx_mtp.convert.writer import PartReport, new_folder, write_drafter, write_json, write_target
from mlx_mtp.errors import UsageError
from mlx_mtp.files import read_json
from mlx_mtp.hub import ModelFiles, find_drafter, resolve
from mlx_mtp.pair import DrafterConfig, TargetConfig, check_pair

__all__ = ["ConvertReport", "PartReport", "Recipe", "convert"]

UNQUANTIZED = 16
"""As ``drafter_bits``: leave the drafter's weights as they are."""


class ConvertReport(NamedTuple):
    """What a conversion wrote.

    Attributes:
        out: the pair directory.
        target, drafter: its parts; drafter is None where there is none.
        warnings: one sentence each.
    """

    out: Path
    target: PartReport
    drafter: PartReport | None
    warnings: tuple[str, ...]


def convert(
    target: str | Path,
    out: str | Path,
    *,
    drafter: str | Path | Literal["auto"] | None = "auto",
    bits: int | None = 4,
    group_size: int | None = None,
    mode: str = "affine",
    drafter_bits: int | None = None,
    dtype: str | None = None,
) -> ConvertReport:
    """Convert a target and its drafter for MLX.

    Everything is written beside ``out`` and moved there at the end, so an interrupted conversion
    leaves no half-written ``out``.

    Args:
        target: a folder or hub id.
        out: the pair directory to make; it must not exist, or be empty.
        drafter: "auto" takes the target's own where one is found, None writes the target alone.
        bits: bits per weight of the target; None keeps the weights as they are stored.
        group_size: weights that share a scale; None: 64 for affine, else what the mode demands.
        mode: "affine", "mxfp4", "nvfp4" or "mxfp8".
        drafter_bits: None: as ``bits``; another number than that is affine; 16 keeps its weights.
        dtype: of everything that is not quantized; None: as stored.

    Raises:
        UsageError: bits, group size and mode that do not go together, an ``out`` that is in use,
            a target that is quantized already. Raised before any file is read or written.
        ModelNotFoundError, IncompatibleError: as `load_target` and `check_pair` say.
        VerificationError: what was written is not whole.
    """
    recipe = Recipe.checked(bits, group_size, mode)
    drafter_recipe = _drafter_recipe(recipe, drafter_bits)
    out = _folder(out)
    _check_free(out)

    files = resolve(str(target))
    if out.is_relative_to(files.path.resolve()):
        raise UsageError(f"{out} lies inside the target's folder.", "Give a folder outside it.")
    config = TargetConfig.from_dict(read_json(files.path / "config.json"), files.name)
    if config.quantization is not None and recipe is not None:
        raise UsageError(
            f"{files.name} is quantized already.",
            "Convert the unquantized checkpoint, or keep its weights with bits none.",
        )
    warnings: list[str] = []
    drafter_files = _find(files, drafter, warnings)
    drafter_config = None
    if drafter_files is not None:
        raw = read_json(drafter_files.path / "config.json")
        drafter_config = DrafterConfig.from_dict(raw, drafter_files.name)
        warnings += check_pair(config, drafter_config, files.name, drafter_files.name)
        if drafter_config.quantization is not None and drafter_recipe is not None:
            warnings.append("The drafter is quantized already; its weights are kept.")
            drafter_recipe = None
        if drafter_config.use_ordered_embeddings and drafter_recipe is not None:
            warnings.append(
                "mlx-vlm, if you use it, cannot read this drafter's quantized table; "
                "--drafter-bits none keeps the drafter readable for it."
            )

    drafter_report = None
    with new_folder(out) as folder:
        report, activation = write_target(files, config, folder, recipe, dtype)
        if drafter_files is not None and drafter_config is not None:
            drafter_report = write_drafter(
                drafter_files, drafter_config, folder / "drafter", drafter_recipe, activation
            )
        write_json(folder / "mlx_mtp.json", _origin(report, drafter_report))
    return ConvertReport(out, report, drafter_report, tuple(warnings))


def _drafter_recipe(recipe: Recipe | None, bits: int | None) -> Recipe | None:
    if bits is None or (recipe is not None and bits == recipe.bits):
        return recipe
    return None if bits == UNQUANTIZED else Recipe.checked(bits, None, "affine")


def _folder(out: str | Path) -> Path:
    try:
        return Path(out).expanduser().resolve()
    except (OSError, RuntimeError) as error:  # a name too long, a home folder that is not there
        raise UsageError(f"{str(out)[:80]} is no path that can be written.") from error


def _check_free(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty.", "Give a folder that does not exist yet.")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file.", "Give a folder that does not exist yet.")


def _find(target: ModelFiles, drafter: str | Path | None, warnings: list[str]) -> ModelFiles | None:
    if drafter is None:
        return None
    if drafter != "auto":
        return resolve(str(drafter))
    found = find_drafter(target.name, target.path)
    if found is None:
        warnings.append(f"No drafter was found for {target.name}; the target is written alone.")
        return None
    return resolve(str(found))


def _origin(target: PartReport, drafter: PartReport | None) -> dict[str, Any]:
    """The contents of mlx_mtp.json."""
    return {
        "format": 1,
        "target": target.record(),
        "drafter": None if drafter is None else drafter.record(),
        "versions": {name: _version(name) for name in ("mlx-mtp", "mlx", "mlx-lm")},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # a source tree that was never installed
        return None
