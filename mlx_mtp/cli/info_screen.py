"""A pair and a machine on a screen of 80 columns. Owns: their tables and the lines around them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, repeat

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mlx_mtp.chat.figures import thousands
from mlx_mtp.cli.convert_report import size
from mlx_mtp.cli.tables import as_text, empty_table, figure
from mlx_mtp.config_json import FULL, LAYER_TYPES
from mlx_mtp.info.contents import Contents, Held, Storage, dtype_name
from mlx_mtp.info.environment import DRAFTER_VARIABLE, MODEL_VARIABLE, Environment, FoundModel
from mlx_mtp.info.memory import ROWS, Cell, MemoryTable
from mlx_mtp.info.pair import DRAFT_POSITION, DraftDepth, ModelInfo, PairInfo
from mlx_mtp.pair import DrafterConfig, TargetConfig

GB, MB = 1e9, 1e6
_LITTLE = 0.01
"""Share of the bytes below which it is not said how they are stored."""
_MANY_FILES = 3
"""Weight files from which on they stand on one line."""
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

Lines = Iterable[tuple[str, str]]


def pair_text(pair: PairInfo) -> str:
    """All that is known of a pair."""
    return as_text(_pair(pair))


def environment_text(environment: Environment) -> str:
    """This machine and its models."""
    return as_text(_environment(environment))


# A pair


def _pair(pair: PairInfo) -> Iterator[RenderableType]:
    yield Text(_verdict(pair), style="bold")
    yield Text()
    yield from _model("Target", pair.target, [("kind", _kind(pair.config))])
    drafter, config = pair.drafter, pair.drafter_config
    if drafter is not None and config is not None:
        yield Text()
        kind = f"{config.num_layers} layers of width {config.hidden_size}"
        yield from _model("Drafter", drafter, [("kind", kind), *_reads(pair, config)])
    if pair.memory is not None:
        yield Text()
        yield from _memory(pair.memory)


def _verdict(pair: PairInfo) -> str:
    if pair.drafter is None:
        return f"{pair.target.name} without a drafter"
    verdict = "they fit together" if pair.fits else "they do not fit together"
    return f"{pair.target.name} with {pair.drafter.name}: {verdict}"


def _model(title: str, model: ModelInfo, kind: Lines) -> Iterator[RenderableType]:
    yield Text(title, style="bold")
    yield _lines([*kind, *_about(model)])
    if model.contents is not None:
        yield Text()
        yield Padding(_parts(model.contents), (0, 0, 0, 2))


def _kind(config: TargetConfig) -> str:
    """For example ``e-series: 42 layers of width 2560, 35 sliding (window 512), 7 full; ...``."""
    counts = {kind: config.layer_types.count(kind) for kind in LAYER_TYPES}
    text = f"{config.family}, {config.num_layers} layers of width {config.hidden_size}: "
    text += f"{counts.pop(FULL)} full, {sum(counts.values())} sliding"
    if config.num_kv_shared_layers:
        text += f"; the last {config.num_kv_shared_layers} read others' K and V"
    if config.num_experts:
        text += f"; {config.top_k_experts} of {config.num_experts} experts for each token"
    return f"{text}; context {_tokens(config.max_position_embeddings)}"


def _tokens(count: int) -> str:
    """For example ``128k``."""
    return thousands(count).replace(".0k", "k")


def _about(model: ModelInfo) -> Lines:
    """Sizes, where it comes from and its files."""
    contents = model.contents
    if contents is not None:
        yield "weights", f"{contents.weights:,} in {size(contents.bytes)}"
        yield from zip(chain(["stored as"], repeat("")), _stored_as(contents), strict=False)
        yield "runs in", _runs_in(contents)
        for unused in contents.unused:
            tensors = "1 tensor" if unused.tensors == 1 else f"{unused.tensors} tensors"
            yield "not used", f"{unused.why}: {size(unused.bytes)} in {tensors}"
    if model.is_qat:
        yield "trained", "for a 4-bit grid (QAT)"
    origin = model.origin
    if origin is not None:
        revision = "" if origin.revision is None else f" at {origin.revision}"
        yield "made from", f"{origin.source}{revision}, recipe {origin.recipe}"
    if model.revision is not None:
        yield "revision", model.revision
    where = "on the hub, not downloaded" if model.folder is None else str(model.folder)
    yield "folder", f"{where} (hub cache)" if model.is_cached else where
    yield "files", ", ".join(_files(model.files))


def _stored_as(contents: Contents) -> list[str]:
    """For example ``bfloat16``, or shares of the bytes where there are several."""
    shares = {how: taken / contents.bytes for how, taken in contents.storages.items()}
    shown = {how: share for how, share in shares.items() if share >= _LITTLE}
    if len(shown) == 1:
        return [str(how) for how in shown]
    return [f"{100 * share:2.0f} % {how}" for how, share in shown.items()]


def _runs_in(contents: Contents) -> str:
    text = dtype_name(contents.activation)
    if abs(contents.loaded_bytes - contents.bytes) <= _LITTLE * contents.bytes:
        return text
    return f"{text}, where it takes {size(contents.loaded_bytes)}"


def _files(files: dict[str, int]) -> Iterator[str]:
    """Names and sizes; the files of many weights as one."""
    shards = {name: taken for name, taken in files.items() if _SHARD.fullmatch(name)}
    if len(shards) < _MANY_FILES:
        shards = {}
    for name, taken in files.items():
        if name not in shards:
            yield f"{name} {size(taken)}"
        elif name == min(shards):
            yield f"{name} and {len(shards) - 1} more like it {size(sum(shards.values()))}"


def _parts(contents: Contents) -> Table:
    table = empty_table()
    table.add_column("part", no_wrap=True)
    table.add_column("weights", justify="right")
    table.add_column("size", justify="right")
    table.add_column("stored as")
    parts: dict[str, list[Held]] = {}
    for one in contents.held:
        parts.setdefault(one.part, []).append(one)
    of_part = {part: sum(one.bytes for one in held) for part, held in parts.items()}
    for part, taken in sorted(of_part.items(), key=lambda item: -item[1]):
        held = parts[part]
        how = [_short(one.storage) for one in held if one.bytes >= _LITTLE * taken]
        weights = sum(one.weights for one in held)
        table.add_row(part, f"{weights:,}", size(taken), ", ".join(how))
    return table


def _short(storage: Storage) -> str:
    """For example ``4 bit``."""
    if storage.dtype is not None:
        return storage.dtype
    return f"{storage.bits} bit" if storage.mode == "affine" else str(storage.mode)


def _reads(pair: PairInfo, config: DrafterConfig) -> Lines:
    donors = [
        f"{kind.removesuffix('_attention')} layer {pair.config.donors[kind]} ({count} of its own)"
        for kind, count in pair.layers_of_drafter.items()
        if kind in pair.config.donors
    ]
    window = f"window {config.sliding_window}, drafts at the {DRAFT_POSITION} token's position"
    yield "reads", f"K and V of the target's {' and '.join(donors)}; {window}"
    scored = f"{pair.tokens_scored:,} tokens"
    if config.use_ordered_embeddings:
        head = f"{config.centroid_top_k} of {config.num_centroids} centroids"
        yield "head", f"centroid: scores {scored}, those of {head}"
    else:
        yield "head", f"dense: scores all {scored}"
    if pair.depth is not None:
        yield "depth", _depth(pair.depth)


def _depth(depth: DraftDepth) -> str:
    first, *others = depth.by_rows.items()
    each = [f"{first[1]} with {first[0]} row", *(f"{at} with {rows}" for rows, at in others)]
    measured, prior = "as rounds on this machine showed", "before anything is measured"
    return f"auto starts at {', '.join(each)}, {measured if depth.is_measured else prior}"


def _memory(memory: MemoryTable) -> Iterator[RenderableType]:
    unit, name = (GB, "GB") if memory.limit >= GB and memory.target >= GB else (MB, "MB")
    parts = f"target {figure(memory.target / unit)}"
    if memory.drafter:
        parts += f", drafter {figure(memory.drafter / unit)}"
    title = f"Memory in {name}, limit {size(memory.limit)}; in all sums: {parts}"
    yield Text(title, style="bold")
    table = empty_table()
    for heading in ("context", "K/V of a row\nfull layers", "\nsliding", "work for\n1 row"):
        table.add_column(heading, justify="right")
    table.add_column("\n8 rows", justify="right")
    for rows in ROWS:
        table.add_column(f"in all\n{rows} row" if rows == 1 else f"\n{rows} rows", justify="right")
    for context in memory.contexts:
        cells = memory.row(context)
        one, most = cells[0].needed, cells[-1].needed
        table.add_row(
            _tokens(context),
            figure(one.full / unit),
            figure(one.rings / unit),
            figure((one.activations + one.growth) / unit),
            figure((most.activations + most.growth) / unit),
            *(_total(cell, unit) for cell in cells),
        )
    yield table
    if not all(cell.fits for cell in memory.cells):
        yield Text("  in brackets: does not fit")
    yield Text("  work: activations, and the buffer that growing K/V are copied into")


def _total(cell: Cell, unit: float) -> str:
    total = figure(cell.needed.total / unit)
    return f"{total} " if cell.fits else f"({total})"


# The machine


def _environment(environment: Environment) -> Iterator[RenderableType]:
    names = [f"{package} {found or '?'}" for package, found in environment.versions.items()]
    yield Text(", ".join(names).replace("python", "Python"), style="bold")
    yield Text(str(environment.machine), style="bold")
    yield Text()
    yield _lines(_settings(environment))
    yield Text()
    yield from _models("In the hub cache", environment.found)
    yield Text()
    yield from _models("In the package, for demonstration", environment.bundled)


def _settings(environment: Environment) -> Lines:
    why = "all RAM" if environment.working_set_bytes is None else "what MLX recommends for the GPU"
    yield "memory", f"{size(environment.limit_bytes)} for models, {why}"
    folders = environment.folders
    yield "learned", str(folders.cache)
    yield "conversations", str(folders.conversations)
    yield "hub cache", str(folders.hub_cache)
    hub = "is not asked (HF_HUB_OFFLINE)" if environment.is_offline else "is asked where needed"
    token = "a token is set" if environment.has_token else "no token is set"
    yield "hub", f"{hub}; {token}"
    if environment.model is not None:
        yield MODEL_VARIABLE, environment.model
    if environment.drafter is not None:
        yield DRAFTER_VARIABLE, environment.drafter


def _models(title: str, models: Iterable[FoundModel]) -> Iterator[RenderableType]:
    yield Text(title, style="bold")
    table = empty_table()
    for heading in ("size", "weight files", "model"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    for model in models:
        table.add_row(size(model.bytes), _completeness(model), model.name)
        if model.kind == "target":
            table.add_row("", "", f"with {model.drafter or 'no drafter that is here'}")
    if table.row_count:
        yield table
    else:
        yield Text("  no Gemma 4 models; `mlx-mtp chat google/gemma-4-E4B-it` downloads one")


def _completeness(model: FoundModel) -> str:
    if model.is_complete:
        return "complete"
    if not model.weight_files:
        return "none"
    return f"{len(model.missing)} of {model.weight_files} missing"


def _lines(lines: Lines) -> RenderableType:
    """Names and what is said of each."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(name, text)
    return Padding(table, (0, 0, 0, 2))
