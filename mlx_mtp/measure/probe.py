"""Which kernels give a token other bits when it does not come alone. Owns: running each kind of
projection, attention and norm of a target on one token row and on several, with its own weights and
the inputs that a prompt brings them.

Several come as tokens of one row, as in a verify, and as rows of one token, as in a batch. What
lies between two results is given in units of the last place of the larger of the two numbers, or of
the token's root mean square where that is larger: it is a sum's terms that are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.model.attention import Seen, SlotMask, attend
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.experts import run_glu
from mlx_mtp.model.layer import finish_layer, project_keys_values, project_queries
from mlx_mtp.model.span import PREFILL_CHUNK
from mlx_mtp.model.target import Target

COUNTS = (2, 3, 5, 8)
"""Token rows that are compared with one."""

Run = Callable[..., mx.array]
"""From arrays [rows, L, ...] to one of the same rows and L, each token's own."""


@dataclass(frozen=True)
class Probed:
    """One kind of computation.

    Attributes:
        name: for example "q_proj".
        shape: for example "2048 x 8192", inputs and outputs.
        weights: dtype or quantization, for example "4 bit, group 64".
        tokens, rows: by number of token rows, how far a token's result is from its result alone, in
            units of last place; as tokens of one row, and as rows of one token. 0: the same bits.
    """

    name: str
    shape: str
    weights: str
    tokens: dict[int, float]
    rows: dict[int, float]

    @property
    def is_equal(self) -> bool:
        return not any((*self.tokens.values(), *self.rows.values()))

    @property
    def worst(self) -> float:
        return max(*self.tokens.values(), *self.rows.values())


@dataclass(frozen=True)
class _Work:
    """Something to probe: inputs [1, MOST, ...] and what makes a result of them."""

    name: str
    shape: str
    weights: str
    run: Run
    inputs: tuple[mx.array, ...]


