"""The slot cache against a naive model, through everything that an engine does with rows.

The model is a list per row: which token was committed at each position. Every token ever written
has a number of its own, which its V tells; its K tells whose it is and where. So a slot that is
seen and should not be says whose it was, and when.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_mtp.config_json import FULL, SLIDING
from mlx_mtp.model.attention import Seen
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.snapshot import Snapshot
from mlx_mtp.model.span import PREFILL_CHUNK, SPARE_SLOTS, Span, round_up
from mlx_mtp.pair import TargetConfig

WINDOWS = (20, 256)
"""The ring of the second holds window + chunk tokens and no slot more."""
MAX_ROWS = 5
LONGEST = 1400
"""Tokens of a row: its ring of 512 slots wraps twice."""
PER_REQUEST = 2000
"""K of a token: its position + PER_REQUEST * its request, exact in fp32."""
HEADS = 2

chunks = st.integers(1, PREFILL_CHUNK) | st.just(PREFILL_CHUNK)


def config_of(window: int) -> TargetConfig:
    """Four layers that own K/V, two of each type, and two that share them."""
    return TargetConfig.from_dict(
        {
            "model_type": "gemma4_text",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": [SLIDING, FULL] * 3,
            "num_attention_heads": 2,
            "num_key_value_heads": HEADS,
            "head_dim": 2,
            "global_head_dim": 4,
            "hidden_size_per_layer_input": 0,
            "sliding_window": window,
            "vocab_size": 16,
            "max_position_embeddings": 4096,
        }
    )


@dataclass(eq=False)
class Text:
    """A row as the naive model knows it.

    Attributes:
        name: of its request.
        row: where it stands in the buffers.
        tokens: the number of the token at each committed position.
        top: no position from here on was ever written into its rings.
    """

    name: int
    row: int
    tokens: list[int]
    top: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Kept:
    """A snapshot, and what the row held when it was taken."""

    text: Text
    of: Text
    snapshot: Snapshot


class Rows(RuleBasedStateMachine):
    """Rows of requests, driven at random; `live` are in rows 0..n, `filling` behind them."""

    @initialize(window=st.sampled_from(WINDOWS), rows=st.integers(1, 3))
    def begin(self, window: int, rows: int) -> None:
        self.config = config_of(window)
        self.cache = SlotCache(self.config, rows, mx.float32)
        self.live: list[Text] = []
        self.filling: list[Text] = []
        self.kept: list[Kept] = []
        self.rings: list[Kept] = []
        self.names = 0
        self.k_of = np.zeros(1)  # of each token, by its number; number 0 is no token
        self.copies = self.bytes = 0

    # What is in the rows.

    @property
    def texts(self) -> list[Text]:
        return [*self.live, *self.filling]

    @property
    def occupied(self) -> int:
        return max((text.row + 1 for text in self.texts), default=0)

    @property
    def has_room(self) -> bool:
        return self.occupied < MAX_ROWS

    def new_row(self, tokens: Sequence[int] = (), top: int = 0) -> Text:
        if self.occupied == self.cache.rows:
            self.resize(self.occupied + 1, self.cache.capacity)
        self.names += 1
        text = Text(self.names, self.occupied, [*tokens], top)
        self.filling.append(text)
        return text

    def put(
        self, texts: Sequence[Text], counts: Sequence[int], apart: bool = False
    ) -> list[list[int]]:
        """Write tokens of neighbouring rows, padded to the longest; their numbers. Commits none."""
        length, starts = max(counts), [text.length for text in texts]
        span = self.span(texts, length, counts if min(counts) < length else None, apart)
        numbers = np.arange(len(texts) * length).reshape(len(texts), length) + len(self.k_of)
        names = np.array([text.name for text in texts])[:, None] * PER_REQUEST
        k = names + np.array(starts)[:, None] + np.arange(length)
        self.k_of = np.concatenate([self.k_of, k.ravel()])
        sign = np.array([1, -1])[:, None, None]
        for layer in range(self.config.num_kv_layers):
            shape = (len(texts), HEADS, length, self.config.kv_head_dim(layer))
            v = numbers * 8 + layer
            keys, values = (
                mx.array(np.broadcast_to(x[:, None, :, None] * sign, shape).astype(np.float32))
                for x in (k, v)
            )
            self.cache.write(layer, span, keys, values)
        mx.eval(self.cache.keys, self.cache.values)
        self.check_target(span, texts, starts, counts, numbers.tolist())
        places = [start + count - 1 for start, count in zip(starts, counts, strict=True)]
        last = span.last()
        assert last.starts.tolist() == places
        self.check_target(last, texts, places, [1] * len(texts), numbers.tolist())
        for text in texts:
            text.top = max(text.top, text.length + length)
        return numbers.tolist()

    def span(
        self,
        texts: Sequence[Text],
        length: int,
        ends: Sequence[int] | None = None,
        apart: bool = False,
    ) -> Span:
        starts, before = [text.length for text in texts], self.sizes()
        span = self.cache.span(
            texts[0].row, mx.array(starts, mx.int32), length, starts, ends, apart=apart
        )
        self.count_resize(before)
        return span

    # Copies: what may be copied, and nothing else.

    def sizes(self) -> tuple[int, list[mx.array]]:
        return self.cache.rows, [*self.cache.keys, *self.cache.values]

    def count_resize(self, before: tuple[int, list[mx.array]]) -> None:
        rows, old = before
        kept = min(rows, self.cache.rows)
        grown = [
            (one, other)
            for one, other in zip(old, self.sizes()[1], strict=True)
            if one.shape != other.shape
        ]
        self.bytes += sum(
            kept * HEADS * min(one.shape[2], other.shape[2]) * one.shape[3] * 4
            for one, other in grown
        )
        self.copies += kept if grown else 0

    def resize(self, rows: int, slots: int) -> None:
        if (rows, round_up(slots)) != (self.cache.rows, self.cache.capacity):
            before = self.sizes()
            self.cache.resize(rows, slots)
            self.count_resize(before)

    def move(self, text: Text, row: int) -> None:
        if text.row != row:
            self.cache.move(text.row, row)
            self.copies += 1
            self.bytes += sum(buffer[0].nbytes for buffer in self.sizes()[1])
        text.row = row

    # The rules.

    @precondition(lambda self: self.has_room)
    @rule(count=chunks)
    def add(self, count: int) -> None:
        self.extend(self.new_row(), [count])

    @precondition(lambda self: self.filling)
    @rule(which=st.integers(0, MAX_ROWS), counts=st.lists(chunks, min_size=1, max_size=4))
    def fill(self, which: int, counts: list[int]) -> None:
        self.extend(self.filling[which % len(self.filling)], counts)

    def extend(self, text: Text, counts: Sequence[int]) -> None:
        for count in counts:
            if text.length + count <= LONGEST:
                text.tokens += self.put([text], [count])[0]

    @precondition(lambda self: self.occupied + 1 < MAX_ROWS)
    @rule(counts=st.lists(chunks, min_size=2, max_size=4))
    def add_several(self, counts: list[int]) -> None:
        """Short prompts that are put through the target together, padded to the longest."""
        counts = counts[: MAX_ROWS - self.occupied]
        texts = [self.new_row() for _ in counts]
        for text, count, numbers in zip(texts, counts, self.put(texts, counts), strict=True):
            text.tokens += numbers[:count]

    @precondition(lambda self: self.filling)
    @rule()
    def join(self) -> None:
        text = min(self.filling, key=lambda text: text.row)
        self.filling.remove(text)
        self.move(text, len(self.live))
        self.live.append(text)

    @precondition(lambda self: self.live)
    @rule(
        length=st.integers(1, SPARE_SLOTS),
        accepted=st.lists(st.integers(1, SPARE_SLOTS), min_size=15),
        apart=st.booleans(),
    )
    def verify(self, length: int, accepted: list[int], apart: bool) -> None:
        """Three rounds; each row keeps its own number of the tokens written."""
        for first in (0, 5, 10):
            if max(text.length for text in self.live) + length > LONGEST:
                return
            written = self.put(self.live, [length] * len(self.live), apart)
            for text, numbers, count in zip(self.live, written, accepted[first:], strict=False):
                text.tokens += numbers[: (count - 1) % length + 1]

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, MAX_ROWS))
    def leave(self, which: int) -> None:
        gone = self.live[which % len(self.live)]
        last = self.live.pop()
        if gone is not last:
            self.move(last, gone.row)
            self.live[gone.row] = last

    @precondition(lambda self: self.filling)
    @rule(which=st.integers(0, MAX_ROWS))
    def drop(self, which: int) -> None:
        self.filling.pop(which % len(self.filling))

    @precondition(lambda self: self.texts)
    @rule(which=st.integers(0, MAX_ROWS), rings_only=st.booleans())
    def keep(self, which: int, rings_only: bool) -> None:
        text = self.texts[which % len(self.texts)]
        length = 0 if rings_only else text.length
        snapshot = Snapshot.take(self.cache, text.row, length)
        kept = Kept(replace(text, tokens=[*text.tokens]), text, snapshot)
        (self.rings if rings_only else self.kept).append(kept)
        self.copies += 1
        self.bytes += snapshot.nbytes

    @precondition(lambda self: self.kept and self.has_room)
    @rule(which=st.integers(0, 99))
    def restore(self, which: int) -> None:
        """A new request begins with what another one held."""
        kept = self.kept[which % len(self.kept)]
        text = self.new_row(kept.text.tokens, kept.text.top)
        if self.cache.capacity < text.length:
            self.resize(self.cache.rows, text.length)
        self.put_back(kept.snapshot, text)

    def put_back(self, snapshot: Snapshot, text: Text) -> None:
        snapshot.restore(self.cache, text.row)
        self.copies += 1
        self.bytes += snapshot.nbytes

    @precondition(lambda self: self.texts)
    @rule(which=st.integers(0, MAX_ROWS), back=st.integers(1, 600), place=st.integers(0, 99))
    def rewind(self, which: int, back: int, place: int) -> None:
        """Forget the last tokens, as far as the rings, or a copy of them, still reach."""
        text = self.texts[which % len(self.texts)]
        length = max(1, text.length - back)
        slack = self.cache.ring - self.cache.window - 1
        if text.top - length > slack:
            reaching = [
                kept
                for kept in self.rings
                if kept.of is text
                and kept.text.tokens[:length] == text.tokens[:length]
                and kept.text.top - length <= slack
            ]
            if not reaching:
                return
            kept = reaching[place % len(reaching)]
            length = min(length, kept.text.length)
            self.put_back(kept.snapshot, text)
            text.top = kept.text.top
        text.tokens = text.tokens[:length]

    @rule(slots=st.integers(0, 2500))
    def grow(self, slots: int) -> None:
        before = self.sizes()
        self.cache.reserve(slots)
        self.count_resize(before)

    @rule(rows=st.integers(1, MAX_ROWS), slots=st.integers(0, 1000))
    def change_size(self, rows: int, slots: int) -> None:
        """Also to fewer rows and slots, down to what is used."""
        used = max((text.length for text in self.texts), default=0) + SPARE_SLOTS
        self.resize(max(rows, self.occupied), max(slots, used))

    # What must be seen.

    @invariant()
    def all_rows_see_their_own_tokens(self) -> None:
        """What a next token would see, of each row; the drafter's queries of the live ones."""
        for text in self.texts:
            self.check_target(self.span([text], 1), [text], [text.length], [1], None)
        if self.live:
            lengths = [text.length for text in self.live]
            self.check_drafter(lengths)
            self.check_drafter([length + SPARE_SLOTS for length in lengths])

    @invariant()
    def nothing_else_is_copied(self) -> None:
        assert (self.cache.row_copies, self.cache.bytes_copied) == (self.copies, self.bytes)

    def check_target(
        self,
        span: Span,
        texts: Sequence[Text],
        starts: Sequence[int],
        counts: Sequence[int],
        written: list[list[int]] | None,
    ) -> None:
        """Each query sees its own text up to itself, on sliding layers the window's newest.

        Args:
            starts: position of each row's first query.
            counts: queries of each row that count.
            written: numbers of the tokens just written; None: of the query there are no K/V yet.
        """
        for layer in range(self.config.num_layers):
            owner = self.config.kv_source(layer)
            kind = self.config.layer_types[layer]
            window = self.config.sliding_window if kind == SLIDING else 1 << 30
            parts = by_row(self.cache.seen_by_target(owner, span))
            for row, (text, (keys, values, mask)) in enumerate(zip(texts, parts, strict=True)):
                new = [] if written is None else written[row]
                held = self.positions(owner, keys, values, [*text.tokens, *new])
                query = starts[row] + np.arange(counts[row])[:, None]
                if written is None:
                    held[span.targets[kind][row, 0].item()] = query.item()
                wanted = (held >= 0) & (held <= query) & (held > query - window)
                assert np.array_equal(mask[: counts[row]], wanted)
                assert np.array_equal(wanted.sum(1), np.minimum(query[:, 0] + 1, window))

    def check_drafter(self, most: Sequence[int]) -> None:
        """The drafter sees the committed prefix, on sliding layers its newest W + 1 tokens.

        Args:
            most: at least the committed lengths, as far as the host knows them.
        """
        lengths = mx.array([text.length for text in self.live], mx.int32)
        seen = self.cache.seen_by_drafter(lengths, self.cache.runs_committed(most))
        for kind, parts in seen.items():
            owner = 2 if kind == SLIDING else 3
            window = self.config.sliding_window + 1 if kind == SLIDING else 1 << 30
            for text, (keys, values, mask) in zip(self.live, by_row(parts), strict=True):
                held = self.positions(owner, keys, values, text.tokens)
                wanted = (held >= 0) & (held >= text.length - window)
                assert np.array_equal(mask[0], wanted)
                assert wanted.sum() == min(text.length, window)

    def positions(
        self, layer: int, keys: np.ndarray, values: np.ndarray, tokens: Sequence[int]
    ) -> np.ndarray:
        """[S]: which position of a text each slot holds; -1: none of it.

        Args:
            keys, values: [heads, S, head_dim]
            tokens: numbers of the text's tokens.
        """
        numbers = (values[0, :, 0] // 8).astype(int)
        place = np.full(len(self.k_of), -1)
        place[list(tokens)] = np.arange(len(tokens))
        held = place[numbers]
        for head, sign in ((0, 1), (1, -1)):
            v, k = numbers[:, None] * 8 + layer, self.k_of[numbers][:, None]
            assert np.all((keys[head] == sign * k) | (held < 0)[:, None])
            assert np.all((values[head] == sign * v) | (held < 0)[:, None])
        return held


def by_row(parts: list[Seen]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each row the K and V of its slots [heads, S, head_dim], and who may see them [L, S]."""
    for keys, values, mask in parts:
        visible = np.array(mask.folded)[:, 0, 0]
        yield from zip(np.array(keys), np.array(values), visible, strict=True)


def lasting(examples: int, steps: int) -> settings:
    return settings(
        deadline=None,
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=[HealthCheck.too_slow],
    )


class TestRows(Rows.TestCase):
    settings = lasting(10, 40)


@pytest.mark.slow
class TestRowsForLong(Rows.TestCase):
    settings = lasting(150, 60)
