"""Text to token ids and back. Owns: the chat template, the streaming detokenizer, the split of
thinking from the answer, and stop strings. Knows nothing of arrays, requests or models.

The tokenizer and the detokenizers are mlx-lm's; what is ours is what happens around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError
from jinja2.exceptions import SecurityError
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    StreamingDetokenizer,
    TokenizerWrapper,
)
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlx_mtp.errors import ModelNotFoundError, UsageError
from mlx_mtp.files import read_optional_json
from mlx_mtp.literal import (
    CHANNEL_END,
    CHANNEL_START,
    TOOL_MARKERS,
    ControlTokens,
    is_control,
)
from mlx_mtp.messages import checked_messages
from mlx_mtp.types import Message

_LONGEST = 300
"""Characters of another program's message that are passed on."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


class TextDelta(NamedTuple):
    """What a stream grew by.

    Attributes:
        text: new text of the answer.
        thinking: new text of the thinking channel.
        stopped: a stop string was found; the answer ends before it and nothing follows.
    """

    text: str = ""
    thinking: str = ""
    stopped: bool = False


class Tokenizer:
    """A model's tokenizer and chat template. Immutable; streams keep their own state.

    Attributes:
        vocab_size: ids of the tokenizer; the model's own vocabulary may be padded beyond it.
        eos_token_ids: the ids given to `load` and the tokenizer's own.
        channel_start, channel_end: ids that open and close the thinking channel, or None.
    """

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self._wrapper: Any = wrapper
        self.vocab_size = len(wrapper)
        self.eos_token_ids = frozenset(self._wrapper.eos_token_ids)
        vocab: dict[str, int] = self._wrapper.get_vocab()
        self.channel_start = vocab.get(CHANNEL_START)
        self.channel_end = vocab.get(CHANNEL_END)
        added = self._wrapper.added_tokens_decoder
        special = set(self._wrapper.all_special_ids)
        special.update(token_id for token_id, token in added.items() if token.special)
        special.update({self.channel_start, self.channel_end} - {None})
        # Tool markers stay in the text: without them a caller could not parse a tool call.
        self._hidden = frozenset(special.difference(vocab.get(text) for text in TOOL_MARKERS))
        control = {text for text, token_id in vocab.items() if token_id in special}
        control.update(token.content for token in added.values() if is_control(token.content))
        self._control = ControlTokens(control)
        self._held_space = vocab.get("Ġ")

    @classmethod
    def load(cls, path: str | Path, eos_token_ids: Sequence[int] | None = None) -> Tokenizer:
        """Load from a model folder; never from the network, and no code of the checkpoint's runs.

        Raises:
            ModelNotFoundError: the folder has no tokenizer, or it cannot be read.
        """
        folder = Path(path)
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelNotFoundError(
                f"There is no tokenizer in {folder}.",
                "Take tokenizer.json and tokenizer_config.json from the original checkpoint.",
            )
        read_optional_json(folder / "tokenizer_config.json")
        try:
            ids = None if eos_token_ids is None else list(eos_token_ids)
            # where nothing is said, transformers asks at the terminal whether code may run
            return cls(load_tokenizer(folder, {"trust_remote_code": False}, ids))
        except BaseException as error:  # transformers raises all kinds, tokenizers' Rust panics
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            if "trust_remote_code" in str(error):
                raise ModelNotFoundError(
                    f"The tokenizer in {folder} needs Python code that comes with it, and no "
                    "code of a model is ever run.",
                    "Use a checkpoint whose tokenizer_config.json has no auto_map.",
                ) from error
            raise ModelNotFoundError(
                f"The tokenizer in {folder} cannot be read: {_first_line(error)}.",
                "Take the tokenizer files and config.json from the original checkpoint.",
            ) from error

    def encode(self, text: str) -> list[int]:
        """The ids of a text alone: no BOS is added. Raises UsageError if it is not Unicode."""
        try:
            # verbose=False: what is too long is the engine's to say, in its own words
            return list(self._wrapper.encode(text, add_special_tokens=False, verbose=False))
        except (TypeError, UnicodeEncodeError) as error:
            raise UsageError(
                "The text has characters that are not valid Unicode.", "Give UTF-8 text."
            ) from error

    def encode_chat(self, messages: Sequence[Message], *, thinking: bool = False) -> list[int]:
        """The ids of a conversation up to where the model answers. Raises as `render_chat`."""
        return self.encode_rendered(self.render_chat(messages, thinking=thinking))

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of what `render_chat` wrote, or of a part of it."""
        # The template writes <bos> itself, so `encode` must not add another.
        return [token for piece in self._control.pieces(text) for token in self.encode(piece)]

    def render_chat(self, messages: Sequence[Message], *, thinking: bool = False) -> str:
        """The same as text, for `encode_rendered`: control tokens in what was said are cut apart.

        The template is a program of the checkpoint's author. Jinja's sandbox keeps it from files,
        the network and Python's internals, but not from taking long; Ctrl-C ends it.

        Raises:
            UsageError: there is no chat template, or the conversation does not fit it.
            ModelNotFoundError: the template is damaged.
        """
        if not self._wrapper.has_chat_template:
            raise UsageError(
                "This model has no chat template.",
                "Use the instruction-tuned model (its name ends in -it), or give token ids.",
            )
        checked = [self._control.cut(message) for message in checked_messages(messages)]
        try:
            text: str = self._wrapper.apply_chat_template(
                checked, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
            )
        except TemplateSyntaxError as error:
            where = f"is damaged at line {error.lineno}"
            raise _bad_template(f"{where}: {_first_line(error)}") from error
        except SecurityError as error:
            raise _bad_template(f"does what none may do: {_first_line(error)}") from error
        except Exception as error:
            raise UsageError(
                f"The model's chat template refuses this conversation: {_first_line(error)}.",
                "Check the roles, their order and the contents, or the template itself.",
            ) from error
        if not text:
            raise _bad_template("writes nothing")
        return text

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids as a stream without stop strings shows it, channels not split off."""
        shown = [token_id for token_id in ids if self.is_visible(token_id)]
        text: str = self._wrapper.decode(shown, clean_up_tokenization_spaces=False)
        return text

    def is_visible(self, token_id: int) -> bool:
        """Whether an id has text: it is not special and not past the tokenizer's vocabulary."""
        return 0 <= token_id < self.vocab_size and token_id not in self._hidden

    def detokenizer(self) -> Detokenizer:
        """A fresh detokenizer; it shares the token table of the others."""
        return Detokenizer(self._wrapper.detokenizer, self._held_space)