def probe(target: Target, prompt: Sequence[int]) -> list[Probed]:
    """Compare one token row with several, once for each kind, shape and quantization.

    Args:
        target: computed with; nothing of it changes.
        prompt: token ids; its last ones are the tokens.
    """
    most = max(COUNTS)
    ids = list(prompt) * (most // len(prompt) + 2)
    ids = ids[: max(len(prompt), most + 1)]
    found: dict[tuple[str, str, str], Probed] = {}
    with target.lock:
        for work in _works(target, ids[:-most], ids[-most:]):
            key = work.name, work.shape, work.weights
            if key not in found:
                found[key] = _compared(work)
    return list(found.values())


def _compared(work: _Work) -> Probed:
    single = [work.run(*(x[:, i : i + 1] for x in work.inputs)) for i in range(max(COUNTS))]
    alone = mx.concatenate(single, axis=1)
    mx.eval(alone)
    tokens, rows = {}, {}
    for count in COUNTS:
        own = [mx.contiguous(x[:, :count]) for x in work.inputs]
        tokens[count] = last_places(alone[:, :count], work.run(*own))
        apart = [mx.contiguous(x.swapaxes(0, 1)) for x in own]
        rows[count] = last_places(alone[:, :count], work.run(*apart).swapaxes(0, 1))
    return Probed(work.name, work.shape, work.weights, tokens, rows)


def last_places(one: mx.array, other: mx.array) -> float:
    """The largest difference of two results [rows, L, ...] in units of last place, as above."""
    bits = {mx.float32: 23, mx.float16: 10, mx.bfloat16: 7}[one.dtype]
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    one, other = one.flatten(2), other.flatten(2)
    typical = mx.sqrt((one * one).mean(-1, keepdims=True))
    size = mx.maximum(mx.maximum(mx.abs(one), mx.abs(other)), typical)
    places = mx.power(2.0, mx.floor(mx.log2(mx.maximum(size, 1e-30))) - bits)
    return cast("float", (mx.abs(one - other) / places).max().item())


def _works(target: Target, before: list[int], ids: list[int]) -> Iterator[_Work]:
    """Everything that a forward over the last tokens of a prompt computes, with its real inputs."""
    config, experts = target.config, target.experts
    cache = SlotCache(config, 1, target.dtype, len(before) + len(ids))
    for start in range(0, len(before), PREFILL_CHUNK):
        part = before[start : start + PREFILL_CHUNK]
        span = cache.span(0, mx.array([start], mx.int32), len(part), [start])
        mx.eval(target.forward(mx.array([part]), cache, span))
    tokens = mx.array([ids])
    span = cache.span(0, mx.array([len(before)], mx.int32), len(ids), [len(before)])
    h = target.embed(tokens)
    per_layer = target.per_layer_inputs(tokens, h)
    if per_layer is not None:
        yield _linear("per_layer_model", target.body.per_layer_model_projection, h)
    for index, layer in enumerate(target.body.layers):
        x = layer.input_layernorm(h)
        yield _Work("rms_norm", str(h.shape[-1]), _dtype(h), layer.input_layernorm, (h,))
        if index < config.num_kv_layers:
            keys, values = project_keys_values(layer.self_attn, x, span.starts)
            cache.write(index, span, keys, values)
        queries = project_queries(layer.self_attn, x, span.starts)
        seen = cache.seen_by_target(config.kv_source(index), span)
        attended = attend(queries, seen)
        own = None if per_layer is None else per_layer[:, :, index]
        after = finish_layer(layer, experts, h, attended, own)
        mx.eval(after)
        yield from _attention(layer, x, attended)
        yield _attending(config.layer_types[index], queries, seen[0])
        yield from _feed_forward(target, layer, h, attended)
        if own is not None:
            gate = layer.per_layer_input_gate
            yield _linear("per_layer_gate", gate, after)
            gated = nn.gelu_approx(gate(after)) * own
            yield _linear("per_layer_proj", layer.per_layer_projection, gated)
        h = after
    yield _head(target, target.body.norm(h))


def _attention(layer: Any, x: mx.array, attended: mx.array) -> Iterator[_Work]:
    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        if name in attention:
            yield _linear(name, attention[name], x)
    yield _linear("o_proj", attention.o_proj, attended)


def _attending(kind: str, queries: mx.array, seen: Seen) -> _Work:
    """Attention over what one row holds; several rows hold the same."""
    keys, values, mask = seen

    def run(queries: mx.array, visible: mx.array) -> mx.array:
        shape = (queries.shape[0], *keys.shape[1:])
        own = [mx.contiguous(mx.broadcast_to(one, shape)) for one in (keys, values)]
        return attend(queries.swapaxes(1, 2), [Seen(own[0], own[1], SlotMask(visible))])

    name = f"attention, {kind.removesuffix('_attention')}"
    shape = f"{queries.shape[1]} heads of {queries.shape[3]}"
    return _Work(name, shape, _dtype(keys), run, (queries.swapaxes(1, 2), mask.folded[:, 0, 0]))


def _feed_forward(target: Target, layer: Any, h: mx.array, attended: mx.array) -> Iterator[_Work]:
    """What follows attention: the dense part, then router and experts where there are some."""
    h = h + layer.post_attention_layernorm(layer.self_attn.o_proj(attended))
    x, mlp = layer.pre_feedforward_layernorm(h), layer.mlp
    yield _linear("gate_proj", mlp.gate_proj, x)
    yield _linear("up_proj", mlp.up_proj, x)
    yield _linear("down_proj", mlp.down_proj, nn.gelu_approx(mlp.gate_proj(x)) * mlp.up_proj(x))
    if not layer.enable_moe:
        return
    x = layer.pre_feedforward_layernorm_2(h)
    yield _linear("router", layer.router.proj, x)
    glu, sort_from = layer.experts.switch_glu, target.experts.strategy.sort_from
    if "scales" not in glu.down_proj:
        x = x.astype(glu.down_proj.weight.dtype)
    indices, _ = layer.router(h)
    count, width, _ = glu.down_proj.weight.shape

    def run(x: mx.array, indices: mx.array) -> mx.array:
        return run_glu(glu, x, indices, sort_from)

    shape = f"{indices.shape[-1]} of {count}, width {width}"
    yield _Work("experts", shape, _weights(glu.down_proj), run, (x, indices))


def _head(target: Target, hidden: mx.array) -> _Work:
    head = target.head
    table = target.body.embed_tokens if head.tie_word_embeddings else head.lm_head
    shape = f"{hidden.shape[-1]} x {table.weight.shape[0]}"
    return _Work("head", shape, _weights(table), target.logits, (hidden,))


def _linear(name: str, linear: Any, x: mx.array) -> _Work:
    shape = f"{x.shape[-1]} x {linear.weight.shape[0]}"
    return _Work(name, shape, _weights(linear), linear, (x,))


def _weights(module: Any) -> str:
    """How weights are stored, for example ``4 bit, group 64``."""
    if "scales" not in module:
        return _dtype(module.weight)
    mode = getattr(module, "mode", "affine")
    how = f"{module.bits} bit" if mode == "affine" else mode
    return f"{how}, group {module.group_size}"


def _dtype(x: mx.array) -> str:
    return str(x.dtype).rpartition(".")[2]
