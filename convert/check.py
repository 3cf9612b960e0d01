"""Whether what was written is right. Owns: reading it back and comparing it with the plan, with
its source and with what a quantization may lose, and letting the pair decode.

A tensor is checked before its file gets its name, while its source is at hand. Values are sampled:
rows from the beginning, the middle and the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlx_mtp.convert.blocks import Reader, dequantized, encode, read_rows
from mlx_mtp.convert.layout import Rows
from mlx_mtp.convert.parts import PartPlan
from mlx_mtp.convert.recipes import Params
from mlx_mtp.convert.sources import Stored
from mlx_mtp.convert.tensors import TensorPlan
from mlx_mtp.errors import MlxMtpError, ResourceError, VerificationError
from mlx_mtp.files import read_headers, read_json, weight_files
from mlx_mtp.loading import load
from mlx_mtp.model.load import load_drafter, load_target
from mlx_mtp.model.memory import device_limit
from mlx_mtp.pair import DrafterConfig, TargetConfig
from mlx_mtp.types import SamplingParams

SAMPLED_ROWS = 32
"""From each of three places of a tensor."""
TOKENS = 24
DEPTH = 4
PROMPTS = (
    "Count from 1 to 10.",
    "Write a JSON object with the keys name and age.",
    "Why is the sky blue?",
)
_FP_ALLOWED = {"mxfp4": 0.3, "nvfp4": 0.25, "mxfp8": 0.08}
"""Relative errors well above those of normally distributed weights: .115, .095 and .027."""
_DISK = "Check the disk, then run the same command again."


class Decoding(NamedTuple):
    """How the written pair decoded the built-in prompts.

    Attributes:
        tokens: produced with drafts.
        identical: without a drafter they were the same; None where there is no drafter.
        drafted, accepted: drafts.
        note: why nothing was decoded; "" where something was.
    """

    tokens: int = 0
    identical: bool | None = None
    drafted: int = 0
    accepted: int = 0
    note: str = ""


class CheckReport(NamedTuple):
    """What the check found.

    Attributes:
        tensors: compared with their source.
        errors: part -> largest relative error of a tensor of it, of what is quantized.
        decoding: with the written pair.
    """

    tensors: int
    errors: dict[str, float]
    decoding: Decoding


def check_tensor(tensor: TensorPlan, reader: Reader, file: Path, sources: dict[str, Path]) -> float:
    """Compare a written tensor with what it was made from, on sampled rows.

    Args:
        file: where it is written.
        sources: the checkpoint's files that it was made from.

    Returns:
        Its relative error; 0 where it is not quantized.

    Raises VerificationError.
    """
    lost = size = 0.0
    for begin, end in _samples(tensor.rows.total):
        stored = read_rows(tensor, reader, sources, begin, end)
        wanted = encode(tensor, stored)
        found = [
            reader.read(
                Rows.all_of(Stored(output.name, file.name, output.info)),
                file,
                begin,
                end,
                finite=False,
            )
            for output in tensor.outputs
        ]
        for one, other in zip(wanted, found, strict=True):
            if not mx.array_equal(one.view(mx.uint8), other.view(mx.uint8)).item():
                raise VerificationError(f"{tensor.name} is not what was written.", _DISK)
        if tensor.action == "quantize" and tensor.params is not None:
            weight = stored[0].astype(mx.float32)
            back = dequantized(found, tensor.params).astype(mx.float32)
            lost += float(mx.sum(mx.square(weight - back)).item())  # type: ignore[arg-type]
            size += float(mx.sum(mx.square(weight)).item())  # type: ignore[arg-type]
    error = math.sqrt(lost / size) if size else 0.0
    if tensor.params is not None and not error <= allowed_error(tensor.params):
        raise VerificationError(
            f"{tensor.name} lost {error:.0%} in quantization, more than its mode allows.",
            f"Keep it with --keep '{tensor.name.removesuffix('.weight')}=bf16'.",
        )
    return error


def check_part(plan: PartPlan, folder: Path, *, is_drafter: bool) -> None:
    """Load a written part lazily: names, shapes, dtypes and the quantization block are complete.

    Raises VerificationError.
    """
    planned = {output.name: output.info for shard in plan.shards for output in shard.outputs}
    try:
        raw = read_json(folder / "config.json")
        found = read_headers(weight_files(folder))
        if is_drafter:
            drafter = DrafterConfig.from_dict(raw)
            load_drafter(folder, drafter, getattr(mx, plan.dtype), lazy=True)
            block = drafter.quantization
        else:
            target = TargetConfig.from_dict(raw)
            load_target(folder, target, lazy=True)
            block = target.quantization
    except MlxMtpError as error:
        raise VerificationError(
            f"What was written does not load: {error.message}", _DISK
        ) from error
    if found != planned or block != plan.quantization:
        raise VerificationError(f"{folder.name} is not what was planned.", _DISK)


def check_decoding(folder: Path, *, has_drafter: bool) -> Decoding:
    """Decode the built-in prompts, with drafts and without.

    Raises VerificationError where the two differ although they cannot on MLX's CPU backend.
    """
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    limit = device_limit()
    if size > 0.8 * limit:
        what = f"takes {size / 1e9:.1f} GB of {limit / 1e9:.1f} GB"
        return Decoding(note=f"the pair {what} here, so no text was decoded with it")
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    try:
        llm = load(folder, drafter=folder / "drafter" if has_drafter else None)
    except ResourceError as error:
        return Decoding(note=f"no text was decoded with it: {error.message}")
    except MlxMtpError as error:
        raise VerificationError(
            f"What was written does not run: {error.message}", error.hint or _DISK
        ) from error
    if (folder / "tokenizer.json").is_file():
        prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    else:
        prompts = [[2, *range(5, 5 + length)] for length in (3, 9, 17)]
    with_drafts = llm.generate_ids(prompts, params, draft_depth=DEPTH if has_drafter else 0)
    failed = next((result.error for result in with_drafts if result.error), None)
    if failed is not None:
        raise VerificationError(f"What was written does not decode: {failed}", _DISK)
    identical = None
    if has_drafter:
        plain = llm.generate_ids(prompts, params, draft_depth=0)
        identical = [r.token_ids for r in plain] == [r.token_ids for r in with_drafts]
        if not identical and mx.default_device() == mx.cpu:
            raise VerificationError(
                "With drafts the pair decodes another text than without.",
                "Please report it; --no-verify takes the pair as it is.",
            )
    return Decoding(
        tokens=sum(len(r.token_ids) for r in with_drafts),
        identical=identical,
        drafted=sum(r.stats.drafted for r in with_drafts),
        accepted=sum(r.stats.accepted for r in with_drafts),
    )


def allowed_error(params: Params) -> float:
    """The largest relative error, root mean square over root mean square, that a mode allows.

    Affine: half a step is at most range / (2^bits - 1) / 2, and a group of that range has a norm
    of at least half of it; a fifth more for scales that are rounded themselves.
    """
    if params["mode"] != "affine":
        return _FP_ALLOWED[params["mode"]]
    return float(1.2 * math.sqrt(params["group_size"]) / (2 ** params["bits"] - 1))


def _samples(total: int) -> Iterator[tuple[int, int]]:
    if total <= 3 * SAMPLED_ROWS:
        yield 0, total
        return
    for begin in (0, (total - SAMPLED_ROWS) // 2, total - SAMPLED_ROWS):
        yield begin, begin + SAMPLED_ROWS
