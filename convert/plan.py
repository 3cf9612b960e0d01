"""What a conversion will do, and what it will take. Owns: the pair's check, both parts' plans and
the sums over them. Made from configs and safetensors headers alone, before anything large is
downloaded; reads and writes no tensor.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import mlx.core as mx

from mlx_mtp.convert.layout import Layout, drafter_layout, target_layout
from mlx_mtp.convert.parts import PartPlan, plan_part
from mlx_mtp.convert.recipes import AS_STORED, DEQUANTIZE, Options
from mlx_mtp.convert.sources import Source, open_drafter, open_source
from mlx_mtp.errors import UsageError
from mlx_mtp.model.load import DTYPES
from mlx_mtp.pair import DrafterConfig, TargetConfig, check_pair
from mlx_mtp.versions import versions


@dataclass(frozen=True)
class Plan:
    """A conversion that has not begun.

    Attributes:
        options: as they were given.
        target, drafter: the parts; drafter is None where there is none.
        warnings: one sentence each.
        is_qat: the target's name says that it was trained for a 4-bit grid.
        low_disk: fetched weight files are removed after use.
    """

    options: Options
    target: PartPlan
    drafter: PartPlan | None
    warnings: tuple[str, ...]
    is_qat: bool
    low_disk: bool

    @property
    def parts(self) -> list[PartPlan]:
        return [self.target] if self.drafter is None else [self.target, self.drafter]

    @property
    def bytes(self) -> int:
        """Of all weight files to be written."""
        return sum(part.bytes for part in self.parts)

    @property
    def download_bytes(self) -> int:
        """Of weight files that are not on this machine."""
        return sum(part.source.download_bytes() for part in self.parts)

    @property
    def disk_bytes(self) -> int:
        """What the output's disk needs; the hub's cache, where it takes a download, comes on top
        of it unless `low_disk`."""
        if not self.low_disk:
            return self.bytes
        return self.bytes + max(part.source.largest_download() for part in self.parts)

    @property
    def working_bytes(self) -> int:
        """The most that tensors take in memory while it runs."""
        return max(part.working_bytes for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """The process's memory at its largest: what it takes now, and the tensors'."""
        return resident_bytes() + self.working_bytes

    @property
    def digest(self) -> str:
        """Changes with anything that would change what is written."""
        digest = sha256(json.dumps(versions(), sort_keys=True).encode())
        for part in self.parts:
            digest.update(json.dumps([part.identity, part.config], sort_keys=True).encode())
            for shard in part.shards:
                digest.update(shard.file.encode() + shard.header)
                digest.update(str([(t.name, t.action, t.on_grid) for t in shard.tensors]).encode())
        return digest.hexdigest()[:16]


def make_plan(
    target: str | Path,
    options: Options,
    *,
    drafter: str | Path | None = "auto",
    revision: str | None = None,
    staging: Path | None = None,
) -> Plan:
    """Plan the conversion of a target and its drafter.

    Args:
        target: a folder, a bundled name or a hub id; of the latter nothing large is downloaded.
        drafter: "auto" takes the target's own where one is found, None leaves it out.
        revision: branch, tag or commit of the target's hub id.
        staging: where hub files are downloaded to and removed from after use; None: the cache.

    Raises:
        UsageError: options that do not go together (before anything is read), a target that is
            quantized already and shall be quantized again.
        ModelNotFoundError: not found, gated, files missing or damaged.
        IncompatibleError: no Gemma 4 model, tensors that do not fit its config, a drafter of
            another target.
    """
    options.check()
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UsageError(f"dtype is {options.dtype!r}.", f"Give one of {', '.join(DTYPES)}.")
    source = open_source(str(target), revision, staging)
    config = TargetConfig.from_dict(source.config(), source.name)
    _check_kept(options, config.quantization is not None, source.name)
    warnings: list[str] = []
    wanted = None if drafter is None else str(drafter)
    drafter_source = open_drafter(source, wanted, staging)
    if drafter_source is None and wanted == "auto":
        warnings.append(f"No drafter was found for {source.name}; the target is written alone.")
    layout = target_layout(source, config)
    recipe = options.for_target(config.num_layers, is_qat=is_qat(source))
    dtype = _dtype(options, layout)
    written = config.mlx_lm_config
    if options.towers == "keep":
        if layout.towers:
            written = source.config() | written | {"model_type": config.model_type}
        else:
            warnings.append(f"{source.name} holds no vision or audio towers to keep.")
    part = plan_part(source, layout, recipe, options, written, is_drafter=False, dtype=dtype)
    drafter_part = None
    if drafter_source is not None:
        drafter_part = _plan_drafter(drafter_source, config, source.name, options, dtype, warnings)
    plan = Plan(options, part, drafter_part, tuple(warnings), is_qat(source), staging is not None)
    _check_patterns(plan)
    return plan


def is_qat(source: Source) -> bool:
    """Whether a checkpoint's name says that it was trained for a 4-bit grid."""
    return "qat" in source.label.lower()


