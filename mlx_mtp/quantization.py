"""How a config says that weights are quantized. Owns: which modes MLX can compute with, and the
``quantization`` block of config.json. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_mtp.config_json import Fields
from mlx_mtp.errors import IncompatibleError
from mlx_mtp.plain import MAX_QUOTED, quoted

QUANTIZATION_MODES: dict[str, dict[int, tuple[int, ...]]] = {
    "affine": {bits: (32, 64, 128) for bits in (2, 3, 4, 5, 6, 8)},
    "mxfp4": {4: (32,)},
    "nvfp4": {4: (16,)},
    "mxfp8": {8: (32,)},
}
"""mode -> bits -> group sizes that MLX can compute with."""


def quantization_block(config: Fields) -> dict[str, Any] | None:
    """The ``quantization`` block of an MLX conversion, per-path overrides included, or None.

    Raises IncompatibleError for a mode that MLX has no kernels for, and for checkpoints
    quantized by another tool (``quantization_config`` with a ``quant_method``).
    """
    text = config.nested("text_config")
    for scope in (config, text):
        for key in ("quantization", "quantization_config"):
            block = None if scope is None else scope.nested(key)
            if block is None:
                continue
            if "bits" not in block.values or "group_size" not in block.values:
                method = block.text("quant_method", "an unknown tool")[:MAX_QUOTED]
                raise IncompatibleError(
                    f"{config.where}: the weights were quantized by {method}, not by MLX.",
                    "Use the unquantized checkpoint or an MLX conversion of it.",
                )
            _check_quantization(block)
            for path, override in block.values.items():
                if isinstance(override, dict):
                    _check_quantization(Fields(override, f"{block.where}: {path}"))
            return dict(block.values)
    return None


def _check_quantization(block: Fields) -> None:
    mode = block.text("mode", "affine")
    bits, group_size = block.integer("bits"), block.integer("group_size")
    if mode not in QUANTIZATION_MODES:
        known = ", ".join(QUANTIZATION_MODES)
        raise block.fail("mode", f"is {quoted(mode)}, not one of {known}")
    if group_size not in QUANTIZATION_MODES[mode].get(bits, ()):
        raise block.fail("bits", f"is {bits} with group size {group_size}, unknown to mode {mode}")


def overrides_of(
    quantization: dict[str, Any] | None, module: Callable[[str], str | None] = str
) -> dict[str | None, Any]:
    """What a config's quantization block says of single modules.

    Args:
        module: a name there -> the module's; None: one that is not loaded.
    """
    block = quantization or {}
    return {module(name): value for name, value in block.items() if isinstance(value, dict | bool)}
