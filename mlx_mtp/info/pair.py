"""A target and its drafter as their files describe them. Owns: reading both without loading either,
whether they fit together, and what is expected of them. Headers and configs alone are read.

What is wrong is kept beside what could be read, in the loader's words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import mlx.core as mx

from mlx_mtp.config_json import LAYER_TYPES
from mlx_mtp.convert.layout import Layout, drafter_layout, target_layout
from mlx_mtp.convert.output import DRAFTER, ORIGIN
from mlx_mtp.convert.plan import is_qat
from mlx_mtp.convert.sources import FolderSource, Source, open_drafter, open_source
from mlx_mtp.decode.depth import DepthController
from mlx_mtp.depth_table import kept_costs
from mlx_mtp.errors import IncompatibleError, MlxMtpError
from mlx_mtp.files import read_optional_json
from mlx_mtp.info.contents import Contents
from mlx_mtp.info.memory import ROWS, MemoryTable
from mlx_mtp.model.drafter import DraftPosition
from mlx_mtp.model.memory import MemoryBudget, limit_or_device
from mlx_mtp.pair import DrafterConfig, Family, TargetConfig, check_pair

DRAFT_POSITION = get_args(DraftPosition)[0]
"""Where drafts are made unless `load` is told otherwise."""


class Origin(NamedTuple):
    """What a conversion says that it was made from.

    Attributes:
        source, revision: of the original checkpoint.
        recipe: by its name.
        is_qat: the original was trained for a 4-bit grid.
    """

    source: str | None
    revision: str | None
    recipe: str | None
    is_qat: bool


@dataclass(frozen=True)
class ModelInfo:
    """A target or a drafter.

    Attributes:
        name: as `load` calls it.
        folder: where its files are; None: on the hub, of which nothing was downloaded.
        revision: the hub's commit, or None.
        is_cached: the folder is in the hub's cache.
        is_qat: trained for a 4-bit grid, by its name or its origin.
        config: from its config.json.
        contents: None where its weight files are damaged or do not fit its config.
        files: name -> bytes.
        origin: of a conversion by this program.
    """

    name: str
    folder: Path | None
    revision: str | None
    is_cached: bool
    is_qat: bool
    config: TargetConfig | DrafterConfig
    contents: Contents | None
    files: dict[str, int]
    origin: Origin | None


class DraftDepth(NamedTuple):
    """The depth that `auto` starts with.

    Attributes:
        by_rows: rows -> depth.
        is_measured: by round costs that were kept on this machine, not by a prior.
    """

    by_rows: dict[int, int]
    is_measured: bool


@dataclass(frozen=True, kw_only=True)
class PairInfo:
    """A pair; ``problems`` say why parts of it are missing.

    Attributes:
        target, config: the target and its config.
        drafter, drafter_config: None where there is none, or none that can be read.
        fits: whether the two belong together; None where that cannot be said.
        memory: None where the target's size is unknown.
        depth: None where nothing would be drafted.
        warnings: what `load` would warn of.
        problems: what `load` would raise, one after the other.
    """

    target: ModelInfo
    config: TargetConfig
    drafter: ModelInfo | None
    drafter_config: DrafterConfig | None
    fits: bool | None
    memory: MemoryTable | None
    depth: DraftDepth | None
    warnings: list[str] = field(default_factory=list)
    problems: list[MlxMtpError] = field(default_factory=list)

    @property
    def layers_of_drafter(self) -> dict[str, int]:
        """Layer type -> how many of the drafter's layers read that donor."""
        types = () if self.drafter_config is None else self.drafter_config.layer_types
        return {kind: types.count(kind) for kind in LAYER_TYPES if kind in types}

    @property
    def tokens_scored(self) -> int:
        """Tokens that a draft is chosen from; 0 where nothing drafts."""
        config = self.drafter_config
        if config is None:
            return 0
        if not config.use_ordered_embeddings:
            return config.vocab_size
        return config.centroid_top_k * config.vocab_size // config.num_centroids


