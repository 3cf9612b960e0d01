"""The files of a pair directory. Owns: quantizing lazily loaded weights, shards and their index,
configs and the files that go along. Knows nothing of how a pair is found or checked.

Tensors are evaluated one at a time in the order they are written, so a shard and one source
tensor are in memory at once, not the model.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.convert.recipes import Params, Recipe, block_of
from mlx_mtp.errors import MlxMtpError, ResourceError, UsageError, VerificationError
from mlx_mtp.files import INDEX, read_header, weight_files
from mlx_mtp.hub import ModelFiles
from mlx_mtp.model.load import activation_dtype, load_drafter, load_target
from mlx_mtp.pair import DrafterConfig, TargetConfig

log = logging.getLogger("mlx_mtp")

SHARD_BYTES = 2 * 1024**3
"""Most bytes in one weight file."""

_TOKENIZER = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"]
_GO_ALONG = [*_TOKENIZER, "generation_config.json", "LICENSE*", "NOTICE*"]


class PartReport(NamedTuple):
    """What was written for a target or a drafter.

    Attributes:
        source, revision: what it was made from; revision is a hub snapshot's commit hash.
        dtype: of what is not quantized.
        quantization: the config's block, or None.
        unquantized: matrices that the recipe asked to quantize and that were not: name -> why.
        source_bytes, bytes: of the weight files read and written.
    """

    source: str
    revision: str | None
    dtype: str
    quantization: Params | None
    unquantized: dict[str, str]
    source_bytes: int
    bytes: int

    def record(self) -> dict[str, Any]:
        """What mlx_mtp.json says of it."""
        values = self._asdict()
        del values["source_bytes"], values["bytes"]
        return values


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that becomes ``out`` at the end, and vanishes on any failure.

    Raises UsageError where nothing can be written there, ResourceError where the disk is full.
    """
    for left in out.parent.glob(f".{out.name}.*.partial"):
        log.warning("A conversion that was killed left %s; remove it.", left)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written: {error.strerror}.", "Give a folder of your own."
        ) from error
    try:
        folder = partial / out.name  # made here, so with the usual permissions
        folder.mkdir()
        yield folder
        folder.replace(out)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ResourceError("The disk is full.", "Free some space and try again.") from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_target(
    files: ModelFiles,
    config: TargetConfig,
    folder: Path,
    recipe: Recipe | None,
    dtype: str | None,
) -> tuple[PartReport, mx.Dtype]:
    """Write a target as mlx-lm loads it; returns the report and the activation dtype."""
    model = load_target(files.path, config, dtype, lazy=True)
    activation = activation_dtype(model)
    raw = config.mlx_lm_config | {"dtype": _name(activation)}
    report = _write(model, files, raw, folder, recipe, activation)
    for pattern in _GO_ALONG:
        for file in sorted(files.path.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    return report, activation


def write_drafter(
    files: ModelFiles,
    config: DrafterConfig,
    folder: Path,
    recipe: Recipe | None,
    activation: mx.Dtype,
) -> PartReport:
    """Write an assistant under its Hugging Face names, in the target's activation dtype."""
    folder.mkdir()
    model = load_drafter(files.path, config, activation, lazy=True)
    # the published flat keys: mlx-vlm reads no others
    raw = config.extra | {
        "model_type": config.model_type,
        "backbone_hidden_size": config.backbone_hidden_size,
        "use_ordered_embeddings": config.use_ordered_embeddings,
        "num_centroids": config.num_centroids,
        "centroid_intermediate_top_k": config.centroid_top_k,
        "tie_word_embeddings": True,
        "dtype": _name(activation),
        "text_config": config.text_config,
    }
    report = _write(model, files, raw, folder, recipe, activation)
    own = files.path / "generation_config.json"
    if own.is_file():
        shutil.copyfile(own, folder / own.name)
    return report


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _write(
    model: nn.Module,
    files: ModelFiles,
    config: dict[str, Any],
    folder: Path,
    recipe: Recipe | None,
    activation: mx.Dtype,
) -> PartReport:
    unquantized = {} if recipe is None else _quantize(model, recipe)
    block = block_of(_formats(model))
    if block is not None:
        # the second name is what the hub looks for
        config = config | {"quantization": block, "quantization_config": block}
    write_json(folder / "config.json", config)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    model.clear()  # the dict alone holds the arrays now, and lets go of what is written
    written = write_weights(folder, weights)
    return PartReport(
        # of a folder its last two parts: the rest is nobody's business
        source=files.name if files.is_published else "/".join(files.path.absolute().parts[-2:]),
        revision=files.revision,
        dtype=_name(activation),
        quantization=block,
        unquantized=unquantized,
        source_bytes=sum(file.stat().st_size for file in weight_files(files.path)),
        bytes=written,
    )


def write_weights(folder: Path, weights: dict[str, mx.array]) -> int:
    """Write shards and their index; empties ``weights``. Returns the bytes of the files.

    Raises VerificationError where a file is not what it must be, e.g. on a full disk.
    """
    shards: list[list[str]] = [[]]
    size = total = 0
    for name, array in weights.items():
        if shards[-1] and size + array.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += array.nbytes
        total += array.nbytes
    weight_map, written = {}, 0
    for number, names in enumerate(shards, start=1):
        file = folder / (
            f"model-{number:05}-of-{len(shards):05}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        written += _write_shard(file, {name: weights.pop(name) for name in names})
        weight_map.update(dict.fromkeys(names, file.name))
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return written


def _write_shard(file: Path, arrays: dict[str, mx.array]) -> int:
    for array in arrays.values():
        mx.eval(array)  # one by one: each lets go of its source
    try:
        mx.save_safetensors(str(file), arrays, metadata={"format": "mlx"})
    except RuntimeError as error:  # all that MLX says of a failed write
        raise ResourceError(
            f"{file.name} could not be written: {error}.", "Free some space and try again."
        ) from error
    try:
        found = {name: (info.shape, info.nbytes) for name, info in read_header(file).items()}
    except MlxMtpError as error:
        raise VerificationError(
            f"{file.name} was not written whole: {error.message}", "Is the disk full?"
        ) from error
    if found != {name: (array.shape, array.nbytes) for name, array in arrays.items()}:
        raise VerificationError(f"{file.name} is not what was written.", "Check the disk.")
    arrays.clear()
    mx.clear_cache()
    return os.path.getsize(file)


def _quantize(model: nn.Module, recipe: Recipe) -> dict[str, str]:
    """Quantize in place, lazily. Returns the matrices left as they are: name -> why."""
    reasons: dict[str, str] = {}

    def choose(path: str, module: nn.Module) -> bool | Params:
        if not hasattr(module, "to_quantized"):
            return False
        choice = recipe.choose(
            path, module.weight.shape[-1], is_table=isinstance(module, nn.Embedding)
        )
        if isinstance(choice, str):
            reasons[path] = choice
            return False
        return choice

    nn.quantize(model, class_predicate=choose)
    return reasons


def _formats(model: nn.Module) -> dict[str, Params]:
    """path -> parameters of every quantized module."""
    return {
        path: {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        for path, module in model.named_modules()
        if "scales" in module
    }


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
