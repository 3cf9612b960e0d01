"""What is said about a reply in figures. Owns: the statistics line, the chart of accepted drafts,
and what is worth a warning. Computes from counters; writes nothing.
"""

from __future__ import annotations

from mlx_mtp.types import RequestStats, RunStats

FEW_ROUNDS = 8
"""Rounds that may be plain while it is being learnt what drafts cost."""
FEW_DRAFTS = 40
"""Drafts after which hardly any accepted one is no bad luck."""
_BAR = 24


def stats_line(stats: RequestStats) -> str:
    """For example ``412 tok · 71.3 tok/s · first 0.31 s · drafts 68 % (2.7/round)``."""
    parts = [f"{stats.tokens} tok"]
    if stats.tokens > 1 and stats.decode_seconds > 0:
        parts.append(f"{(stats.tokens - 1) / stats.decode_seconds:.1f} tok/s")
    if stats.first_token_seconds:
        parts.append(f"first {stats.first_token_seconds:.2f} s")
    if stats.drafted and stats.rounds:
        share, per_round = stats.accepted / stats.drafted, stats.accepted / stats.rounds
        parts.append(f"drafts {100 * share:.0f} % ({per_round:.1f}/round)")
    return " · ".join(parts)


def long_stats_line(stats: RequestStats, used: int, context: int) -> str:
    """The same with the depth in use, on average, and the context used."""
    parts = [stats_line(stats)]
    if stats.drafted and stats.rounds:
        parts.append(f"depth {stats.drafted / stats.rounds:.1f}".removesuffix(".0"))
    parts.append(f"context {thousands(used)}/{thousands(context)}")
    return " · ".join(parts)


def thousands(number: int) -> str:
    """A number of tokens: 950, 1.9k, 128k."""
    if number < 1000:
        return str(number)
    return f"{number / 1024:.1f}k" if number < 10 * 1024 else f"{number // 1024}k"


def turns(number: int) -> str:
    """1 turn, 2 turns."""
    return f"{number} turn" if number == 1 else f"{number} turns"


def gigabytes(number: int) -> str:
    """Bytes as people buy them: 8.1 GB, 36 GB, 12 MB."""
    if number < 10**9:
        return f"{number / 10**6:.0f} MB"
    return f"{number / 10**9:.1f} GB" if number < 10**10 else f"{number / 10**9:.0f} GB"


def chart(stats: RequestStats) -> list[str]:
    """How often the draft at each position was kept, as bars; nothing without drafts."""
    lines = []
    for position, accepted in enumerate(stats.accepted_by_position, start=1):
        share = accepted / stats.rounds
        bar = "█" * round(share * _BAR)
        lines.append(f"draft {position}  {bar:<{_BAR}}  {100 * share:3.0f} %")
    return lines


def parked_note(why: str) -> str:
    """What to say where drafting does not pay."""
    return f"decoding plainly, as drafting does not pay here: {why}"


def idle_drafter(stats: RequestStats | RunStats, *, must_draft: bool) -> str | None:
    """A draft path that never runs, or in vain, looks like one that works, only slower: what to say
    of it.

    Args:
        must_draft: there is a drafter, and nobody and nothing decided for plain decoding.
    """
    if must_draft and stats.rounds >= FEW_ROUNDS and not stats.drafted:
        return "the drafter was loaded, but nothing was drafted."
    if stats.drafted >= FEW_DRAFTS and stats.accepted < 0.05 * stats.drafted:
        return (
            f"only {stats.accepted} of {stats.drafted} drafts were accepted: is this "
            "the model's own drafter? Without it the same text comes sooner."
        )
    return None
