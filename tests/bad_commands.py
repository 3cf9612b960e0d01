"""Command lines of `mlx-mtp chat`, and environments, that cannot be done with."""

from __future__ import annotations

from bad_hints import (
    DEPTHS,
    FOLDER,
    NO_TOKEN,
    SEEDS,
    UNSET,
)
from mistakes import (
    IN,
    Case,
    batch,
    bench,
    chat,
    convert,
    write,
)

COMMANDS: dict[str, Case] = {
    "an unknown command": Case(
        2, "No such command 'cht'. Did you mean 'chat'?", "See `mlx-mtp --help`.", command=("cht",)
    ),
    "an unknown option": Case(
        2,
        "No such option: --temprature.",
        "Did you mean --temperature? See `mlx-mtp chat --help`.",
        command=chat("--temprature", "1"),
    ),
    "an unknown option like nothing": Case(
        2, "No such option: --zzz.", "See `mlx-mtp chat --help`.", command=chat("--zzz")
    ),
    "an option cut short": Case(
        2,
        "No such option: --retry.",
        "Did you mean --retry-errors? See `mlx-mtp batch --help`.",
        command=batch("--retry"),
    ),
    "a word too many": Case(
        2,
        "Got unexpected extra argument(s) (more).",
        "See `mlx-mtp chat --help`.",
        command=chat("more"),
    ),
    "an option without its value": Case(
        2,
        "Option '-p' requires an argument.",
        "See `mlx-mtp --help`.",
        command=("chat", "pocket", "-p"),
    ),
    "an option that is missing": Case(
        2,
        "Missing option '--output' / '-o'.",
        "See `mlx-mtp convert --help`.",
        command=("convert", "pocket"),
    ),
    "an argument that is missing": Case(
        2,
        "Missing argument 'INPUT'.",
        "See `mlx-mtp batch --help`.",
        command=("batch", "-o", "out.jsonl"),
    ),
    "a token on the command line": Case(
        2, "No such option: --token.", NO_TOKEN, command=chat("--token", "hf_secret")
    ),
    "a token after an equals sign": Case(
        2, "No such option: --hf-token.", NO_TOKEN, command=convert("--hf-token=hf_secret")
    ),
    "a token for batch": Case(
        2, "No such option: --token.", NO_TOKEN, IN, batch("--token", "hf_secret")
    ),
    "a token for bench": Case(
        2, "No such option: --api-key.", NO_TOKEN, command=bench("--api-key", "hf_secret")
    ),
    "a prompt of blanks": Case(
        2,
        "No prompt was given.",
        'For example: mlx-mtp chat -p "Multiplication table of 7."',
        command=("chat", "pocket", "-p", " "),
    ),
    "no prompt": Case(
        2,
        "No prompt was given.",
        'For example: mlx-mtp chat -p "Multiplication table of 7."',
        command=("chat", "pocket"),
        stdin=b"",
    ),
    "a prompt that is not UTF-8": Case(
        2,
        "The prompt on stdin is not UTF-8 text.",
        "Convert it first.",
        command=("chat", "pocket"),
        stdin=b"\xff\xfe",
    ),
    "a prompt longer than the context": Case(
        2,
        "The prompt has 5013 tokens and the model's context holds 4096.",
        "Shorten the prompt.",
        command=("chat", "pocket", "-p", "word " * 5000),
    ),
    "a temperature in words": Case(
        2,
        "Invalid value for '--temperature': that is no number.",
        "See `mlx-mtp chat --help`.",
        command=chat("--temperature", "hot"),
    ),
    "a temperature below 0": Case(
        2,
        "temperature is -1.0.",
        "Give a number from 0 to 1000000.",
        command=chat("--temperature", "-1"),
    ),
    "a temperature that is no number": Case(
        2,
        "temperature is nan.",
        "Give a number from 0 to 1000000.",
        command=chat("--temperature", "nan"),
    ),
    "a top-k with a fraction": Case(
        2,
        "Invalid value for '--top-k': that is no whole number.",
        "See `mlx-mtp chat --help`.",
        command=chat("--top-k", "1.5"),
    ),
    "a top-k below 0": Case(
        2, "top_k is -1.", "Give a whole number at least 0.", command=chat("--top-k", "-1")
    ),
    "a top-p of 0": Case(
        2,
        "top_p is 0, which keeps no token.",
        "Give a top_p in (0, 1].",
        command=chat("--top-p", "0"),
    ),
    "a top-p above 1": Case(
        2, "top_p is 1.5.", "Give a number from 0 to 1.", command=chat("--top-p", "1.5")
    ),
    "a min-p above 1": Case(
        2, "min_p is 2.0.", "Give a number from 0 to 1.", command=chat("--min-p", "2")
    ),
    "no tokens": Case(
        2, "max_tokens is 0.", "Give a whole number at least 1.", command=chat("--max-tokens", "0")
    ),
    "a seed below 0": Case(2, "seed is -1.", SEEDS, command=chat("--seed", "-1")),
    "a seed too large": Case(2, "seed is 4294967296.", SEEDS, command=chat("--seed", str(2**32))),
    "an empty stop": Case(
        2,
        "A stop string is empty or not text.",
        "Give non-empty stop strings.",
        command=chat("--stop", ""),
    ),
    "thinking maybe": Case(
        2, "thinking is 'maybe'.", "Give show, hide or off.", command=chat("--thinking", "maybe")
    ),
    "a depth of 9": Case(2, "The draft depth is '9'.", DEPTHS, command=chat("--draft-depth", "9")),
    "a depth in words": Case(
        2, "The draft depth is 'deep'.", DEPTHS, command=chat("--draft-depth", "deep")
    ),
    "a drafter without a name": Case(
        2,
        "No drafter is named.",
        "Give auto, none, a folder or a hub id.",
        command=chat("--drafter", ""),
    ),
    "a conversation goes on without a terminal": Case(
        2,
        "A conversation goes on at a terminal only.",
        "Run it at a terminal without -p and --json, or leave --continue and --resume out.",
        command=chat("--continue"),
    ),
    "a conversation by name without a terminal": Case(
        2,
        "A conversation goes on at a terminal only.",
        "Run it at a terminal without -p and --json, or leave --continue and --resume out.",
        command=("chat", "--resume", "x"),
        stdin=b"Hello",
    ),
}

