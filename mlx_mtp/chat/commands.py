"""What can be typed instead of a message. Owns: the commands, their help and what they do to the
conversation. Writes to the screen it is given; reads no keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal, NamedTuple

from mlx_mtp.chat.attach import as_text
from mlx_mtp.chat.figures import chart, gigabytes, long_stats_line, thousands, turns
from mlx_mtp.chat.paths import typed_path
from mlx_mtp.chat.render import Screen
from mlx_mtp.chat.session import ChatSession
from mlx_mtp.chat.settings import DEFAULT, SETTINGS, THINKING, setting
from mlx_mtp.chat.store import Store, save_copy
from mlx_mtp.errors import UsageError, nearest
from mlx_mtp.types import Chunk

NONE = "none"
Outcome = Generator[Chunk] | Literal["leave", "edit"] | None
"""A reply to show, leave, open the editor, or nothing more to do."""


class Command(NamedTuple):
    """One command.

    Attributes:
        usage: how it is written.
        help: what it does, one sentence.
        run: does it; the text is what follows the name.
    """

    name: str
    usage: str
    help: str
    run: Callable[[Commands, str], Outcome]


class Commands:
    """Carries out commands on a conversation.

    Args:
        chat: the conversation.
        screen: where results are said.
    """

    def __init__(self, chat: ChatSession, screen: Screen) -> None:
        self.chat = chat
        self.screen = screen
        self._copies: set[Path] = set()

    def run(self, line: str) -> Outcome:
        """Carry out a line that begins with a slash.

        Raises UsageError: there is no such command, or it cannot be done as asked.
        """
        name, *rest = line.split(maxsplit=1)
        return find(name).run(self, rest[0].strip() if rest else "")

    # The conversation.

    def _help(self, text: str) -> Outcome:
        for one in [find(f"/{text.lstrip('/')}")] if text else COMMANDS:
            self.screen.say(f"  {one.usage:<24} {one.help}")
        if text in ("set", "/set"):
            for item in SETTINGS:
                self.screen.say(f"    {item.name:<15} {item.valid}")
            self.screen.say(f"  {DEFAULT} takes a value back.")
        elif not text:
            self.screen.note("Alt-Enter begins a new line; so does Enter between two lines of")
            self.screen.note('""". Ctrl-C stops a reply, and what came of it stays.')
        return None

    def _clear(self, text: str) -> Outcome:
        is_saved = self.chat.save_error is None
        self.chat.clear()
        self.screen.note(f"A new conversation; the old one is {'' if is_saved else 'not '}saved.")
        return None

    def _system(self, text: str) -> Outcome:
        if text:
            self.chat.system = None if text == NONE else text
        self.screen.note(f"system: {self.chat.system or NONE}")
        return None

    def _regen(self, text: str) -> Outcome:
        return self.chat.regenerate()

    def _undo(self, text: str) -> Outcome:
        said = " ".join(self.chat.undo().split())
        self.screen.note(f"took back: {said[:60]}{'...' if len(said) > 60 else ''}")
        return None

    def _edit(self, text: str) -> Outcome:
        return "edit"

    def _file(self, text: str) -> Outcome:
        if not text:
            raise UsageError("/file needs a path.", "For example: /file notes.txt")
        if text == NONE:
            self.chat.attached = []
            self.screen.note("no file goes with your next message")
            return None
        path = typed_path(text)
        part = as_text(path)
        tokens, context = len(self.chat.llm.tokenizer.encode(part)), self.chat.llm.context
        if tokens > context:
            raise UsageError(
                f"{path.name} has {thousands(tokens)} tokens, and the context holds "
                f"{thousands(context)}.",
                "Take a part of it.",
            )
        self.chat.attached.append(part)
        self.screen.note(f"{path.name}: {thousands(tokens)} tokens go with your next message")
        return None

    def _compact(self, text: str) -> Outcome:
        return self.chat.compact()

    def _drop(self, text: str) -> Outcome:
        if not text.isascii() or not text.isdigit():
            raise UsageError("/drop needs a number of turns.", "For example: /drop 2")
        dropped = self.chat.drop(int(text))
        self.screen.note(f"left out the oldest {turns(dropped)}; {turns(self.chat.turns)} left")
        return None

    # Settings.

    def _set(self, text: str) -> Outcome:
        name, _, value = text.partition(" ")
        if value:
            self.chat.settings = self.chat.settings.with_value(name, value.strip())
            self.chat.save()
        for one in [setting(name)] if name else SETTINGS:
            self.screen.line(f"  {one.name:<15} {self._shown(one.name)}")
        return None

    def _shown(self, name: str) -> str:
        value = self.chat.settings.value(name)
        if value is None:
            if name == "seed":
                return "drawn for each reply"
            if name == "max_tokens":
                return "the context's rest"
            return f"{getattr(self.chat.llm.defaults, name)} (the model's own)"
        if isinstance(value, tuple):
            return " ".join(map(repr, value)) or "none"
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)

    def _think(self, text: str) -> Outcome:
        if not text:
            text = "off" if self.chat.settings.thinks else "show"
        self.chat.settings = self.chat.settings.with_value("thinking", text)
        self.chat.save()
        self.screen.note(f"thinking: {text}")
        return None

    # On the disk.

    def _save(self, text: str) -> Outcome:
        if text:
            path = typed_path(text)
            if os.path.lexists(path) and path.absolute() not in self._copies:
                raise UsageError(f"{path} is there already.", "Name another, or remove it first.")
            save_copy(self.chat.saved, path)
            self._copies.add(path.absolute())
            self.screen.note(f"saved to {path}")
            return None
        self.chat.save()
        if self.chat.save_error is not None:
            raise self.chat.save_error
        if self.chat.store is None or not self.chat.turns:
            self.screen.note("there is nothing to save yet")
        else:
            self.screen.note(f"saved as {self.chat.saved.id}, as always")
        return None

    def _load(self, text: str) -> Outcome:
        if not text:
            raise UsageError("/load needs a name or a file.", "See `mlx-mtp chat --list`.")
        self.chat.save()
        saved = (self.chat.store or Store()).load(text)
        self.chat.take_up(saved)
        self.screen.note(f"{saved.id}: {turns(self.chat.turns)}, {saved.title}")
        if self.chat.other_model:
            self.screen.note(f"[held with {self.chat.other_model} so far]")
        return None

    # Figures.

    def _stats(self, text: str) -> Outcome:
        chat, stats = self.chat, self.chat.stats
        if not stats.tokens:
            self.screen.note("no reply yet")
            return None
        self.screen.say("  " + long_stats_line(stats, chat.used, chat.llm.context))
        self.screen.say(
            f"  prompt {stats.prompt_tokens} tok, {chat.prefilled} of them new · "
            f"prefill {stats.prefill_seconds:.2f} s · {stats.rounds} rounds"
        )
        if lines := chart(stats):
            self.screen.line("  kept, in % of rounds:")
        for line in lines:
            self.screen.line(f"  {line}")
        if chat.llm.parked:
            self.screen.say(f"  decoding plainly at present: {chat.llm.parked}")
        run = chat.llm.run_stats
        self.screen.say(
            f"  since the start: {run.tokens} tok · {run.prefill_tokens} prefilled · "
            f"{run.shared_tokens} found in memory · peak {gigabytes(run.peak_bytes)}"
        )
        return None

    def _model(self, text: str) -> Outcome:
        llm = self.chat.llm
        config, memory = llm.target.config, llm.memory
        self.screen.say(
            f"  target   {llm.model_name}: {config.family}, {config.num_layers} layers, "
            f"{bits(config.quantization, str(llm.target.dtype))}"
        )
        self.screen.line(f"           {llm.path}")
        drafter = llm.drafter
        if drafter is None:
            self.screen.line("  drafter  none")
        else:
            own = drafter.config
            self.screen.say(
                f"  drafter  {llm.drafter_name}: {own.num_layers} layers, "
                f"{bits(own.quantization, str(llm.target.dtype))}"
            )
        self.screen.say(
            f"  memory   weights {gigabytes(memory.weights)} of {gigabytes(memory.limit)}; "
            f"context {thousands(llm.context)}, {gigabytes(memory.kv.total(1, llm.context))} full"
        )
        return None

    def _exit(self, text: str) -> Outcome:
        return "leave"


