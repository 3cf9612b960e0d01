"""What is quantized and how. Owns: the options of a conversion, which bits, group sizes and modes
go together, the named recipes, and the choice for each matrix. Knows names and shapes, no arrays
and no files.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from mlx_mtp.errors import UsageError
from mlx_mtp.quantization import QUANTIZATION_MODES

GROUP_SIZES = {"affine": 64, "mxfp4": 32, "nvfp4": 16, "mxfp8": 32}
"""The group size of a mode where none is asked for."""
MIXED = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}
"""mlx-lm's mixed recipes: low and high bits."""
DEFAULT = "mtp-4bit"
UNIFORM = "uniform"
AS_STORED = "as-stored"
DEQUANTIZE = "dequantize"
NAMES = (DEFAULT, UNIFORM, *MIXED, AS_STORED, DEQUANTIZE)
UNQUANTIZED = 16
"""As bits: leave the weights unquantized."""
SHARD_BYTES = 5_000_000_000

GRID: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "affine"}
"""How weights are stored that were trained for a 4-bit grid."""
_KEPT = {"bf16": UNQUANTIZED} | {str(bits): bits for bits in QUANTIZATION_MODES["affine"]}
_HIGH_BITS = 8

Params = dict[str, Any]
Part = Literal["target", "drafter"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a conversion does to weights; `Recipe` turns it into choices.

    Attributes:
        recipe: one of NAMES. None: uniform where bits, group size or mode are given, else mtp-4bit.
        bits, group_size, mode: of a uniform recipe; group_size of the mixed ones, too. None: the
            mode's own.
        drafter_bits: of the drafter, UNQUANTIZED for none; None: the recipe's.
        drafter_head: of the drafter's tied table alone; None: as `drafter_bits`, or the recipe's.
        keep: ``PATTERN=bf16`` or ``PATTERN=BITS``: matrices by glob that are stored otherwise.
        dtype: of what is not quantized; None: as stored, bfloat16 after dequantizing.
        towers: "keep" writes vision and audio tensors as they are; others can run them.
        shard_bytes: most bytes of tensors in one weight file; a larger tensor has its own.
    """

    recipe: str | None = None
    bits: int | None = None
    group_size: int | None = None
    mode: str = "affine"
    drafter_bits: int | None = None
    drafter_head: int | None = None
    keep: tuple[str, ...] = ()
    dtype: str | None = None
    towers: Literal["drop", "keep"] = "drop"
    shard_bytes: int = SHARD_BYTES

    @property
    def name(self) -> str:
        """The recipe that is meant."""
        if self.recipe is not None:
            return self.recipe
        given = self.bits is not None or self.group_size is not None or self.mode != "affine"
        return UNIFORM if given else DEFAULT

    def check(self) -> None:
        """Raises UsageError for options that do not go together; nothing was read then."""
        if self.mode not in QUANTIZATION_MODES:
            known = ", ".join(QUANTIZATION_MODES)
            raise UsageError(f"mode is {self.mode!r}.", f"Give one of {known}.")
        if self.name not in NAMES:
            raise UsageError(f"recipe is {self.name!r}.", f"Give one of {', '.join(NAMES)}.")
        if self.name != UNIFORM and self.bits is not None:
            raise UsageError(
                f"The recipe {self.name} is given with bits.", "Give either of the two."
            )
        if self.name != UNIFORM and self.mode != "affine":
            raise UsageError(
                f"The mode {self.mode} is given with the recipe {self.name}, which is affine.",
                "Give bits instead of the recipe.",
            )
        if self.name not in (UNIFORM, *MIXED) and self.group_size is not None:
            raise UsageError(
                f"A group size is given with the recipe {self.name}, which chooses its own.",
                "Give bits as well, instead of the recipe.",
            )
        if self.shard_bytes < 1:
            raise UsageError(f"The shard size is {self.shard_bytes}.", "Give at least one byte.")
        for bits in (self.drafter_bits, self.drafter_head):
            if bits not in (None, UNQUANTIZED):
                _checked(bits, None, "affine")
        self.for_target(1)
        for rule in self.keep:
            _rule(rule)

    def for_target(self, layers: int, *, is_qat: bool = False) -> Recipe:
        """The target's recipe. Raises UsageError as `check`."""
        if self.name in (AS_STORED, DEQUANTIZE):
            return Recipe(keep=_rules(self.keep, "target"))
        if self.name == UNIFORM:
            base = _checked(self._bits, self.group_size, self.mode)
            return Recipe(base=base, keep=_rules(self.keep, "target"))
        on_grid = is_qat and self.name == DEFAULT
        group = GRID["group_size"] if on_grid else self.group_size
        low, high = MIXED.get(self.name, (4, 6))
        return Recipe(
            base=_checked(low, group, "affine"),
            high=_checked(high, group, "affine"),
            style=DEFAULT if self.name == DEFAULT else "mixed",
            layers=layers,
            on_grid=on_grid,
            keep=_rules(self.keep, "target"),
        )

    def for_drafter(self, *, is_qat: bool = False) -> Recipe:
        """The drafter's recipe. Raises UsageError as `check`."""
        if self.name in (AS_STORED, DEQUANTIZE):
            body = head = None
        elif self.name == UNIFORM:
            body = head = _checked(self._bits, self.group_size, self.mode)
        else:  # its head is half of a draft step, its body little of it
            body = _checked(_HIGH_BITS, None, "affine")
            head = GRID if is_qat else _checked(4, None, "affine")
        if self.drafter_bits is not None:
            same = body is not None and body["bits"] == self.drafter_bits
            body = body if same else _affine(self.drafter_bits)
            head = body
        if self.drafter_head is not None:
            same = head is not None and head["bits"] == self.drafter_head
            head = head if same else _affine(self.drafter_head)
        return Recipe(
            base=body,
            head=head,
            style="drafter",
            on_grid=is_qat and self.name == DEFAULT,
            keep=_rules(self.keep, "drafter"),
        )

    @property
    def _bits(self) -> int:
        if self.bits is not None:
            return self.bits
        known = QUANTIZATION_MODES[self.mode]
        return 4 if 4 in known else next(iter(known))


@dataclass(frozen=True)
class Recipe:
    """How one model is quantized.

    Attributes:
        base: what most matrices get, as in ``mlx.core.quantize``; None quantizes none.
        high: what those get that this style spares; None where it spares none.
        head: of a drafter's tied table.
        style: "uniform", "mixed", "mtp-4bit" or "drafter".
        layers: of the model; the mixed recipes choose by them.
        on_grid: the weights were trained for a 4-bit grid, which is looked for.
        keep: (pattern, bits) of the matrices that the user decided on, first match first.
    """

    base: Params | None = None
    high: Params | None = None
    head: Params | None = None
    style: str = UNIFORM
    layers: int = 0
    on_grid: bool = False
    keep: tuple[tuple[str, int], ...] = field(default=())

    def choose(self, path: str, width: int, is_table: bool) -> Params | str | None:
        """How one matrix is stored.

        Args:
            path: the module's name.
            width: its input width, the last dimension.
            is_table: rows are looked up in it.

        Returns:
            What to quantize it with, or why it is left as it is; None where nobody asked.
        """
        bits = self.kept(path)
        if bits == UNQUANTIZED:
            return "the command keeps it"
        if bits is not None:
            return _fitting(bits, width)
        wanted = self._wanted(path)
        if wanted is None:
            return None
        if path.startswith("masked_embedding."):
            return "it selects the centroids and is small"
        if self.style == UNIFORM and path.endswith("router.proj"):
            # a token sent to another expert costs more than the few bytes saved here
            return _fitting(_HIGH_BITS, width)
        if self.style == DEFAULT and wanted["bits"] != 4:
            return _fitting(wanted["bits"], width)
        if width % wanted["group_size"]:
            return f"width {width} is not divisible by {wanted['group_size']}"
        if is_table and wanted["mode"] == "nvfp4" and width % 32:
            return f"nvfp4 cannot look up rows of width {width}"
        return wanted

    def kept(self, path: str) -> int | None:
        """The bits that ``keep`` gives a matrix, or None."""
        for pattern, bits in self.keep:
            if fnmatchcase(path, pattern) or fnmatchcase(_bare(path), pattern):
                return bits
        return None

    def _wanted(self, path: str) -> Params | None:
        if self.style == "drafter":
            return self.head if path == "model.embed_tokens" else self.base
        if self.style == "mixed":
            return self.high if self._is_spared(path) else self.base
        if self.style == DEFAULT and self.base is not None:
            if path.endswith(("embed_tokens", "embed_tokens_per_layer", "lm_head")):
                return self.high
            name = path.rpartition(".")[2]
            if path.endswith("router.proj") or name.startswith("per_layer_"):
                return self.base | {"bits": _HIGH_BITS}
        return self.base

    def _is_spared(self, path: str) -> bool:
        """mlx-lm's own choice (mlx_lm/convert.py, mixed_quant_predicate_builder)."""
        parts = path.split(".")
        index = int(parts[3]) if len(parts) > 3 and parts[3].isdigit() else 0
        first, last = self.layers // 8, 7 * self.layers // 8
        more = index < first or index >= last or (index - first) % 3 == 2
        return ("lm_head" in path) or (more and ("v_proj" in path or "down_proj" in path))


def block_of(formats: dict[str, Params]) -> Params | None:
    """The ``quantization`` block for modules quantized so: path -> parameters.

    What most of them use stands at the top, the others by their path. None where there are none.
    """
    if not formats:
        return None
    kinds = Counter(tuple(params.items()) for params in formats.values())
    common = dict(kinds.most_common(1)[0][0])
    return common | {path: params for path, params in formats.items() if params != common}


def _checked(bits: int | None, group_size: int | None, mode: str) -> Params:
    """Parameters that MLX can compute with. Raises UsageError for those it cannot."""
    known = QUANTIZATION_MODES[mode]
    sizes = known.get(bits or 0)
    if sizes is None:
        raise UsageError(
            f"{mode} has no {bits} bits.", f"Give one of its bits: {', '.join(map(str, known))}."
        )
    group_size = GROUP_SIZES[mode] if group_size is None else group_size
    if group_size not in sizes:
        raise UsageError(
            f"{mode} with {bits} bits has no group size {group_size}.",
            f"Give one of its group sizes: {', '.join(map(str, sizes))}.",
        )
    return {"group_size": group_size, "bits": bits, "mode": mode}


def _affine(bits: int) -> Params | None:
    return None if bits == UNQUANTIZED else _checked(bits, None, "affine")


def _fitting(bits: int, width: int) -> Params | str:
    for group_size in (64, 32):
        if width % group_size == 0:
            return {"group_size": group_size, "bits": bits, "mode": "affine"}
    return f"width {width} is not divisible by 32"


def _rule(text: str) -> tuple[str, int]:
    pattern, equals, value = text.rpartition("=")
    if not equals or not pattern or value not in _KEPT:
        raise UsageError(
            f"keep is {text!r}.",
            f"Give PATTERN=VALUE with one of {', '.join(_KEPT)}, e.g. '*.v_proj=bf16'.",
        )
    return pattern, _KEPT[value]


def _rules(texts: tuple[str, ...], part: Part) -> tuple[tuple[str, int], ...]:
    """Those for one model: ``drafter.PATTERN`` is for the drafter, all others for the target."""
    rules = []
    for pattern, bits in map(_rule, texts):
        bare = pattern.removeprefix("drafter.")
        if (bare != pattern) == (part == "drafter"):
            rules.append((bare, bits))
    return tuple(rules)


def _bare(path: str) -> str:
    return path.removeprefix("language_model.model.").removeprefix("model.")
