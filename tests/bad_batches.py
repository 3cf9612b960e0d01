"""Command lines of `mlx-mtp batch`, and inputs, that cannot be done with."""

from __future__ import annotations

from pathlib import Path

from bad_hints import (
    CHOOSE,
    DEPTHS,
)
from mistakes import (
    IN,
    Case,
    batch,
    both,
    link,
    write,
)

BATCHES: dict[str, Case] = {
    "a batch of 9": Case(
        2,
        "The batch size is '9'.",
        "Give auto or a whole number from 1 to 8.",
        IN,
        batch("--batch-size", "9"),
    ),
    "a batch of some": Case(
        2,
        "The batch size is 'some'.",
        "Give auto or a whole number from 1 to 8.",
        IN,
        batch("--batch-size", "some"),
    ),
    "a memory limit of 0": Case(
        2, "The memory limit is 0 GB.", "Give a positive number.", IN, batch("--memory-limit", "0")
    ),
    "a memory limit too low": Case(
        5,
        "The model takes 0.00453 GB, but 0.001 GB is the limit.",
        "Raise the memory limit, or convert the model to fewer bits.",
        IN,
        batch("--memory-limit", "0.001"),
    ),
    "a format of output": Case(
        2,
        "Invalid value for '--format': 'xml' is not one of 'simple', 'openai', 'csv'.",
        "See `mlx-mtp batch --help`.",
        IN,
        batch("--format", "xml"),
    ),
    "a format of input": Case(
        2,
        "Invalid value for '--input-format': 'parquet' is not one of 'auto', 'jsonl', 'csv', 'lines', 'folder'.",
        "See `mlx-mtp batch --help`.",
        IN,
        batch("--input-format", "parquet"),
    ),
    "another kind of input": Case(
        2,
        "in.jsonl is not a folder.",
        "Give a folder of .txt and .md files.",
        IN,
        batch("--input-format", "folder"),
    ),
    "a template with a lone brace": Case(
        2,
        "The template has a lone { at character 1.",
        "Write {name} for a field and {{ or }} for a brace.",
        IN,
        batch("-p", "{prompt"),
    ),
    "a column of JSONL": Case(
        2,
        "A prompt column is given, but the input is not CSV.",
        "Give a template instead: {text}.",
        IN,
        batch("--prompt-column", "text"),
    ),
    "an output that is the input": Case(
        2,
        "in.jsonl is both the input and the output.",
        CHOOSE,
        IN,
        ("batch", "in.jsonl", "-o", "in.jsonl"),
    ),
    "an output that is a folder": Case(
        2, ". is a folder.", "Name a file in it.", IN, ("batch", "in.jsonl", "-o", ".")
    ),
    "an output to stdout": Case(
        2,
        "The output '-' is no file.",
        "Name one; finished rows are kept beside it.",
        IN,
        ("batch", "in.jsonl", "-o", "-"),
    ),
    "an output in no folder": Case(
        2,
        "The folder none does not exist.",
        "Make it first.",
        IN,
        ("batch", "in.jsonl", "-o", "none/out.jsonl"),
    ),
    "an output that is a device": Case(
        2, "/dev/null is not a regular file.", CHOOSE, IN, ("batch", "in.jsonl", "-o", "/dev/null")
    ),
    "a journal that is another file": Case(
        2,
        "{here}/out.jsonl.journal is in the way: it is not a journal of mlx-mtp.",
        "Move it away, or choose another output.",
        both(IN, write("out.jsonl.journal", "my notes\n")),
        batch(),
    ),
    "a journal that is a link": Case(
        2,
        "{here}/out.jsonl.journal cannot be written: Too many levels of symbolic links.",
        CHOOSE,
        both(IN, link(Path("out.jsonl.journal"), "/etc/passwd")),
        batch(),
    ),
    "an output without a file's name": Case(
        2,
        "The output 'new/' is no file.",
        "Name one; finished rows are kept beside it.",
        IN,
        ("batch", "in.jsonl", "-o", "new/"),
    ),
    "an output that is a link to the input": Case(
        2,
        "link is both the input and the output.",
        CHOOSE,
        both(IN, link(Path("link"), "in.jsonl")),
        ("batch", "in.jsonl", "-o", "link"),
    ),
    "an output in a file": Case(
        2,
        "in.jsonl/out cannot be written: Not a directory.",
        CHOOSE,
        IN,
        ("batch", "in.jsonl", "-o", "in.jsonl/out"),
    ),
    "a template without a name": Case(
        2,
        "The template has no name in {} at character 1.",
        "Write {name} for a field and {{ or }} for a brace.",
        IN,
        batch("-p", "{}"),
    ),
    "a depth below 0": Case(
        2, "The draft depth is '-1'.", DEPTHS, IN, batch("--draft-depth", "-1")
    ),
    "no input": Case(
        2,
        "There is no file or folder in.jsonl.",
        "Check the path; - reads standard input.",
        command=batch(),
    ),
    "an input without rows": Case(
        2, "in.jsonl has no rows.", "Give at least one prompt.", write("in.jsonl", ""), batch()
    ),
    "an input that is an array": Case(
        2,
        "in.json is one JSON array, not one object per line.",
        "Convert it with: jq -c '.[]' in.json > in.jsonl",
        write("in.json", "[\n{}]"),
        ("batch", "in.json", "-o", "out.jsonl"),
    ),
    "a table without a header": Case(
        2,
        "in.csv has no header row.",
        "Name its columns in line 1.",
        write("in.csv", ""),
        ("batch", "in.csv", "-o", "out.jsonl"),
    ),
    "a table without prompts": Case(
        2,
        "in.csv has no column prompt or text.",
        "Say which column is the prompt, or give a template. Known: id;x.",
        write("in.csv", "id;x\n1;y\n"),
        ("batch", "in.csv", "-o", "out.jsonl"),
    ),
    "a table with a column twice": Case(
        2,
        "in.csv has two columns 'prompt'.",
        "Rename one of them.",
        write("in.csv", "prompt,prompt\nx,y\n"),
        ("batch", "in.csv", "-o", "out.jsonl"),
    ),
    "a column that is not there": Case(
        2,
        "in.csv has no column 'prompt'.",
        "Did you mean prompts?",
        write("in.csv", "prompts,x\na,b\n"),
        ("batch", "in.csv", "-o", "out.jsonl", "--prompt-column", "prompt"),
    ),
    "a placeholder that is not there": Case(
        2,
        "The template's {reviews} is not a field.",
        "Did you mean review?",
        write("in.csv", "review\na\n"),
        ("batch", "in.csv", "-o", "out.jsonl", "-p", "{reviews}"),
    ),
    "a depth without a drafter": Case(
        2,
        "draft_depth is 3, but no drafter is loaded.",
        "Load one, or leave draft_depth out.",
        IN,
        batch("--drafter", "none", "--draft-depth", "3"),
    ),
}