def bits(quantization: dict[str, object] | None, dtype: str) -> str:
    """How weights are stored, in words."""
    if not quantization:
        return dtype.removeprefix("mlx.core.")
    return f"{quantization.get('bits', '?')} bits in groups of {quantization.get('group_size')}"


COMMANDS = (
    Command("/help", "/help [COMMAND]", "Say what can be typed.", Commands._help),
    Command("/clear", "/clear", "Begin a new conversation.", Commands._clear),
    Command("/system", "/system [TEXT|none]", "Set or show the system prompt.", Commands._system),
    Command("/set", "/set [NAME [VALUE]]", "Set or show how replies are made.", Commands._set),
    Command("/think", "/think [show|hide|off]", "Let the model think first.", Commands._think),
    Command("/regen", "/regen", "Another reply to the last message.", Commands._regen),
    Command("/undo", "/undo", "Take the last turn back.", Commands._undo),
    Command("/edit", "/edit", "Write a message in $EDITOR.", Commands._edit),
    Command("/file", "/file PATH|none", "Put a file's text into the next message.", Commands._file),
    Command("/compact", "/compact", "Let a summary stand for what was said.", Commands._compact),
    Command("/drop", "/drop N", "Leave out the N oldest turns.", Commands._drop),
    Command("/save", "/save [PATH]", "Save a copy, as Markdown if it is .md.", Commands._save),
    Command("/load", "/load ID|PATH", "Take up a saved conversation.", Commands._load),
    Command("/stats", "/stats", "Figures of the last reply.", Commands._stats),
    Command("/model", "/model", "The pair, its sizes and memory.", Commands._model),
    Command("/exit", "/exit", "Leave; so does Ctrl-D.", Commands._exit),
)
_ALIASES = {"/quit": "/exit", "/bye": "/exit", "/?": "/help"}


def find(name: str) -> Command:
    """A command by its name. Raises UsageError that names the nearest."""
    name = _ALIASES.get(name, name)
    known = {command.name: command for command in COMMANDS}
    if name in known:
        return known[name]
    near = nearest(name, known)
    hint = f"Did you mean {near}?" if near else "/help lists them."
    raise UsageError(f"There is no command {name}.", f'{hint} Between two """ it is a message.')


def completions(line: str) -> list[str]:
    """What the last word of a command line may become."""
    words = line.split(" ")
    if len(words) == 1:
        return [one.name for one in COMMANDS if one.name.startswith(line)]
    choices: tuple[str, ...] = ()
    if words[0] == "/set" and len(words) == 2:
        choices = tuple(one.name for one in SETTINGS)
    elif words[0] == "/help":
        choices = tuple(one.name for one in COMMANDS)
    elif words[0] == "/think":
        choices = THINKING
    return [choice for choice in choices if choice.startswith(words[-1])]
