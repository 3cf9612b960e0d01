"""Trains an assistant on its frozen target: all positions of a text at once, each as one round.

The queries of a round that begins after position t see the donors' keys and values up to t
(sliding layers: the newest window + 1) and stand at the constant position t + 1. Step k reads the
target's embedding of token t + k, and the target's hidden state at t or its own last output; it
learns the target's distribution of token t + k + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import fast
import torch
from optimizer import Optimizer, schedule
from shapes import Pair, build_drafter
from target import IGNORED, Batch, batches, masks
from tokenizers import Tokenizer
from torch.nn.functional import log_softmax

DRAFT_STEPS = 4
STARTS = 96  # rounds trained per row of a batch
LOG_EVERY = 50


@dataclass(frozen=True)
class Rounds:
    """What rounds read and learn. R rows, S rounds each, n positions, K steps.

    hidden: [R, S, H] at t; embedded: K tensors [R, S, H] of tokens t+1..t+K; teacher: K tensors
    [R, S, V] of the target's log-probabilities of tokens t+2..t+K+1; weight: K tensors [R, S];
    position: [R, S]; masks: per layer type [R, 1, S, n]; kv: per layer type the donor's keys and
    values.
    """

    hidden: torch.Tensor
    embedded: list[torch.Tensor]
    teacher: list[torch.Tensor]
    weight: list[torch.Tensor]
    position: torch.Tensor
    masks: dict[str, torch.Tensor]
    kv: dict[str, tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def make_rounds(target: Any, run: Any, batch: Batch, window: int) -> Rounds:
    """Runs the target over a batch and picks up to STARTS rounds of each row at random."""
    n = batch.tokens.shape[1]
    with torch.autocast("cpu", torch.bfloat16):
        out = run(
            input_ids=batch.tokens,
            attention_mask=masks(batch, window, torch.bfloat16),
            position_ids=batch.positions,
            use_cache=False,
            return_shared_kv_states=True,
        )
        hidden = out.last_hidden_state
        logits = target.lm_head(hidden).float()
    teacher = log_softmax(30.0 * torch.tanh(logits / 30.0), -1)
    learnt = batch.labels != IGNORED  # where the next token is one that the model writes
    order = (torch.rand(learnt.shape) + learnt.float()).argsort(1, descending=True)
    start = order[:, :STARTS].sort(1).values  # [R, S]
    rows = torch.arange(len(start))[:, None]
    embed = target.get_input_embeddings()
    embedded, targets, weight = [], [], []
    for step in range(1, DRAFT_STEPS + 1):
        at = (start + step).clamp(max=n - 1)
        same = (start + step < n) & (batch.document[rows, at] == batch.document[rows, start])
        # a round of which no earlier token ended the turn
        alive = learnt[rows, start] & same & learnt[rows, at]
        weight.append((alive & (weight[-1] > 0) if weight else alive).float())
        embedded.append(embed(batch.tokens[rows, at]))
        targets.append(teacher[rows, at])
    key = torch.arange(n)
    seen = (batch.document[rows, start][..., None] == batch.document[:, None]) & (
        key <= start[..., None]
    )
    recent = seen & (key >= start[..., None] - window)
    shown = {"full_attention": seen, "sliding_attention": recent}
    additive = {
        kind: torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill_(~mask, -1e30)[:, None]
        for kind, mask in shown.items()
    }
    kv = {kind: (k.detach(), v.detach()) for kind, (k, v) in out.shared_kv_states.items()}
    position = batch.positions[rows, start] + 1
    return Rounds(hidden[rows, start].float(), embedded, targets, weight, position, additive, kv)


def step_outputs(drafter: Any, run: Any, rounds: Rounds) -> Iterator[torch.Tensor]:
    """The assistant's normed outputs [R, S, h] of every draft step, on the text's own tokens."""
    state = rounds.hidden
    for embedded in rounds.embedded:
        normed = run(
            inputs_embeds=drafter.pre_projection(torch.cat([embedded, state], -1)),
            attention_mask=rounds.masks,
            position_ids=rounds.position,
            shared_kv_states=rounds.kv,
            use_cache=False,
            output_hidden_states=True,  # keeps transformers from slicing per-layer inputs it lacks
        ).last_hidden_state
        state = drafter.post_projection(normed)
        yield normed


def rounds_loss(drafter: Any, run: Any, rounds: Rounds) -> tuple[torch.Tensor, list[float]]:
    """Mean cross-entropy to the target's distribution; and by step how often the best agree."""
    losses, agreed = [], []
    with torch.autocast("cpu", torch.bfloat16):
        outputs = list(step_outputs(drafter, run, rounds))
    for normed, teacher, weight in zip(outputs, rounds.teacher, rounds.weight, strict=True):
        kept = weight > 0
        with torch.autocast("cpu", torch.bfloat16):
            logits = drafter.lm_head(normed[kept])
        logits, teacher = logits.float(), teacher[kept]
        losses.append(-(teacher.exp() * log_softmax(logits, -1)).sum(-1).mean())
        agreed.append(float((logits.argmax(-1) == teacher.argmax(-1)).float().mean()))
    return torch.stack(losses).mean(), agreed


