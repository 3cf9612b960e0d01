"""The entry point. Owns: the commands' names, and how every way to end becomes an exit code.

Exit codes: 0 done; 1 unexpected; 2 usage; 3 model not found or gated; 4 incompatible; 5 not enough
memory or disk; 6 some rows of a batch failed; 7 verification failed; 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from mlx_mtp import __version__
from mlx_mtp.cli.batch import BATCH_EXAMPLES, batch
from mlx_mtp.cli.bench import BENCH_EXAMPLES, bench
from mlx_mtp.cli.chat import CHAT_EXAMPLES, chat
from mlx_mtp.cli.console import Console
from mlx_mtp.cli.convert import CONVERT_EXAMPLES, convert
from mlx_mtp.cli.info import INFO_EXAMPLES, info
from mlx_mtp.cli.options import INTERRUPTED, DebugFlag, QuietFlag, VerboseFlag
from mlx_mtp.cli.usage import usage_hint, usage_sentence
from mlx_mtp.cli.verify import VERIFY_EXAMPLES, verify
from mlx_mtp.errors import MlxMtpError, ResourceError

UNEXPECTED = 1

EXAMPLES = """Examples:

\b
  mlx-mtp chat
  mlx-mtp chat -p "Multiplication table of 7."
  mlx-mtp chat google/gemma-4-E4B-it -p "Why is the sky blue?"
  mlx-mtp batch prompts.jsonl -o answers.jsonl --model google/gemma-4-E4B-it
  mlx-mtp bench google/gemma-4-E4B-it --quick
  mlx-mtp verify google/gemma-4-E4B-it
  mlx-mtp convert google/gemma-4-E4B-it -o gemma-4-E4B-it-4bit
  mlx-mtp info google/gemma-4-E4B-it

\b
Environment:
  MLX_MTP_MODEL, MLX_MTP_DRAFTER   defaults of MODEL and --drafter
  HF_HOME, HF_TOKEN, HF_HUB_OFFLINE   as everywhere on the hub
  MLX_MTP_CACHE   folder of what is learned about this machine
  MLX_MTP_HOME   folder of conversations and of what was typed
  NO_COLOR   plain text

\b
Exit codes:
  0 done, 1 unexpected, 2 usage, 3 model not found or gated, 4 incompatible,
  5 not enough memory or disk, 6 some rows of a batch failed,
  7 verification failed, 130 interrupted
"""

# Plain help: it reads the same in a terminal, a pipe and the README.
app = typer.Typer(name="mlx-mtp", rich_markup_mode=None, pretty_exceptions_enable=False)
app.command(epilog=CHAT_EXAMPLES)(chat)
app.command(epilog=BATCH_EXAMPLES)(batch)
app.command(epilog=BENCH_EXAMPLES)(bench)
app.command(epilog=VERIFY_EXAMPLES)(verify)
app.command(epilog=CONVERT_EXAMPLES)(convert)
app.command(epilog=INFO_EXAMPLES)(info)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlx-mtp {__version__}")
        raise typer.Exit


VersionFlag = Annotated[
    bool,
    typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
]


@app.callback(epilog=EXAMPLES)
def _root(
    version: VersionFlag = False,
    verbose: VerboseFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Run Gemma 4 with its Multi-Token-Prediction drafter on Apple's MLX."""


def main() -> None:
    """Run the command line of this process."""
    _mend_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _terminate)
    code = run(sys.argv[1:])
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done: there is nothing to tidy up
    sys.exit(code)


def _terminate(number: int, _: object) -> None:
    """Leave as shells expect it of a terminated program, but tidy up what is under way first."""
    sys.exit(128 + number)


def _mend_streams() -> None:
    """Open what the caller closed, or MLX would get the number of stdin for a weight file, which
    it takes for a failure; let stdout show what its encoding lacks as a question mark."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; prints what went wrong, if anything did."""
    console = Console(arguments=tuple(arguments))
    command = typer.main.get_command(app)
    try:
        code = command.main(
            list(arguments) or ["--help"], "mlx-mtp", standalone_mode=False, obj=console
        )
        sys.stdout.flush()  # or a reader that went away would show at exit, past our handlers
        return code if isinstance(code, int) else 0
    except MlxMtpError as error:
        console.error(error.message, error.hint)
        return error.exit_code
    except typer.TyperException as error:
        console.error(usage_sentence(error), usage_hint(error))
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return UNEXPECTED
    except Exception as error:
        if _was_interrupted(error):
            return INTERRUPTED
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOSPC:
            if isinstance(error, MemoryError):
                console.error("There is not enough memory.", "Take a smaller model or prompt.")
            else:
                console.error("There is not enough space on the disk.", "Free some and try again.")
            return ResourceError.exit_code
        why = next(iter(str(error).strip().splitlines()), "").rstrip(".")
        console.error(
            f"Unexpected {type(error).__name__}{': ' * bool(why)}{why}.",
            "" if console.debug else "Run it again with --debug to see where.",
        )
        return UNEXPECTED


def _was_interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C is behind an error: within the import of a compiled module it becomes an
    ImportError."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__
    return cause is not None


def _abandon_stdout() -> None:
    """The reader of stdout went away: let the interpreter's last flush go nowhere, quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