def resident_bytes() -> int:
    """Memory that this process has taken at most so far."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux's getrusage counts what the parent had before this program began
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _plan_drafter(
    source: Source,
    target: TargetConfig,
    target_name: str,
    options: Options,
    dtype: mx.Dtype,
    warnings: list[str],
) -> PartPlan:
    config = DrafterConfig.from_dict(source.config(), source.name)
    warnings += check_pair(target, config, target_name, source.name)
    recipe = options.for_drafter(is_qat=is_qat(source))
    is_quantized = config.quantization is not None
    if is_quantized and (recipe.base or recipe.head):
        warnings.append("The drafter is quantized already; its weights are kept.")
    # the published flat keys: mlx-vlm reads no others
    written = config.extra | {
        "model_type": config.model_type,
        "backbone_hidden_size": config.backbone_hidden_size,
        "use_ordered_embeddings": config.use_ordered_embeddings,
        "num_centroids": config.num_centroids,
        "centroid_intermediate_top_k": config.centroid_top_k,
        "tie_word_embeddings": True,
        "text_config": config.text_config,
    }
    layout = drafter_layout(source, config)
    part = plan_part(source, layout, recipe, options, written, is_drafter=True, dtype=dtype)
    table = next(t for t in part.tensors if t.name == "model.embed_tokens.weight")
    if config.use_ordered_embeddings and table.outputs[0].info.dtype == "U32":
        warnings.append(
            "mlx-vlm, if you use it, cannot read this drafter's quantized table; "
            "--drafter-head bf16 keeps the drafter readable for it."
        )
    return part


def _dtype(options: Options, layout: Layout) -> mx.Dtype:
    if options.dtype is not None:
        return DTYPES[options.dtype]
    return mx.bfloat16 if options.name == DEQUANTIZE else layout.dtype


def _check_kept(options: Options, is_quantized: bool, name: str) -> None:
    if is_quantized and options.name not in (AS_STORED, DEQUANTIZE):
        raise UsageError(
            f"{name} is quantized already.",
            "Convert the unquantized checkpoint, keep its weights with bits none, or dequantize.",
        )
    if options.name == DEQUANTIZE and not is_quantized:
        raise UsageError(f"{name} is not quantized.", "Keep its weights with bits none.")


def _check_patterns(plan: Plan) -> None:
    """Every pattern of the user's must hit something; a typo would cost hours."""
    for text in plan.options.keep:
        single = Options(keep=(text,), recipe=AS_STORED)
        recipes = [(plan.target, single.for_target(1)), (plan.drafter, single.for_drafter())]
        paths = [
            (recipe, tensor.name.removesuffix(".weight"))
            for part, recipe in recipes
            if part is not None
            for tensor in part.tensors
            if tensor.name.endswith(".weight") and len(tensor.rows.shape) > 1
        ]
        if not any(recipe.kept(path) is not None for recipe, path in paths):
            raise UsageError(
                f"keep {text!r} matches no matrix.",
                f"Matrices are called like {paths[-1][1] if paths else 'embed_tokens'}.",
            )


def parts_of(plan: PartPlan) -> Iterator[tuple[str, int, int, int, int]]:
    """The plan's table: (part, tensors, weights, bytes in, bytes out), in stored order."""
    rows: dict[str, list[int]] = {}
    for tensor in plan.tensors:
        row = rows.setdefault(tensor.part, [0, 0, 0, 0])
        for index, value in enumerate((1, tensor.elements, tensor.source_bytes, tensor.bytes)):
            row[index] += value
    for part, (count, elements, before, after) in rows.items():
        yield part, count, elements, before, after