def train_drafter(
    pair: Pair,
    target: Any,
    tokenizer: Tokenizer,
    seconds: float,
    seed: int,
    log: Any,
    compiled: bool = True,
    start: Path | None = None,
) -> Any:
    """An assistant trained for `seconds` of wall-clock time; its centroid head takes a sixth.

    `start`: the folder of a trained assistant to go on from, at half the rates and without a
    plateau.
    """
    fast.install()
    torch.manual_seed(seed + 10)
    drafter = build_drafter(pair)
    if start is None:
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        with torch.no_grad():
            drafter.model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    else:
        drafter = type(drafter).from_pretrained(start, dtype=torch.float32)
    peak, plateau = (1.0, 0.4) if start is None else (0.5, 0.0)
    if drafter.masked_embedding is not None:
        drafter.masked_embedding.requires_grad_(False)
    target.requires_grad_(False)
    window = pair.heads["sliding_window"]
    teacher = target.model.language_model
    run = torch.compile(drafter.model) if compiled else drafter.model
    optimizer = Optimizer(drafter, matrix_rate=0.02, rate=2e-3)
    source = batches(tokenizer, pair, seed + 1000)
    rounds_loss(drafter, run, make_rounds(target, teacher, next(source), window))[0].backward()
    drafter.zero_grad()
    head_seconds = seconds / 6 if pair.centroids else 0.0
    began, step = monotonic(), 0
    while (elapsed := (monotonic() - began) / (seconds - head_seconds)) < 1:
        rounds = make_rounds(target, teacher, next(source), window)
        loss, agreed = rounds_loss(drafter, run, rounds)
        loss.backward()
        optimizer.step(peak * schedule(elapsed, plateau))
        step += 1
        if step % LOG_EVERY == 0:
            shown = " ".join(f"{share:.3f}" for share in agreed)
            log(
                f"drafter step {step} at {elapsed:.3f} of the time: loss {float(loss):.4f}, "
                f"agreement by step {shown}"
            )
    log(f"drafter: {step} steps of up to {STARTS} rounds in each row")
    if pair.centroids:
        every = (make_rounds(target, teacher, batch, window) for batch in source)
        train_centroids(drafter, run, every, head_seconds, log)
    return drafter.eval()


def balanced_clusters(table: torch.Tensor, number: int, seed: int) -> torch.Tensor:
    """[V] token ids, cluster after cluster: k-means on the unit sphere, clusters of one size."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.nn.functional.normalize(table.float(), dim=-1)
    size = len(points) // number
    centers = points[torch.randperm(len(points), generator=generator)[:number]]
    owner = torch.zeros(len(points), dtype=torch.long)
    for _ in range(20):
        similarity = points @ centers.T
        room = [size] * number
        owner.fill_(-1)
        for flat in similarity.flatten().argsort(descending=True).tolist():
            token, cluster = divmod(flat, number)
            if owner[token] < 0 and room[cluster]:
                owner[token] = cluster
                room[cluster] -= 1
        centers = torch.nn.functional.normalize(
            torch.stack([points[owner == cluster].mean(0) for cluster in range(number)]), dim=-1
        )
    return owner.argsort(stable=True)


def train_centroids(
    drafter: Any, run: Any, source: Iterator[Rounds], seconds: float, log: Any
) -> None:
    """Orders the tokens by cluster and trains the centroids to find the target's choice."""
    head = drafter.masked_embedding
    head.token_ordering.copy_(
        balanced_clusters(drafter.lm_head.weight.detach(), head.num_centroids, seed=0)
    )
    cluster_of = head.token_ordering.argsort() // head.vocab_size_per_centroid
    with torch.no_grad():
        groups = drafter.lm_head.weight[head.token_ordering].view(head.num_centroids, -1, 128)
        head.centroids.weight.copy_(groups.mean(1))
    head.centroids.requires_grad_(True)
    optimizer = torch.optim.Adam(head.centroids.parameters(), lr=3e-3)
    began, step, hits = monotonic(), 0, 0.0
    while (elapsed := (monotonic() - began) / seconds) < 1:
        rounds = next(source)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            outputs = list(step_outputs(drafter, run, rounds))
        kept = [weight > 0 for weight in rounds.weight]
        normed = torch.cat([out[k] for out, k in zip(outputs, kept, strict=True)]).float()
        teacher = torch.cat([t[k] for t, k in zip(rounds.teacher, kept, strict=True)])
        mass = torch.zeros(len(teacher), head.num_centroids).index_add_(
            1, cluster_of, teacher.exp()
        )
        scores = head.centroids(normed)
        loss = -(mass * log_softmax(scores, -1)).sum(-1).mean()
        optimizer.param_groups[0]["lr"] = 3e-3 * schedule(elapsed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        top = scores.topk(head.centroid_intermediate_top_k, -1).indices
        wanted = cluster_of[teacher.argmax(-1)]
        hits = float((top == wanted[:, None]).any(-1).float().mean())
        step += 1
    log(f"centroids: {step} steps; the top clusters hold the target's choice in {hits:.4f}")