class Detokenizer:
    """mlx-lm's streaming detokenizer as "id in, new text out", without what would lose or delay
    text and without its growing text buffer.

    In mlx-lm 0.32 the byte-level class drops one leading space of a text and holds back a token
    that is a single space until the next one comes; both are there to mimic a clean-up that
    Gemma's decoders do not do. It also shows NUL bytes as U+0100, which we leave.
    """

    def __init__(self, inner: StreamingDetokenizer, space_id: int | None) -> None:
        self._inner: Any = inner  # mlx-lm says py.typed, but its methods have no annotations
        self._is_byte_level = isinstance(inner, BPEStreamingDetokenizer)
        # These two classes give out all they hold or nothing, so what was given out can go.
        self._can_forget = isinstance(inner, BPEStreamingDetokenizer | SPMStreamingDetokenizer)
        self._space_id = space_id if self._is_byte_level else None
        self._begin()

    def _begin(self) -> None:
        self._inner.reset()
        if self._is_byte_level:
            # A leading space is dropped while `text` is empty: let it not be empty.
            self._inner.text = "\n"
            self._inner.offset = 1

    def add(self, token_id: int) -> str:
        """New complete text. The id must be in the vocabulary."""
        self._inner.add_token(token_id)
        if token_id == self._space_id:
            self._inner.finalize()  # a space ends any character, so nothing is cut in two
        return self._take()

    def flush(self) -> str:
        """The rest, an incomplete character as U+FFFD; begins a new text."""
        self._inner.finalize()
        rest = self._take()
        self._begin()
        return rest

    def _take(self) -> str:
        new: str = self._inner.last_segment
        if new and self._can_forget:
            # mlx-lm copies the whole text at each token; the last character is enough for it to
            # know that the text has begun.
            self._inner.tokens.clear()
            self._inner.text = new[-1]
            self._inner.offset = 1
        return new


class TextStream:
    """The text of one request, token by token.

    Args:
        tokenizer: the model's.
        stop: strings that end the answer. The first one to be complete wins, among those that end
            together the one that begins first. They are not looked for in the thinking.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stop = tuple(stop)
        self._held = ""
        self._in_channel = False
        self._in_channel_name = False
        self._stopped = False

    def add(self, token_id: int) -> TextDelta:
        """What one more id adds. After a stop nothing is added any more."""
        if self._stopped:
            return TextDelta(stopped=True)
        if token_id == self._tokenizer.channel_start:
            return self._switch_channel(True)
        if token_id == self._tokenizer.channel_end and self._in_channel:
            return self._switch_channel(False)
        if not self._tokenizer.is_visible(token_id):
            return TextDelta()
        return self._route(self._detokenizer.add(token_id))

    def finish(self) -> TextDelta:
        """What was held back: the beginning of a stop string, an incomplete character."""
        if self._stopped:
            return TextDelta(stopped=True)
        delta = self._route(self._detokenizer.flush())
        if delta.stopped:
            return delta
        held, self._held = self._held, ""
        return TextDelta(delta.text + held, delta.thinking)

    def _switch_channel(self, into: bool) -> TextDelta:
        delta = self._route(self._detokenizer.flush())
        self._in_channel = self._in_channel_name = into
        return delta

    def _route(self, new: str) -> TextDelta:
        if not new:
            return TextDelta()
        if not self._in_channel:
            return self._answer(new)
        if self._in_channel_name:
            _, newline, new = new.partition("\n")
            self._in_channel_name = not newline
        return TextDelta(thinking=new)

    def _answer(self, new: str) -> TextDelta:
        text = self._held + new
        found = [
            (start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0
        ]
        if found:
            self._stopped, self._held = True, ""
            return TextDelta(text[: min(found)[1]], stopped=True)
        keep = self._stop_begun(text)
        self._held = text[len(text) - keep :]
        return TextDelta(text[: len(text) - keep])

    def _stop_begun(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


def _bad_template(what: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"The model's chat template {what}.",
        "Take chat_template.jinja from the original checkpoint.",
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, KeyError):  # it says no more than the key
        lines = [f"{lines[0]} is missing"]
    if isinstance(error, MemoryError):
        lines = ["it needs more memory than there is"]
    if isinstance(error, RecursionError):
        lines = ["it calls itself without end"]
    return lines[0][:_LONGEST].rstrip(".: ")
