"""From files to modules. Owns: the layouts weights come in, their names and shapes checked against
the modules, quantized modules set up as stored, and one activation dtype for all of them.

The target's modules are mlx-lm's own; a target loads from the Hugging Face layout and from every
conversion that mlx-lm or mlx-vlm writes. Knows nothing of caches or of how the modules are run.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4
from mlx_lm.utils import infer_quant_config

from mlx_mtp.errors import (
    IncompatibleError,
    ModelNotFoundError,
    ResourceError,
    UsageError,
)
from mlx_mtp.files import read_headers, weight_files
from mlx_mtp.model.drafter import AssistantModel
from mlx_mtp.pair import DrafterConfig, TargetConfig
from mlx_mtp.quantization import QUANTIZATION_MODES, overrides_of

log = logging.getLogger("mlx_mtp")

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

_TOWERS = (
    "vision_tower.",
    "audio_tower.",
    "multi_modal_projector.",
    "embed_vision.",
    "embed_audio.",
    "vision_embedder.",
)
_ORDERING = "masked_embedding.token_ordering"
_KEYS_VALUES = (".self_attn.k_proj.", ".self_attn.v_proj.", ".self_attn.k_norm.")
_AGAIN = "Use the checkpoint that belongs to this config.json."

Weights = dict[str, mx.array]


def load_target(
    path: Path,
    config: TargetConfig,
    dtype: str | None = None,
    *,
    lazy: bool = False,
    limit: int | None = None,
) -> gemma4.Model:
    """Load a target's text model into mlx-lm's modules.

    Args:
        path: the folder with its weights, in the Hugging Face layout or an MLX conversion.
        config: from its config.json.
        dtype: activation dtype ("float32", "float16", "bfloat16"). None: the one of its
            embedding table, of that table's scales where it is quantized, of its final norm
            where the scales are bytes.
        lazy: leave the tensors unread, and experts in the activation dtype whatever the backend
            can compute: for checking a model, not for running it.
        limit: bytes that the tensors may take; None sets no limit.

    Raises:
        ModelNotFoundError: weight files absent, incomplete or damaged.
        IncompatibleError: tensors missing, left over or of another shape than the config says.
        UsageError: an unknown dtype.
        ResourceError: more than `limit`; nothing was read then.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r}.", f"Give one of {', '.join(DTYPES)}.")
    model = gemma4.Model(gemma4.ModelArgs.from_dict(config.mlx_lm_config))
    stored = _target_weights(path, tied=config.text["tie_word_embeddings"])
    try:
        weights = model.sanitize(stored)  # splits fused experts, drops K and V of sharing layers
    except (ValueError, IndexError) as error:
        raise IncompatibleError(f"{path}: its experts have an odd shape.", _AGAIN) from error
    stored.clear()  # it would keep every tensor in memory beside what it is cast to
    match_weights(model, weights, overrides_of(config.quantization, target_name), path)
    activation = DTYPES[dtype] if dtype else stored_dtype(weights)
    weights = _cast(weights, activation)
    if not lazy and widens_experts(activation):
        weights = _widened(weights, activation)
    _fill(model, weights, lazy, limit)
    return model


def load_drafter(
    path: Path, config: DrafterConfig, dtype: mx.Dtype, *, lazy: bool = False
) -> AssistantModel:
    """Load an assistant into `AssistantModel`, in the target's activation dtype.

    Args:
        path: the folder with its weights, Hugging Face names, quantized or not.
        config: from its config.json; ``use_ordered_embeddings`` decides on the centroid head.
        dtype: `activation_dtype` of the target.
        lazy: leave the tensors unread.

    Raises:
        ModelNotFoundError, IncompatibleError: as `load_target`; also where token_ordering is not a
            permutation of the vocabulary.
    """
    model = AssistantModel(config)
    weights = {
        name: array
        for name, array in read_weights(path).items()
        if not unused_by_drafter(name, config.use_ordered_embeddings)
    }
    match_weights(model, weights, overrides_of(config.quantization), path)
    if _ORDERING in weights:
        _check_ordering(weights[_ORDERING], path)
    _fill(model, _cast(weights, dtype), lazy)
    return model


