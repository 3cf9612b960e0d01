"""Command lines of `mlx-mtp convert`, `bench` and `info` that cannot be done with."""

from __future__ import annotations

from bad_hints import (
    DEPTHS,
    FOLDER,
    NEW,
    NO_TOKEN,
)
from mistakes import (
    Case,
    bench,
    convert,
    pocket,
    write,
)

JOBS: dict[str, Case] = {
    "bits of 7": Case(
        2,
        "Invalid value for '--bits': '7' is not one of '2', '3', '4', '5', '6', '8', 'none'.",
        "See `mlx-mtp convert --help`.",
        command=convert("--bits", "7"),
    ),
    "bits and a recipe": Case(
        2,
        "The recipe mtp-4bit is given with bits.",
        "Give either of the two.",
        command=convert("--bits", "4", "--recipe", "mtp-4bit"),
    ),
    "no bits and a recipe": Case(
        2,
        "--bits none keeps the weights.",
        "Give it without --recipe.",
        command=convert("--bits", "none", "--recipe", "uniform"),
    ),
    "bits that a mode lacks": Case(
        2,
        "mxfp4 has no 8 bits.",
        "Give one of its bits: 4.",
        command=convert("--mode", "mxfp4", "--bits", "8"),
    ),
    "a group that a mode lacks": Case(
        2,
        "nvfp4 with 4 bits has no group size 64.",
        "Give one of its group sizes: 16.",
        command=convert("--mode", "nvfp4", "--group-size", "64"),
    ),
    "a group of 7": Case(
        2,
        "affine with 4 bits has no group size 7.",
        "Give one of its group sizes: 32, 64, 128.",
        command=convert("--group-size", "7"),
    ),
    "dequantized to 4 bits": Case(
        2,
        "--dequantize quantizes nothing.",
        "Give it without --recipe and --bits.",
        command=convert("--dequantize", "--bits", "4"),
    ),
    "dequantized what is not quantized": Case(
        2,
        "pocket is not quantized.",
        "Keep its weights with bits none.",
        command=convert("--dequantize"),
    ),
    "a pattern without bits": Case(
        2,
        "keep is '*.v_proj'.",
        "Give PATTERN=VALUE with one of bf16, 2, 3, 4, 5, 6, 8, e.g. '*.v_proj=bf16'.",
        command=convert("--keep", "*.v_proj"),
    ),
    "a pattern like nothing": Case(
        2,
        "keep 'nothing.like=8' matches no matrix.",
        "Matrices are called like pre_projection.",
        command=convert("--keep", "nothing.like=8"),
    ),
    "shards of size big": Case(
        2,
        "The shard size is 'big'.",
        "Give a size such as 5GB or 500MB.",
        command=convert("--shard-size", "big"),
    ),
    "a revision of a folder": Case(
        2,
        "pocket is a folder and has no revision.",
        "Give a hub id, or no revision.",
        command=convert("--revision", "main"),
    ),
    "an output without a name": Case(
        2, "The output has no name.", NEW, command=("convert", "pocket", "-o", "")
    ),
    "an output in use": Case(
        2,
        "{here}/out is not empty.",
        "Give a folder that does not exist yet, or --overwrite.",
        write("out/mine.txt", "x"),
        convert(),
    ),
    "an output of others": Case(
        2,
        "{here}/out is no conversion of this program, so it is not replaced.",
        "Remove it yourself, or give another folder.",
        write("out/mine.txt", "x"),
        convert("--overwrite"),
    ),
    "an output that is a file": Case(2, "{here}/out is a file.", NEW, write("out", "x"), convert()),
    "an output within the source": Case(
        2,
        "{here}/pair/target/out lies inside the target's folder, or holds it.",
        "Give a folder outside it.",
        pocket(),
        ("convert", "pair/target", "-o", "pair/target/out"),
    ),
    "an upload by nobody": Case(
        3,
        "me/x cannot be uploaded: nobody is logged in to the hub.",
        "Run `hf auth login`.",
        command=convert("--upload", "me/x"),
        environment={"HF_TOKEN": None},
    ),
    "a converted model again": Case(
        3,
        "There is no folder {here}/none, and it is not a hub id.",
        FOLDER,
        command=("convert", "{here}/none", "-o", "out"),
    ),
    "rows of 9": Case(
        2,
        "The rows are '9'.",
        "Give whole numbers from 1 to 8 with commas between them.",
        command=bench("--rows", "9"),
    ),
    "rows in words": Case(
        2,
        "The rows are '1;2'.",
        "Give whole numbers from 1 to 8 with commas between them.",
        command=bench("--rows", "1;2"),
    ),
    "a depth of 8 to measure": Case(
        2, "The draft depth is '8'.", DEPTHS, command=bench("--depths", "8")
    ),
    "no runs": Case(
        2, "0 runs give no median.", "Give --repeat 1 or more.", command=bench("--repeat", "0")
    ),
    "acceptance of 2": Case(
        2,
        "The acceptance to replay is '2'.",
        "Give up to 7 numbers from 0 to 1, for example .9,.8,.7.",
        command=bench("--replay-acceptance", "2"),
    ),
    "acceptance of sampled text": Case(
        2,
        "Acceptance is replayed from the model's greedy text, not from sampled text.",
        "Leave --temperature at 0.",
        command=bench("--replay-acceptance", ".9", "--temperature", "1"),
    ),
    "a picture that is a film": Case(
        2,
        "x.gif is no name of a picture.",
        "End it with .png or .svg.",
        command=bench("--plot", "x.gif"),
    ),
    "prompts that are not there": Case(
        2,
        "nowhere.txt cannot be read: No such file or directory.",
        "Check the path.",
        command=bench("--prompts", "nowhere.txt"),
    ),
    "prompts with an unknown key": Case(
        2,
        "p.jsonl, line 1 has the key 'kinds', which is not measured.",
        "Give prompt and kind only.",
        write("p.jsonl", '{"prompt": "a", "kinds": "b"}\n'),
        bench("--prompts", "p.jsonl"),
    ),
    "depths without a drafter": Case(
        2,
        "There is no drafter for depth 3.",
        "Name one with --drafter, measure --depths 0, or give --replay-acceptance.",
        command=bench("--drafter", "none", "--depths", "3"),
    ),
    "a token for info": Case(
        2, "No such option: --token.", NO_TOKEN, command=("info", "pocket", "--token", "hf_secret")
    ),
    "a drafter to describe alone": Case(
        2,
        "--drafter is given without a model.",
        "Name one before it.",
        command=("info", "--drafter", "pocket"),
    ),
    "nothing to describe": Case(
        3,
        "There is no folder nowhere, and it is not a hub id.",
        FOLDER,
        command=("info", "nowhere"),
    ),
    "a limit of nothing to describe": Case(
        2,
        "The memory limit is -1 GB.",
        "Give a positive number.",
        command=("info", "pocket", "--memory-limit", "-1"),
    ),
}
