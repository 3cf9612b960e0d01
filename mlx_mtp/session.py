"""A conversation whose K/V stay in memory. Owns: one kept row between turns, the turns through it,
what each of them prefilled, and leaving the row in order however a turn ends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from mlx_mtp.answer import Answer
from mlx_mtp.decode.engine import Engine
from mlx_mtp.decode.kept import KeptRow
from mlx_mtp.decode.policy import Depth, DepthPolicy
from mlx_mtp.errors import UsageError
from mlx_mtp.model.memory import MemoryBudget
from mlx_mtp.tokenizer import Tokenizer
from mlx_mtp.transcript import TOKEN_IDS, Transcript
from mlx_mtp.types import Chunk, Message, Request, SamplingParams


class Turn(NamedTuple):
    """What a turn found in the row.

    Attributes:
        prompt_tokens: ids of the conversation up to the answer.
        reused_tokens: of them, those whose K/V were in the row.
        prefilled_tokens: those that went through the target.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefilled_tokens: int = 0


class Session:
    """One conversation at a time, for one thread; made by `LLM.session`.

    The caller keeps the messages and gives all of them with every turn. What the row has in
    common with them stays; only the rest is prefilled. A rollback past what the sliding layers
    still hold goes to a copy of them, made at the start of a turn while memory allows, else to
    the beginning. No text depends on any of it.

    Args:
        tokenizer: the model's.
        budget: what copies must fit into.
        make_engine: an engine of one row that finds beginnings in a kept row.
        answering: makes answers for sampling parameters.
        depth_policy: what chooses the depth; raises UsageError.
        at_end: called after each turn.

    Attributes:
        turn: of the last turn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        budget: MemoryBudget | None,
        make_engine: Callable[[KeptRow], Engine],
        answering: Callable[[SamplingParams | None], Callable[[Request], Answer]],
        depth_policy: Callable[[Depth], DepthPolicy],
        at_end: Callable[[], None],
    ) -> None:
        self.turn = Turn()
        self._transcript = Transcript(tokenizer)
        self._kept = KeptRow(budget)
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._answering = answering
        self._depth_policy = depth_policy
        self._at_end = at_end
        self._running: Generator[Chunk] | None = None
        self._is_stopped = False
        self._text: list[str] = []
        self._ids: list[int] = []

    def count(self, messages: Sequence[Message], *, thinking: bool = False) -> int:
        """Tokens of a conversation up to the answer. Raises UsageError as `send`."""
        return len(self._transcript.render(messages, thinking=thinking).ids)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies of sliding layers that are kept for going back."""
        return self._kept.nbytes

    def send(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        draft_depth: Depth = "auto",
        thinking: bool = False,
    ) -> Generator[Chunk]:
        """Answer a conversation as it is produced; closing the iterator stops it.

        Args:
            messages: the whole conversation. Earlier replies as `reply` gave them are taken as
                the ids they were made of, as long as their text is the same.
            params, draft_depth, thinking: as in `LLM.stream`.

        Yields:
            Chunks, one per token; the last one carries finish_reason and stats.

        Raises:
            UsageError: the conversation or a parameter cannot be served.
            MlxMtpError: while streaming: no memory is left, or the model computes no numbers.
        """
        self.end_turn()
        rendered = self._transcript.render(messages, thinking=thinking)
        answer = self._answering(params)(Request(token_ids=list(rendered.ids)))
        if self._engine is None:
            self._engine = self._make_engine(self._kept)
        self._engine.depth = self._depth_policy(draft_depth)
        job_id = self._engine.add(answer.job)
        self._kept.mark(rendered.ids, (rendered.asked, rendered.lasting))
        self._text, self._ids, self._is_stopped = [], [], False
        self._running = self._run(self._engine, answer, job_id)
        return self._running

    def stop(self) -> None:
        """Have the turn end after its present round, as "cancelled". A signal handler may call
        it; nothing happens where no turn is under way."""
        self._is_stopped = True

    @property
    def has_reply(self) -> bool:
        """Whether the last turn gave out anything."""
        return bool(self._ids)

    def reply(self) -> Message:
        """The last turn's answer, as far as it was given out, as a message for the next turn."""
        ids = self._transcript.reply_ids(self._ids)
        return {"role": "assistant", "content": "".join(self._text), TOKEN_IDS: ids}

    def rewind(self, tokens: int) -> None:
        """Forget what the row holds past its first `tokens` tokens. There is no need to: a turn
        goes back by itself to where its conversation parts from the row's."""
        self.end_turn()
        if tokens < 0:
            raise UsageError(f"A session of {tokens} tokens.", "Give 0 or more.")
        self._kept.rewind(tokens)

    def close(self) -> None:
        """Give the memory back; the next turn would prefill everything."""
        self.end_turn()
        self._drop()

    def end_turn(self) -> None:
        """Stop the turn that is under way, if any, and leave what it has produced in the row."""
        running, self._running = self._running, None
        if running is not None:
            running.close()
        if self._engine is not None and self._engine.has_work:  # it was never begun
            for job_id in self._engine.waiting:
                self._engine.withdraw(job_id)

    def _run(self, engine: Engine, answer: Answer, job_id: int) -> Generator[Chunk]:
        ids, produced = answer.job.token_ids, list[int]()
        held, has_begun, is_over, in_order = self._kept.held(ids), False, False, True
        try:
            while engine.has_work:
                in_order = False
                if self._is_stopped:
                    engine.cancel(job_id)
                self._kept.protect(held, len(ids))
                everything = engine.step()
                for progress in everything:
                    if progress.error is not None:
                        raise progress.error
                    produced += progress.token_ids
                    is_over = progress.finish_reason is not None
                # The last token produced has no K/V yet.
                now = len(ids) + len(produced) - 1 if produced else engine.held(job_id)
                held, has_begun = now or held, has_begun or now > 0
                in_order = True
                for progress in everything:
                    for chunk in answer.advance(progress):
                        self._text.append(chunk.text)
                        self._ids += chunk.token_ids
                        yield chunk
        finally:
            if not in_order:
                self._drop()  # nobody knows what is in the row
            elif not is_over:
                engine.cancel(job_id)
                engine.step()
            if in_order and has_begun:
                self._kept.hold((*ids, *produced)[:held])
                found = self._kept.restored
                self.turn = Turn(len(ids), found, min(len(ids), held) - found)
            self._at_end()

    def _drop(self) -> None:
        self._engine = None
        self._kept.forget()