def activation_dtype(model: gemma4.Model) -> mx.Dtype:
    """The dtype a loaded target's activations have."""
    dtype: mx.Dtype = model.language_model.model.norm.weight.dtype
    return dtype


def target_name(name: str) -> str | None:
    """A tensor's or module's name in mlx-lm's modules; None for vision and audio parts.

    Checkpoints prefix the text model with any of ``model.language_model.``,
    ``language_model.model.``, ``language_model.`` and ``model.``.
    """
    while (bare := name.removeprefix("model.").removeprefix("language_model.")) != name:
        name = bare
    if name.startswith(_TOWERS):
        return None
    within = "language_model." if name.startswith("lm_head") else "language_model.model."
    return within + name


def _target_weights(path: Path, tied: bool) -> Weights:
    weights: Weights = {}
    for stored, array in read_weights(path).items():
        name = target_name(stored)
        if name is None or (tied and name.startswith("language_model.lm_head")):
            continue
        if name in weights:
            raise IncompatibleError(f"{path} holds {name} under two names.", _AGAIN)
        weights[name] = array
    return weights


def unused_by_drafter(name: str, has_centroids: bool) -> bool:
    """A tied head stored once more, K and V of layers that read the target's, and the centroids
    of a config that declares none."""
    return (
        name.startswith("lm_head.")
        or "rotary_emb" in name
        or any(part in name for part in _KEYS_VALUES)
        or (name.startswith("masked_embedding.") and not has_centroids)
    )


def read_weights(path: Path) -> Weights:
    """All tensors of a folder, unread. The headers are checked first: MLX checks less."""
    files = weight_files(path)
    read_headers(files)
    weights: Weights = {}
    for file in files:
        try:
            loaded: Any = mx.load(str(file))
        except (RuntimeError, ValueError) as error:
            raise ModelNotFoundError(
                f"MLX cannot read {file}: {next(iter(str(error).splitlines()), '')}.",
                "Use a checkpoint in bfloat16, float16 or float32, or an MLX conversion.",
            ) from error
        weights.update(loaded)
    return weights


