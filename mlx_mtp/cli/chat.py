"""`mlx-mtp chat`: a conversation at the terminal, or one prompt and its answer. Owns: the options,
and which of the two it is.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_mtp.cli.console import Console
from mlx_mtp.cli.once import answer, leaves_stdin, read_prompt
from mlx_mtp.cli.options import (
    DEFAULT_MODEL,
    DEMONSTRATION,
    EXAMPLE_MODEL,
    INTERRUPTED,
    DebugFlag,
    DepthOption,
    DrafterOption,
    ExactFlag,
    JsonFlag,
    MaxTokensOption,
    MinPOption,
    ModelArgument,
    QuietFlag,
    SeedOption,
    StopOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    VerboseFlag,
    console_of,
    depth_choice,
    drafter_choice,
)
from mlx_mtp.errors import UsageError
from mlx_mtp.plain import printable

if TYPE_CHECKING:
    from mlx_mtp.chat.session import ChatSession
    from mlx_mtp.chat.settings import Settings
    from mlx_mtp.chat.store import Saved, Store
    from mlx_mtp.llm import LLM

CHAT_EXAMPLES = """Examples:

\b
  mlx-mtp chat google/gemma-4-E4B-it
  mlx-mtp chat --continue
  mlx-mtp chat -p "Multiplication table of 7."
  mlx-mtp chat google/gemma-4-E4B-it -p "Why is the sky blue?" --temperature 0
  mlx-mtp chat ./gemma-4-12B-it-4bit --max-tokens 500 -p - < question.txt
  mlx-mtp chat -p "A list of three fruits." --json | jq .stats
"""

PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        help="Answer this and leave; - reads it from stdin. [default: a conversation, or stdin "
        "where that is no terminal]",
    ),
]
ThinkingOption = Annotated[
    str,
    typer.Option(
        metavar="show|hide|off",
        help="Let the model think first and show it, hide it, or do not let it.",
    ),
]
ContinueFlag = Annotated[
    bool, typer.Option("--continue", "-c", help="Go on with the last conversation.")
]
ResumeOption = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Go on with this conversation. [default: a new one]"),
]
ListFlag = Annotated[bool, typer.Option("--list", help="List the saved conversations and leave.")]


def chat(
    context: typer.Context,
    model: ModelArgument = None,
    prompt: PromptOption = None,
    resume_last: ContinueFlag = False,
    resume: ResumeOption = None,
    list_all: ListFlag = False,
    drafter: DrafterOption = "auto",
    draft_depth: DepthOption = "auto",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    stop: StopOption = None,
    seed: SeedOption = None,
    thinking: ThinkingOption = "off",
    system: SystemOption = None,
    exact: ExactFlag = False,
    as_json: JsonFlag = False,
    verbose: VerboseFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Talk at the terminal, or answer one prompt.

    With -p, or where stdin is no terminal, the answer goes to stdout and everything else to stderr.
    Otherwise a conversation begins; /help says what can be typed.
    """
    console = console_of(context)
    console.start_logging()
    if list_all:
        _list(console)
        return
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "stop": tuple(stop or ()),
        "seed": seed,
        "draft_depth": depth_choice(draft_depth, exact=exact),
        "thinking": thinking,
    }
    settings = _settings({}, given)
    at_terminal = prompt is None and not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        from mlx_mtp.chat.store import Store

        store = Store()
        saved = _saved(store, resume_last, resume)
        _warn_of(store, console)
        if saved is not None:
            settings = _settings(saved.settings, given)
            source = context.get_parameter_source("model")
            is_typed = source is not None and source.name == "COMMANDLINE"
            model = model if is_typed else saved.model or model  # the environment names a default
        llm = _load(model, drafter, console, exact=exact)

        from mlx_mtp.chat.session import ChatSession

        raise typer.Exit(_converse(ChatSession(llm, store, settings, saved), system))
    if resume_last or resume is not None:
        raise UsageError(
            "A conversation goes on at a terminal only.",
            "Run it at a terminal without -p and --json, or leave --continue and --resume out.",
        )
    if leaves_stdin(prompt):
        console.note("note: stdin is not read, as -p gives the prompt; -p - reads it")
    first = [{"role": "system", "content": system}] if system else []
    messages = [*first, {"role": "user", "content": read_prompt(prompt)}]
    llm = _load(model, drafter, console, exact=exact)
    if not answer(llm, messages, settings, console, as_json=as_json):
        raise typer.Exit(INTERRUPTED)


def _settings(saved: dict[str, Any], given: dict[str, Any]) -> Settings:
    """Settings of a saved conversation under those of the command line."""
    from mlx_mtp.chat.settings import Settings, setting

    own = {name: value for name, value in given.items() if value != setting(name).default}
    return Settings.from_changed({**saved, **own})


def _saved(store: Store, resume_last: bool, resume: str | None) -> Saved | None:
    """The conversation to go on with. Raises UsageError: there is none."""
    if resume_last and resume is not None:
        raise UsageError("--continue and --resume exclude each other.", "Give one of them.")
    if resume is not None:
        return store.load(resume)
    return store.latest() if resume_last else None


def _load(model: str | None, drafter: str, console: Console, *, exact: bool) -> LLM:
    if not model:
        model = DEFAULT_MODEL
        console.note(DEMONSTRATION.format(command=f"chat {EXAMPLE_MODEL}"))

    from mlx_mtp import load

    llm = load(model, drafter=drafter_choice(drafter), exact=exact)
    for warning in llm.warnings:
        console.warn(warning)
    return llm


def _converse(session: ChatSession, system: str | None) -> int:
    """Hold a conversation; the exit code."""
    from mlx_mtp.chat.input import Reader
    from mlx_mtp.chat.render import Screen
    from mlx_mtp.chat.repl import Repl
    from mlx_mtp.chat.store import home

    if system:
        session.system = system
    saved_ids = session.store.latest_ids if session.store is not None else tuple
    reader = Reader(home() / "history", saved_ids=saved_ids)
    return Repl(session, Screen(sys.stdout), reader).run()


def _list(console: Console) -> None:
    from mlx_mtp.chat.figures import turns
    from mlx_mtp.chat.store import Store

    store = Store()
    found = store.all()
    for saved, written in found:
        said = turns(sum(message["role"] == "user" for message in saved.messages))
        shown = f"{written:%Y-%m-%d %H:%M}  {said:>9}  {saved.model}  {saved.title}"
        typer.echo(printable(f"{saved.id}  {shown}"))
    _warn_of(store, console)
    if not found:
        typer.echo("There is no conversation yet.", err=True)


def _warn_of(store: Store, console: Console) -> None:
    """Say which conversations were passed over."""
    for message in store.passed_over:
        console.warn(message)
