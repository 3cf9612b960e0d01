"""Golden outputs of a pair: plain greedy, transformers' MTP, and a cache-free MTP loop.

The cache-free loop (`reference_rounds`) states what a drafter may read: the keys and values of
committed tokens only, at the constant position of the bonus token. It also measures how far
every discrete choice is from a tie, so that no other framework's rounding can flip it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Forward:
    """One forward of the target over one row, without a cache.

    logits: [n, V]; hidden: [n, H] after the last norm; kv: per layer type the donor's keys and
    values, [1, kv_heads, n, head_dim] each.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    kv: dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Gaps:
    """The smallest distance to a tie seen so far, of each kind of choice."""

    draft: float = float("inf")  # top-2 logits of the assistant
    centroid: float = float("inf")  # last chosen and first left-out centroid
    router: float = float("inf")  # last chosen and first left-out expert, in log-probability


@dataclass(frozen=True)
class Draft:
    """Steps of one round. tokens: [k]; logits: [k, V]; hidden: [k, H], after post_projection."""

    tokens: list[int]
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass
class Reference:
    """What the cache-free loop produced: ids, rounds, and the first round's draft in full."""

    ids: list[int] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    first: Draft | None = None


@torch.no_grad()
def forward(target: Any, ids: list[int]) -> Forward:
    out = target(
        torch.tensor([ids]),
        use_cache=False,
        output_hidden_states=True,
        return_shared_kv_states=True,
    )
    return Forward(out.logits[0], out.hidden_states[-1][0], dict(out.shared_kv_states))


@torch.no_grad()
def draft(
    target: Any, drafter: Any, state: Forward, committed: int, bonus: int, depth: int
) -> Draft:
    """Drafts `depth` tokens after `bonus`, which stands at position `committed`."""
    kv = {kind: (k[:, :, :committed], v[:, :, :committed]) for kind, (k, v) in state.kv.items()}
    hidden = state.hidden[None, committed - 1 : committed]
    token = torch.tensor([[bonus]])
    logits, hiddens = [], []
    for _ in range(depth):
        out = drafter(
            inputs_embeds=torch.cat([target.get_input_embeddings()(token), hidden], dim=-1),
            position_ids=torch.tensor([[committed]]),
            shared_kv_states=kv,
        )
        hidden, token = out.last_hidden_state, out.logits.argmax(-1)
        logits.append(out.logits[0, 0])
        hiddens.append(hidden[0, 0])
    stacked = torch.stack(logits)
    return Draft(stacked.argmax(-1).tolist(), stacked, torch.stack(hiddens))


def reference_rounds(
    target: Any, drafter: Any, prompt: list[int], depth: int, tokens: int
) -> Reference:
    """MTP decoding that recomputes the target over everything committed in each round."""
    state = forward(target, prompt)
    committed, bonus = len(prompt), int(state.logits[-1].argmax())
    result = Reference(ids=[bonus])
    while len(result.ids) < tokens:
        drafted = draft(target, drafter, state, committed, bonus, depth)
        result.first = result.first or drafted
        ids = prompt + result.ids
        # positions past the accepted drafts are not read again: every later slice ends before
        state = forward(target, ids + drafted.tokens)
        choices = state.logits[committed:].argmax(-1).tolist()
        accepted = 0
        while accepted < depth and drafted.tokens[accepted] == choices[accepted]:
            accepted += 1
        result.rounds.append(
            {"committed": committed, "draft": drafted.tokens, "accepted": accepted}
        )
        result.ids += choices[: accepted + 1]
        committed, bonus = committed + accepted + 1, choices[accepted]
    del result.ids[tokens:]
    return result


@torch.no_grad()
def transformers_mtp(target: Any, drafter: Any, prompt: list[int], tokens: int) -> list[int]:
    """Greedy ids of transformers' own assisted generation."""
    ids = torch.tensor([prompt])
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=drafter,
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(map(int, out[0, len(prompt) :]))


@contextmanager
def watch_gaps(target: Any, drafter: Any) -> Iterator[Gaps]:
    """Measures every draft, centroid and router choice made inside the block."""
    gaps = Gaps()

    def margin(scores: torch.Tensor, chosen: int) -> float:
        top = scores.topk(chosen + 1, dim=-1).values
        return float((top[..., chosen - 1] - top[..., chosen]).min())

    def on_draft(_module: Any, _inputs: Any, output: Any) -> None:
        gaps.draft = min(gaps.draft, margin(output.logits, 1))

    def on_centroids(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        chosen = drafter.config.centroid_intermediate_top_k
        gaps.centroid = min(gaps.centroid, margin(output, chosen))

    def on_router(_module: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        chosen = target.config.get_text_config().top_k_experts
        gaps.router = min(gaps.router, margin(output[0].log(), chosen))

    hooks = [drafter.register_forward_hook(on_draft)]
    if drafter.masked_embedding is not None:
        hooks.append(drafter.masked_embedding.centroids.register_forward_hook(on_centroids))
    hooks += [
        module.register_forward_hook(on_router)
        for name, module in target.named_modules()
        if name.endswith(".router")
    ]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()
