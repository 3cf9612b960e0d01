"""What is known, for programs. Owns: the JSON documents of a pair and of the environment; the names
are those of the other commands' documents.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlx_mtp.errors import MlxMtpError
from mlx_mtp.info.contents import Contents, dtype_name
from mlx_mtp.info.environment import Environment, FoundModel
from mlx_mtp.info.memory import Cell, MemoryTable
from mlx_mtp.info.pair import DRAFT_POSITION, ModelInfo, PairInfo
from mlx_mtp.pair import DrafterConfig, TargetConfig

SCHEMA = 1


def pair_document(pair: PairInfo) -> dict[str, Any]:
    """A pair; bytes, tokens."""
    memory, depth = pair.memory, pair.depth
    return {
        "schema": SCHEMA,
        "model": pair.target.name,
        "target": _model(pair.target) | _of_target(pair.config),
        "drafter": None if pair.drafter is None else _model(pair.drafter),
        "fits": pair.fits,
        "reads": None if pair.drafter_config is None else _reads(pair, pair.drafter_config),
        "memory": None if memory is None else _memory(memory),
        "depth": None if depth is None else depth._asdict(),
        "warnings": pair.warnings,
        "problems": [_problem(error) for error in pair.problems],
    }


def environment_document(environment: Environment) -> dict[str, Any]:
    """This machine, its settings and its models."""
    return {
        "schema": SCHEMA,
        "versions": environment.versions,
        "machine": asdict(environment.machine),
        "working_set_bytes": environment.working_set_bytes,
        "limit_bytes": environment.limit_bytes,
        "folders": {name: str(path) for name, path in environment.folders._asdict().items()},
        "is_offline": environment.is_offline,
        "has_token": environment.has_token,
        "model": environment.model,
        "drafter": environment.drafter,
        "found": [_found(model) for model in environment.found],
        "bundled": [_found(model) for model in environment.bundled],
    }


def _model(model: ModelInfo) -> dict[str, Any]:
    contents, config = model.contents, model.config
    return {
        "name": model.name,
        "folder": None if model.folder is None else str(model.folder),
        "revision": model.revision,
        "is_cached": model.is_cached,
        "origin": None if model.origin is None else model.origin._asdict(),
        "is_qat": model.is_qat,
        "model_type": config.model_type,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "files": [{"name": name, "bytes": size} for name, size in model.files.items()],
        **(_contents(contents) if contents is not None else dict.fromkeys(_CONTENTS)),
    }


_CONTENTS = ("dtype", "weights", "bytes", "loaded_bytes", "stored_as", "parts", "unused")


def _contents(contents: Contents) -> dict[str, Any]:
    values: tuple[Any, ...] = (
        dtype_name(contents.activation),
        contents.weights,
        contents.bytes,
        contents.loaded_bytes,
        [how._asdict() | {"bytes": size} for how, size in contents.storages.items()],
        [{**one._asdict(), "storage": one.storage._asdict()} for one in contents.held],
        [one._asdict() for one in contents.unused],
    )
    return dict(zip(_CONTENTS, values, strict=True))


def _of_target(config: TargetConfig) -> dict[str, Any]:
    return {
        "family": config.family,
        "layer_types": list(config.layer_types),
        "num_kv_layers": config.num_kv_layers,
        "sliding_window": config.sliding_window,
        "context": config.max_position_embeddings,
        "num_experts": config.num_experts,
        "top_k_experts": config.top_k_experts,
    }


def _reads(pair: PairInfo, drafter: DrafterConfig) -> dict[str, Any]:
    has_centroids = drafter.use_ordered_embeddings
    return {
        "donors": [
            {"layer": pair.config.donors.get(kind), "type": kind, "drafter_layers": count}
            for kind, count in pair.layers_of_drafter.items()
        ],
        "window": drafter.sliding_window,
        "head": "centroid" if has_centroids else "dense",
        "num_centroids": drafter.num_centroids if has_centroids else None,
        "centroid_top_k": drafter.centroid_top_k if has_centroids else None,
        "tokens_scored": pair.tokens_scored,
        "draft_position": DRAFT_POSITION,
    }


def _memory(memory: MemoryTable) -> dict[str, Any]:
    return {
        "limit_bytes": memory.limit,
        "target_bytes": memory.target,
        "drafter_bytes": memory.drafter,
        "cells": [_cell(cell) for cell in memory.cells],
    }


def _cell(cell: Cell) -> dict[str, Any]:
    needed = cell.needed
    return {
        "rows": cell.rows,
        "context": cell.context,
        "kv_full_bytes": needed.full,
        "kv_ring_bytes": needed.rings,
        "growth_bytes": needed.growth,
        "activation_bytes": needed.activations,
        "bytes": needed.total,
        "fits": cell.fits,
    }


def _problem(error: MlxMtpError) -> dict[str, Any]:
    return {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}


def _found(model: FoundModel) -> dict[str, Any]:
    return {
        "kind": model.kind,
        "name": model.name,
        "folder": str(model.folder),
        "revision": model.revision,
        "bytes": model.bytes,
        "is_complete": model.is_complete,
        "missing": list(model.missing),
        "drafter": model.drafter,
    }
