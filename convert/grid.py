"""The 4-bit grid that QAT checkpoints are trained for. Owns: finding it again in their weights.

A q4_0 block is 32 weights, each a whole number from -8 to 7 times the block's step; the weight of
largest magnitude is -8 steps (ggml, quantize_row_q4_0_ref). In MLX's affine form the step is the
scale and -8 steps are the bias, so that such a block is stored as it is, while MLX's own choice
of scale, made from the smallest and the largest weight, may miss it.
"""

from __future__ import annotations

import mlx.core as mx

LEVELS = 8


def quantize_on_grid(weight: mx.array, group_size: int) -> list[mx.array]:
    """Quantize to 4 bits, each group on its own grid or on MLX's, whichever is nearer to it.

    Args:
        weight: [rows, width], any floating dtype; scales get it.

    Returns:
        As ``mx.quantize``: packed weights, scales, biases.
    """
    plain = mx.quantize(weight, group_size=group_size, bits=4)
    groups = weight.reshape(*weight.shape[:-1], -1, group_size)
    wide = groups.astype(mx.float32)
    largest = mx.take_along_axis(wide, mx.argmax(mx.abs(wide), axis=-1, keepdims=True), axis=-1)
    scale = (largest / -LEVELS).astype(weight.dtype)
    step = scale.astype(mx.float32)
    steps = mx.where(step == 0, 0, mx.round(wide / mx.where(step == 0, 1, step)))
    codes = mx.clip(steps + LEVELS, 0, 2 * LEVELS - 1)
    bias = (-LEVELS * step).astype(weight.dtype)
    error = _largest_error(wide, codes * step + bias.astype(mx.float32))
    theirs = mx.dequantize(*plain, group_size=group_size, bits=4).reshape(groups.shape)
    mine = error <= _largest_error(wide, theirs.astype(mx.float32))
    packed = _packed(codes.astype(mx.uint32))
    picked = mx.where(mine[..., None], packed, plain[0].reshape(packed.shape))
    return [
        picked.reshape(plain[0].shape),
        mx.where(mine, scale[..., 0], plain[1]),
        mx.where(mine, bias[..., 0], plain[2]),
    ]


def _largest_error(weight: mx.array, stored: mx.array) -> mx.array:
    return mx.max(mx.abs(weight - stored), axis=-1)


def _packed(codes: mx.array) -> mx.array:
    """[..., group] of numbers below 16 -> [..., group / 8], the first in the lowest bits."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8)
    shifts = mx.arange(0, 32, 4, dtype=mx.uint32)
    return mx.sum(mx.left_shift(eights, shifts), axis=-1)