def read_pair(name: str, drafter: str | None = "auto", memory_limit: int | None = None) -> PairInfo:
    """Read what there is to know of a pair.

    Args:
        name: a folder, a hub id or a bundled name. Of what is on the hub only, its configs and
            the headers of its weight files are read.
        drafter: as `load` takes it.
        memory_limit: bytes; None: the device's.

    Raises:
        ModelNotFoundError: no such target, or no config.json that can be read.
        IncompatibleError: no Gemma 4 target.
        UsageError: the limit is less than a byte.
    """
    limit = limit_or_device(memory_limit)
    source = open_source(name)
    config = TargetConfig.from_dict(source.config(), source.name)
    reader = _Reader()
    target = reader.model(source, config, None)
    drafts, drafter_config, fits = None, None, None
    drafter_source = reader.opened(source, drafter)
    if drafter_source is not None:
        drafter_config, fits = reader.fit(config, source.name, drafter_source)
    if drafter_source is not None and drafter_config is not None:
        activation = target.contents.activation if target.contents is not None else None
        drafts = reader.model(drafter_source, drafter_config, activation)
    return PairInfo(
        target=target,
        config=config,
        drafter=drafts,
        drafter_config=drafter_config,
        fits=fits,
        memory=_memory(config, target, drafts, limit),
        depth=_depth(config.family, target, drafts) if fits else None,
        warnings=reader.warnings,
        problems=reader.problems,
    )


class _Reader:
    """Reads the parts of a pair, and keeps what is wrong with them."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.problems: list[MlxMtpError] = []

    def opened(self, target: Source, drafter: str | None) -> Source | None:
        try:
            found = open_drafter(target, drafter, None)
        except MlxMtpError as error:
            self.problems.append(error)
            return None
        if found is None and drafter is not None:
            self.warnings.append(f"No drafter was found for {target.name}; it decodes plainly.")
        return found

    def fit(
        self, target: TargetConfig, name: str, source: Source
    ) -> tuple[DrafterConfig | None, bool | None]:
        """The drafter's config, and whether it is the target's."""
        config = None
        try:
            config = DrafterConfig.from_dict(source.config(), source.name)
            self.warnings += check_pair(target, config, name, source.name)
        except MlxMtpError as error:
            self.problems.append(error)
            return config, False if isinstance(error, IncompatibleError) else None
        return config, True

    def model(
        self, source: Source, config: TargetConfig | DrafterConfig, activation: mx.Dtype | None
    ) -> ModelInfo:
        """One of the two. ``activation``: the dtype that it runs in; None: its own."""
        is_drafter = isinstance(config, DrafterConfig)
        contents = None
        try:
            layout = _laid_out(source, config)
            activation = activation or layout.dtype
            contents = Contents.of(layout, activation, is_drafter=is_drafter)
        except MlxMtpError as error:
            self.problems.append(error)
        folder = source.where if isinstance(source, FolderSource) else None
        origin = None if folder is None else _origin(folder, is_drafter=is_drafter)
        return ModelInfo(
            name=source.name,
            folder=folder,
            revision=source.revision,
            is_cached=folder is not None and source.revision is not None,
            is_qat=is_qat(source) or (origin is not None and origin.is_qat),
            config=config,
            contents=contents,
            files=source.files(),
            origin=origin,
        )


def _laid_out(source: Source, config: TargetConfig | DrafterConfig) -> Layout:
    if isinstance(config, DrafterConfig):
        return drafter_layout(source, config)
    return target_layout(source, config)


def _origin(folder: Path, *, is_drafter: bool) -> Origin | None:
    """What mlx_mtp.json says of a conversion; a damaged one says nothing."""
    if is_drafter and folder.name != DRAFTER:
        return None
    try:
        said = read_optional_json((folder.parent if is_drafter else folder) / ORIGIN)
    except MlxMtpError:
        return None
    part = said and said.get("drafter" if is_drafter else "target")
    if not said or not isinstance(part, dict):
        return None
    recipe: Any = said.get("recipe")
    recipe = recipe if isinstance(recipe, dict) else {}
    return Origin(
        _text(part.get("source")),
        _text(part.get("revision")),
        _text(recipe.get("name")),
        recipe.get("qat") is True,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _memory(
    config: TargetConfig, target: ModelInfo, drafter: ModelInfo | None, limit: int
) -> MemoryTable | None:
    if target.contents is None or (drafter is not None and drafter.contents is None):
        return None
    of_drafter = drafter.contents.loaded_bytes if drafter and drafter.contents else 0
    weights = target.contents.loaded_bytes + of_drafter
    itemsize = target.contents.activation.size
    return MemoryTable.of(MemoryBudget(config, itemsize, weights, limit), of_drafter)


def _depth(family: Family, target: ModelInfo, drafter: ModelInfo | None) -> DraftDepth | None:
    if drafter is None:
        return None
    kept = None
    if target.folder is not None and drafter.folder is not None and target.contents is not None:
        kept = kept_costs(target.folder, drafter.folder, str(target.contents.activation))
    controller = DepthController.from_json(family, kept)
    is_measured = bool(controller.to_json()["cells"])
    return DraftDepth({rows: controller.settled(rows) for rows in ROWS}, is_measured)