ENVIRONMENTS: dict[str, Case] = {
    "MLX_MTP_MODEL leads nowhere": Case(
        3,
        "There is no folder nowhere, and it is not a hub id.",
        FOLDER,
        command=("chat", "-p", "x"),
        environment={"MLX_MTP_MODEL": "nowhere"},
    ),
    "MLX_MTP_MODEL is a file": Case(
        3,
        "m.gguf is a GGUF file, which this program cannot read.",
        "Give the original checkpoint in safetensors format.",
        write("m.gguf", "x"),
        ("chat", "-p", "x"),
        environment={"MLX_MTP_MODEL": "m.gguf"},
    ),
    "MLX_MTP_DRAFTER leads nowhere": Case(
        3,
        "There is no folder nowhere, and it is not a hub id.",
        FOLDER,
        command=("bench", "pocket"),
        environment={"MLX_MTP_DRAFTER": "nowhere"},
    ),
    "MLX_MTP_DRAFTER is a target": Case(
        4,
        "pocket-moe is a target (gemma4), not a drafter.",
        "Drafters are named like their target with -assistant added.",
        command=chat(),
        environment={"MLX_MTP_DRAFTER": "pocket-moe"},
    ),
    "MLX_MTP_HOME names nobody": Case(
        2,
        "~nobody-at-all/x names no user's folder.",
        "Write the path out.",
        command=("chat", "--list"),
        environment={"MLX_MTP_HOME": "~nobody-at-all/x"},
    ),
    "offline and not cached": Case(
        3,
        "google/gemma-4-E4B-it is neither a folder nor complete in the cache, and HF_HUB_OFFLINE is set.",
        UNSET,
        command=("chat", "google/gemma-4-E4B-it", "-p", "x"),
        environment={"HF_HUB_OFFLINE": "1"},
    ),
    "offline and not cached to convert": Case(
        3,
        "google/gemma-4-E4B-it is neither a folder nor complete in the cache, and HF_HUB_OFFLINE is set.",
        UNSET,
        command=("convert", "google/gemma-4-E4B-it", "-o", "out"),
        environment={"HF_HUB_OFFLINE": "1"},
    ),
}
