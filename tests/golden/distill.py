"""Trains an assistant on its target's own greedy text, so that some drafts are accepted.

The target is frozen. All positions of a text are trained at once, each as the start of one round:
its queries see what a round committed there would see, and later draft steps run on the
assistant's own hidden output with the true tokens as input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

DRAFT_STEPS = 4
NEW_TOKENS = 64


@dataclass(frozen=True)
class Corpus:
    """Greedy texts of one prompt length, with what the assistant reads of the target.

    tokens: [rows, n]; hidden: [rows, n, H] after the target's last norm;
    kv: per layer type the donor's keys and values, [rows, kv_heads, n, head_dim] each.
    """

    prompt_length: int
    tokens: torch.Tensor
    hidden: torch.Tensor
    kv: dict[str, tuple[torch.Tensor, torch.Tensor]]


def random_prompts(rows: int, length: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, length]: the bos token 2, then tokens above the special ones 0..3."""
    prompts = torch.randint(4, vocab, (rows, length), generator=generator)
    prompts[:, 0] = 2
    return prompts


@torch.no_grad()
def greedy(target: Any, prompts: torch.Tensor, tokens: int = NEW_TOKENS) -> torch.Tensor:
    """[rows, tokens]: transformers' greedy continuation; end-of-text ids do not stop it."""
    ids = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[:, prompts.shape[1] :]


@torch.no_grad()
def make_corpus(target: Any, lengths: list[int], rows: int, seed: int) -> list[Corpus]:
    """One Corpus of `rows` texts for each prompt length."""
    generator = torch.Generator().manual_seed(seed)
    vocab = target.config.get_text_config().vocab_size
    corpora = []
    for length in lengths:
        prompts = random_prompts(rows, length, vocab, generator)
        tokens = torch.cat([prompts, greedy(target, prompts)], dim=1)
        out = target(
            tokens, use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
        corpora.append(Corpus(length, tokens, out.hidden_states[-1], dict(out.shared_kv_states)))
    return corpora


def round_masks(starts: torch.Tensor, keys: int, window: int) -> dict[str, torch.Tensor]:
    """Boolean masks [1, 1, starts, keys] of rounds whose last committed position is `starts`.

    The full layer sees every committed position, the sliding layers the newest window + 1.
    """
    position = torch.arange(keys)
    committed = position <= starts[:, None]
    recent = committed & (position >= starts[:, None] - window)
    return {"full_attention": committed[None, None], "sliding_attention": recent[None, None]}


def batch_loss(drafter: Any, embed: Any, corpus: Corpus, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all starts and draft steps of the chosen rows (a scalar)."""
    tokens, hidden = corpus.tokens[rows], corpus.hidden[rows]
    kv = {kind: (k[rows], v[rows]) for kind, (k, v) in corpus.kv.items()}
    length = tokens.shape[1]
    starts = torch.arange(corpus.prompt_length - 1, length - 1 - DRAFT_STEPS)
    masks = round_masks(starts, length, drafter.config.get_text_config().sliding_window)
    state = hidden[:, starts]
    losses = []
    for step in range(1, DRAFT_STEPS + 1):
        inputs = torch.cat([embed(tokens[:, starts + step]), state], dim=-1)
        normed = drafter.model(
            inputs_embeds=drafter.pre_projection(inputs),
            attention_mask=masks,
            position_ids=(starts + 1)[None],  # the bonus token's position, the same for all steps
            shared_kv_states=kv,
            use_cache=False,
            output_hidden_states=True,  # keeps transformers from slicing per-layer inputs it lacks
        ).last_hidden_state
        state = drafter.post_projection(normed)
        losses.append(head_loss(drafter, normed, tokens[:, starts + step + 1]))
    return torch.stack(losses).mean()


def head_loss(drafter: Any, normed: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the token; with a centroid head, of the token's centroid too."""
    loss = cross_entropy(drafter.lm_head(normed).flatten(0, 1), labels.flatten())
    head = drafter.masked_embedding
    if head is None:
        return loss
    centroid_of = torch.argsort(head.token_ordering) // head.vocab_size_per_centroid
    return loss + cross_entropy(head.centroids(normed).flatten(0, 1), centroid_of[labels].flatten())


def distill(
    target: Any, drafter: Any, corpora: list[Corpus], steps: int, rows: int, rate: float, seed: int
) -> Iterator[float]:
    """Trains the assistant in place and yields the loss of every step."""
    embed = target.get_input_embeddings()
    embed.requires_grad_(False)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    drafter.train()
    for step in range(steps):
        corpus = corpora[step % len(corpora)]
        chosen = torch.randperm(len(corpus.tokens), generator=generator)[:rows]
        loss = batch_loss(drafter, embed, corpus, chosen)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()
    drafter.eval()
