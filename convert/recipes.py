"""What is quantized and how. Owns: which bits, group sizes and modes go together, and the choice
for each matrix. Knows names and shapes, no arrays and no files.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from mlx_mtp.config_json import QUANTIZATION_MODES
from mlx_mtp.errors import UsageError

_GROUP_SIZES = {"affine": 64, "mxfp4": 32, "nvfp4": 16, "mxfp8": 32}
"""The group size of a mode where none is asked for."""

Params = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How a model is quantized.

    Attributes:
        bits, group_size, mode: as in ``mlx.core.quantize``.
    """

    bits: int
    group_size: int
    mode: str

    @classmethod
    def checked(cls, bits: int | None, group_size: int | None, mode: str) -> Recipe | None:
        """A recipe that MLX can compute with; None where ``bits`` is None.

        Raises UsageError for a combination it cannot.
        """
        if mode not in QUANTIZATION_MODES:
            raise UsageError(f"mode is {mode!r}.", f"Give one of {', '.join(QUANTIZATION_MODES)}.")
        if bits is None:
            if group_size is not None:
                raise UsageError("A group size is given without bits.", "Give bits as well.")
            if mode != "affine":
                raise UsageError(f"The mode {mode} is given without bits.", "Give bits as well.")
            return None
        known = QUANTIZATION_MODES[mode]
        sizes = known.get(bits)
        if sizes is None:
            listed = ", ".join(map(str, known))
            raise UsageError(f"{mode} has no {bits} bits.", f"Its bits: {listed}.")
        group_size = _GROUP_SIZES[mode] if group_size is None else group_size
        if group_size not in sizes:
            listed = ", ".join(map(str, sizes))
            raise UsageError(
                f"{mode} with {bits} bits has no group size {group_size}.",
                f"Its group sizes: {listed}.",
            )
        return cls(bits, group_size, mode)

    def params(self) -> Params:
        """As mlx-lm writes and reads them."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def choose(self, path: str, width: int, is_table: bool) -> Params | str:
        """How one matrix is stored.

        Args:
            path: the module's name.
            width: its input width, the last dimension.
            is_table: rows are looked up in it.

        Returns:
            What to quantize it with, or why it is left as it is.
        """
        if path.endswith("router.proj"):
            # a token sent to another expert costs more than the few bytes saved here
            for group_size in (64, 32):
                if width % group_size == 0:
                    return {"group_size": group_size, "bits": 8, "mode": "affine"}
            return f"width {width} is not divisible by 32"
        if path.startswith("masked_embedding."):
            return "it selects the centroids and is small"
        if width % self.group_size:
            return f"width {width} is not divisible by {self.group_size}"
        if is_table and self.mode == "nvfp4" and width % 32:
            return f"nvfp4 cannot look up rows of width {width}"
        return self.params()


def block_of(formats: dict[str, Params]) -> Params | None:
    """The ``quantization`` block for modules quantized so: path -> parameters.

    What most of them use stands at the top, the others by their path. None where there are none.
    """
    if not formats:
        return None
    kinds = Counter(tuple(params.items()) for params in formats.values())
    common = dict(kinds.most_common(1)[0][0])
    return common | {path: params for path, params in formats.items() if params != common}
