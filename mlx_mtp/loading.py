"""From a name to a model that is ready. Owns: `load`, and which parts it puts together."""

from __future__ import annotations

from pathlib import Path
from typing import cast, get_args

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.depth_table import DepthTable
from mlx_mtp.errors import UsageError
from mlx_mtp.files import read_json, read_optional_json
from mlx_mtp.generation_config import GenerationDefaults
from mlx_mtp.hub import choose_drafter, resolve
from mlx_mtp.llm import LLM
from mlx_mtp.model.drafter import Drafter, DraftPosition
from mlx_mtp.model.experts import ExpertStrategy
from mlx_mtp.model.load import load_drafter, load_target, too_large
from mlx_mtp.model.memory import MemoryBudget, limit_or_device
from mlx_mtp.model.target import Target
from mlx_mtp.pair import DrafterConfig, TargetConfig, check_pair


def load(
    name: str | Path,
    drafter: str | Path | None = "auto",
    dtype: str | None = None,
    *,
    draft_position: DraftPosition = "bonus",
    memory_limit: int | None = None,
    exact: bool = False,
) -> LLM:
    """Load a target and its drafter.

    Args:
        name: a folder, a hub id, "pocket" or "pocket-moe"; Hugging Face layout or MLX conversion.
        drafter: "auto" looks for the target's own (and decodes plainly where there is none),
            None decodes plainly, a folder or hub id must be a drafter of this target.
        dtype: of the activations ("float32", "bfloat16", "float16"); None: as stored.
        draft_position: see model.drafter.Drafter.
        memory_limit: bytes that weights, K/V and activations may take together; None: the GPU's
            recommended working set, or all RAM on the CPU. Rows and contexts are admitted within.
        exact: make exact rounds (decode/round.py): through kernels of the same shapes with and
            without drafts, which takes more time.

    Raises:
        ModelNotFoundError: not found, gated, incomplete or damaged.
        IncompatibleError: not a Gemma 4 target, or a drafter of another target.
        ResourceError: the model and the shortest row take more than the limit.
    """
    if draft_position not in get_args(DraftPosition):
        raise UsageError(
            f"draft_position is {draft_position!r}.",
            f"Give one of {', '.join(get_args(DraftPosition))}.",
        )
    files = resolve(str(name))
    raw = read_json(files.path / "config.json")
    config = TargetConfig.from_dict(raw, files.name)
    warnings: list[str] = []
    drafter_path, drafter_name = choose_drafter(files, drafter)
    drafter_config = None
    if drafter_path is not None:
        label = drafter_name or drafter_path.name
        drafter_config = DrafterConfig.from_dict(read_json(drafter_path / "config.json"), label)
        warnings += check_pair(config, drafter_config, files.name, label)
    elif drafter == "auto":
        warnings.append(f"No drafter was found for {files.name}; it decodes plainly.")
    limit = limit_or_device(memory_limit)
    _wire_memory()
    model = load_target(files.path, config, dtype, limit=limit)
    weights = _bytes(model)
    target = Target(model, config)
    defaults = GenerationDefaults.from_dict(
        read_optional_json(files.path / "generation_config.json"), raw
    )
    defaults.check_vocabulary(config.vocab_size)
    drafting = depth_table = None
    if drafter_path is not None and drafter_config is not None:
        assistant = load_drafter(drafter_path, drafter_config, target.dtype)
        weights += _bytes(assistant)
        drafting = Drafter(assistant, drafter_config, draft_position)
        depth_table = DepthTable(files.path, drafter_path, str(target.dtype))
        if isinstance(kept := depth_table.read(), dict):
            strategy = ExpertStrategy.from_json(kept.get("experts"))
            target.experts.use(strategy, target.body.layers)
    memory = MemoryBudget(config, target.dtype.size, weights, limit)
    if (needed := memory.needed(rows=1, slots=1)) > limit:
        raise too_large(needed, limit)
    return LLM(
        target,
        drafting,
        path=files.path,
        model_name=files.name,
        drafter_name=drafter_name,
        defaults=defaults,
        memory=memory,
        warnings=warnings,
        depth_table=depth_table,
        exact=exact,
    )


def _wire_memory() -> None:
    """Keep the weights resident on macOS; a no-op elsewhere."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    if mx.metal.is_available() and limit is not None:
        mx.set_wired_limit(int(limit))


def _bytes(model: nn.Module) -> int:
    arrays = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    return sum(array.nbytes for _, array in arrays)
