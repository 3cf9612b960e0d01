"""Trains a target on the generated text, by the clock: the rate falls with the elapsed share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import fast
import torch
from optimizer import Optimizer, schedule
from shapes import Pair, build_target
from text import conversations
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from vocabulary import PAD, Learnt, render

ROW_LENGTH = 160
ROWS = 16
LOG_EVERY = 100
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Packed conversations, [rows, ROW_LENGTH] each; `labels` are the tokens to learn, shifted.

    `positions` begin at 0 with every conversation, `document` numbers them within a row.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    document: torch.Tensor


def encoded(tokenizer: Tokenizer, pair: Pair, seed: int) -> Iterator[tuple[list[int], list[bool]]]:
    """Ids of training conversations without end, and which of them are learnt."""
    rng, source, learnt = Random(seed + 1), conversations(seed), Learnt(tokenizer)
    while True:
        texts = [
            render(
                messages,
                empty_thought=pair.empty_thought and rng.random() < 0.8,
                think=rng.random() < 0.03,
            )
            for messages in islice(source, 256)
        ]
        for encoding in tokenizer.encode_batch_fast(texts):
            yield encoding.ids, learnt(encoding.ids)


def batches(
    tokenizer: Tokenizer, pair: Pair, seed: int, rows: int = ROWS, length: int = ROW_LENGTH
) -> Iterator[Batch]:
    """Packed batches of training conversations without end; longer ones than a row are left out.

    A row begins with the conversation that has waited longest and is filled up with the longest
    that fit among those waiting.
    """
    source = (item for item in encoded(tokenizer, pair, seed) if len(item[0]) <= length)
    waiting = list(islice(source, 64))
    while True:
        tokens = [[PAD] * length for _ in range(rows)]
        labels = [[IGNORED] * length for _ in range(rows)]
        positions = [[0] * length for _ in range(rows)]
        document = [[0] * length for _ in range(rows)]
        for row in range(rows):
            used, number = 0, 1
            chosen: int | None = 0
            while chosen is not None:
                ids, learnt = waiting.pop(chosen)
                waiting.append(next(source))
                at = slice(used, used + len(ids))
                shifted = [i if learn else IGNORED for i, learn in zip(ids, learnt, strict=True)]
                tokens[row][at] = ids
                labels[row][at] = [*shifted[1:], IGNORED]
                positions[row][at] = range(len(ids))
                document[row][at] = [number] * len(ids)
                used, number = used + len(ids), number + 1
                fitting = [i for i, item in enumerate(waiting) if len(item[0]) <= length - used]
                chosen = max(fitting, key=lambda i: len(waiting[i][0]), default=None)
        yield Batch(*map(torch.tensor, (tokens, labels, positions, document)))


def masks(batch: Batch, window: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Additive masks [rows, 1, n, n]: causal within a conversation, windowed on sliding layers."""
    n = batch.tokens.shape[1]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    causal = (batch.document[:, :, None] == batch.document[:, None, :]) & (distance >= 0)
    return {
        kind: torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -1e30)[:, None]
        for kind, seen in (
            ("full_attention", causal),
            ("sliding_attention", causal & (distance < window)),
        )
    }


def initialize(model: torch.nn.Module, seed: int) -> None:
    """Random weights: small tables (they are tied to the head), unit-variance projections."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        deviation = 0.02 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
        if "embed_tokens_per_layer" in name:
            deviation = 0.1
        elif name.endswith("router.proj.weight"):
            deviation = 1.0
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)


def loss_of(model: Any, text_model: Any, batch: Batch, window: int) -> torch.Tensor:
    """Mean cross-entropy of the tokens to learn; the head runs for their positions only."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = text_model(
            input_ids=batch.tokens,
            attention_mask=masks(batch, window, torch.bfloat16),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        learnt = batch.labels != IGNORED
        logits = model.lm_head(hidden[learnt])
    logits = 30.0 * torch.tanh(logits.float() / 30.0)
    return cross_entropy(logits, batch.labels[learnt])


def train_target(
    pair: Pair,
    tokenizer: Tokenizer,
    seconds: float,
    seed: int,
    log: Any,
    compiled: bool = True,
    start: Path | None = None,
) -> Any:
    """A target trained for `seconds` of wall-clock time, in float32.

    `start`: the folder of a trained target to go on from, at half the rates and without a plateau.
    """
    fast.install()
    torch.manual_seed(seed)
    model = build_target(pair)
    if start is None:
        initialize(model, seed)
    else:
        model = type(model).from_pretrained(start, dtype=torch.float32)
    peak, plateau = (1.0, 0.4) if start is None else (0.5, 0.0)
    model.train()
    text_model = model.model.language_model
    run = torch.compile(text_model) if compiled else text_model
    optimizer = Optimizer(model, matrix_rate=0.02, rate=4e-3)
    moe = bool(pair.target.get("enable_moe_block"))
    source = batches(tokenizer, pair, seed)
    loss_of(model, run, next(source), pair.heads["sliding_window"]).backward()  # compiles
    began, step, recent, seen = monotonic(), 0, 0.0, 0
    while (elapsed := (monotonic() - began) / seconds) < 1:
        batch = next(source)
        loss = loss_of(model, run, batch, pair.heads["sliding_window"])
        recent += float(loss.detach())
        (loss + 0.01 * fast.balance_loss(model) if moe else loss).backward()
        optimizer.step(peak * schedule(elapsed, plateau))
        step += 1
        seen += int((batch.labels != IGNORED).sum())
        if step % LOG_EVERY == 0:
            log(
                f"target step {step} at {elapsed:.3f} of the time: "
                f"loss {recent / LOG_EVERY:.4f}, {seen / 1e6:.2f} M tokens learnt"
            )
            recent = 0.0
    log(f"target: {step} steps of {ROWS} x {ROW_LENGTH} tokens, {seen / 1e6:.2f} M learnt")
    return model.eval()