def match_weights(
    model: nn.Module, weights: Weights, overrides: dict[Any, Any], path: Path
) -> None:
    """Quantize modules as their tensors are stored, then demand equal names and shapes.

    Args:
        model: changed: modules whose tensors are quantized become quantized modules.
        weights: by the modules' names; nothing is evaluated.
        overrides: the quantization block's entries for single modules, by their names.
        path: what the messages name.

    Raises IncompatibleError.
    """

    def as_stored(name: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{name}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        stored = overrides.get(name)
        if not isinstance(stored, dict):
            # the block's defaults need not hold for a path it does not name; the shapes do
            stored = _inferred(name, module, weights, path)
        params = {key: stored[key] for key in ("group_size", "bits", "mode") if key in stored}
        if module.weight.shape[-1] % params["group_size"]:
            raise _wrong_shape(path, name, module.weight.shape, weights[f"{name}.scales"].shape)
        takes_scale = "global_scale" in inspect.signature(module.to_quantized).parameters
        if takes_scale and f"{name}.global_scale" in weights:
            params["global_scale"] = True
        return params

    nn.quantize(model, class_predicate=as_stored)
    expected: Weights = dict(tree_flatten(model.parameters()))
    for what, names in [
        ("lacks", expected.keys() - weights.keys()),
        ("holds, beyond what its config needs,", weights.keys() - expected.keys()),
    ]:
        if names:
            shown = sorted(names)[:5]
            more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
            raise IncompatibleError(f"{path} {what} {', '.join(shown)}{more}.", _AGAIN)
    for name, array in weights.items():
        if array.shape != expected[name].shape:
            raise _wrong_shape(path, name, expected[name].shape, array.shape)
        wants_float = mx.issubdtype(expected[name].dtype, mx.floating)
        if wants_float != mx.issubdtype(array.dtype, mx.floating):
            raise IncompatibleError(
                f"{path}: {name} is stored as {_dtype_name(array.dtype)}, which is not a weight.",
                "Use an unquantized checkpoint or an MLX conversion of it.",
            )


def _inferred(name: str, module: nn.Module, weights: Weights, path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = infer_quant_config(name, module, weights)
    except (KeyError, ValueError, ZeroDivisionError, IndexError) as error:
        raise IncompatibleError(f"{path}: {name} is quantized in no known way.", _AGAIN) from error
    if found["group_size"] not in QUANTIZATION_MODES[found["mode"]].get(found["bits"], ()):
        raise IncompatibleError(
            f"{path}: {name} is stored in {found['bits']} bits and groups of "
            f"{found['group_size']}, which MLX cannot run.",
            _AGAIN,
        )
    return found


def stored_dtype(weights: Weights) -> mx.Dtype:
    table = "language_model.model.embed_tokens"
    for name in (f"{table}.weight", f"{table}.scales", "language_model.model.norm.weight"):
        if name in weights and mx.issubdtype(weights[name].dtype, mx.floating):
            return weights[name].dtype
    return mx.bfloat16


def loaded_dtype(name: str, stored: mx.Dtype, activation: mx.Dtype, *, wide: bool) -> mx.Dtype:
    """The dtype that a parameter has in a model that runs; wide: unquantized experts float32."""
    if name == _ORDERING:
        return mx.int32
    if not mx.issubdtype(stored, mx.floating) or name.endswith(".global_scale"):
        return stored  # a tensor scale keeps its own precision
    expert = ".experts.switch_glu." in name and name.endswith(".weight")
    return mx.float32 if wide and expert else activation


def widens_experts(activation: mx.Dtype) -> bool:
    """Whether unquantized experts are float32: MLX's CPU backend has no other gather_mm."""
    return activation != mx.float32 and mx.default_device() == mx.cpu


def _cast(weights: Weights, activation: mx.Dtype, *, wide: bool = False) -> Weights:
    """All tensors in the dtype that they run in, lazily."""
    return {
        name: array.astype(loaded_dtype(name, array.dtype, activation, wide=wide))
        for name, array in weights.items()
    }


def _widened(weights: Weights, activation: mx.Dtype) -> Weights:
    wide = _cast(weights, activation, wide=True)
    if any(wide[name].dtype != array.dtype for name, array in weights.items()):
        log.warning(
            "Unquantized experts run in float32 on the CPU and take twice their size in memory."
        )
    return wide


def _check_ordering(ordering: mx.array, path: Path) -> None:
    ordering = ordering.astype(mx.int32)
    if not mx.array_equal(mx.sort(ordering), mx.arange(ordering.size, dtype=mx.int32)).item():
        raise IncompatibleError(
            f"{path}: masked_embedding.token_ordering is not a permutation of the vocabulary.",
            "Download the drafter again.",
        )


def _fill(model: nn.Module, weights: Weights, lazy: bool, limit: int | None = None) -> None:
    size = sum(array.nbytes for array in weights.values())
    if limit is not None and size > limit:
        raise too_large(size, limit)
    model.load_weights(list(weights.items()), strict=True)
    weights.clear()
    model.eval()
    if not lazy:
        arrays: Weights = dict(tree_flatten(model.parameters()))
        for array in arrays.values():
            mx.eval(array)  # one by one: what a cast or a split came from is let go at once
        # RoPE's tables are no parameters; unevaluated they would stay bound to this thread.
        mx.eval([v for m in model.modules() for v in m.values() if isinstance(v, mx.array)])


def _wrong_shape(
    path: Path, name: str, expected: tuple[int, ...], found: tuple[int, ...]
) -> IncompatibleError:
    return IncompatibleError(
        f"{path}: {name} has shape {list(found)} where the config needs {list(expected)}.", _AGAIN
    )


def too_large(size: int, limit: int) -> ResourceError:
    """What to raise where a model takes more bytes than it may."""
    return ResourceError(
        f"The model takes {size / 1e9:.3g} GB, but {limit / 1e9:.3g} GB is the limit.",
        "Raise the memory limit, or convert the model to fewer bits.",
    )


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
