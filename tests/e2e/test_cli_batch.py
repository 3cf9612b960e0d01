"""What `mlx-mtp batch` reads, writes and refuses."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from batches import (
    B_A_N_A_N_A,
    BANANA,
    SEVENS,
    TABLE,
    answers,
    finish,
    read_jsonl,
    start,
    write_jsonl,
)

from mlx_mtp.model.drafter import Drafter

if TYPE_CHECKING:
    from conftest import BatchCommand

GREEDY = ("--temperature", "0")
DRAFTED = (*GREEDY, "--draft-depth", "4")
SUMMARY = [
    "rows", "done", "failed", "reused", "interrupted", "batch_size", "seconds", "tokens", "mode",
    "output", "run", "model", "drafter", "exact",
]  # fmt: skip


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def texts(output: Path) -> dict[str, str]:
    """The answers of OUTPUT by their ids, which all differ."""
    rows = read_jsonl(output)
    found = {row["id"]: row["text"] for row in rows}
    assert len(found) == len(rows)
    return found


# Inputs


def test_a_pipe_of_lines_in_and_a_document_out(output: Path) -> None:
    stdin = f"\ufeff{TABLE}\r\n\n{BANANA}\nCount from 7 to 21.\n"
    done = finish(start("-", "-o", output, "--ordered", "--json", *DRAFTED), stdin)
    assert done.code == 0
    document = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert list(document) == SUMMARY
    found = {name: document[name] for name in ("rows", "done", "failed", "reused", "interrupted")}
    assert found == {"rows": 3, "done": 3, "failed": 0, "reused": 0, "interrupted": False}
    assert (document["output"], document["model"]) == (str(output), "pocket")
    assert document["mode"] == f"drafted by {document['drafter']}"
    assert document["tokens"] == document["run"]["tokens"]
    assert 0 < document["run"]["accepted"] <= document["run"]["drafted"]
    rows = read_jsonl(output)
    assert [(row["index"], row["id"], row["text"]) for row in rows] == [
        (0, "0", SEVENS),
        (1, "1", B_A_N_A_N_A),
        (2, "2", ", ".join(map(str, range(7, 22)))),
    ]
    names = ["index", "id", "text", "finish_reason", "usage", "seed", "stats", "error"]
    assert [list(row) for row in rows] == [names] * 3
    assert sum(row["usage"]["completion_tokens"] for row in rows) == document["tokens"]
    first, second, third = done.err.splitlines()
    assert first.startswith("  3 of 3 rows · ")
    assert second.startswith(f"  drafted by {document['drafter']}; ")
    assert third == f"  wrote {output}"


def test_the_settings_of_a_row_win(tmp_path: Path, output: Path, batch: BatchCommand) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TABLE}]
    rows: list[dict[str, Any]] = [
        {"id": "plain", "prompt": BANANA},
        {"id": 12, "messages": chat, "max_tokens": 3},
        {"id": "stop", "prompt": BANANA, "stop": "n-a"},
        {"id": "hot", "prompt": "hi", "temperature": 1.5, "seed": 5, "top_k": 50, "max_tokens": 9},
        {"prompt": TABLE, "max_tokens": None, "temperature": None},
    ]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    done = batch(source, "-o", output, "--max-tokens", "100", "--system", "x", *GREEDY)
    assert done.code == 0
    by_id = {row["id"]: row for row in read_jsonl(output)}
    assert sorted(by_id) == ["12", "4", "hot", "plain", "stop"]
    assert by_id["plain"]["text"] == B_A_N_A_N_A
    assert by_id["12"]["finish_reason"] == "length"
    assert by_id["12"]["usage"]["completion_tokens"] == 3
    assert (by_id["stop"]["text"], by_id["stop"]["finish_reason"]) == ("b-a-", "stop")
    assert by_id["hot"]["seed"] == 5
    assert by_id["4"]["text"] == SEVENS


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("a.csv", "text\nSpell banana.\n", [], {"0": B_A_N_A_N_A}),
        (
            "a.csv",
            'id,word,note\nx,banana,"a,\nb"\ny,apple,\n',
            ["-p", "Spell {word}."],
            {"x": B_A_N_A_N_A, "y": "a-p-p-l-e"},
        ),
        ("a.tsv", "q\tprompt\nSpell banana.\tx\n", ["--prompt-column", "q"], {"0": B_A_N_A_N_A}),
        ("a.jsonl", '{"w": "banana", "id": 1}\n', ["-p", "Spell {w}."], {"1": B_A_N_A_N_A}),
        (
            "a.data",
            "banana\r\n\r\napple",
            ["-p", "Spell {text}."],
            {"0": B_A_N_A_N_A, "1": "a-p-p-l-e"},
        ),
        ("a.data", '{"prompt": "Spell banana."}', [], {"0": B_A_N_A_N_A}),
        ("n/b.txt", "banana", ["-p", "Spell {text}."], {"b.txt": B_A_N_A_N_A}),
        ("n/s/banana", "", ["--input-format", "lines"], None),
    ],
)  # fmt: skip
def test_inputs(
    tmp_path: Path,
    output: Path,
    batch: BatchCommand,
    name: str,
    content: str,
    options: list[str],
    expected: dict[str, str] | None,
) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    source = tmp_path / name.split("/")[0]
    done = batch(source, "-o", output, *options, *GREEDY)
    if expected is None:
        assert (done.code, done.err) == (
            2,
            f"error: {source} is a folder, not lines.\n  Give a file.\n",
        )
    else:
        assert done.code == 0
        assert texts(output) == expected


# Outputs


def test_openai_rows_in_and_out(tmp_path: Path, output: Path, batch: BatchCommand) -> None:
    def row(name: str, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": BANANA}]
        url = "/v1/chat/completions"
        body = {"model": "gpt-x", "messages": messages, "temperature": 0} | body
        return {"custom_id": name, "method": "POST", "url": url, "body": body}

    rows = [row("a"), row("b", max_completion_tokens=3, seed=2**40 + 1), row("c", tools=[{}])]
    rows.append(row("d", messages=[{"role": "user", "content": "word " * 5000}]))
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    done = batch(source, "-o", output, "--skip-invalid", "--ordered")
    assert done.code == 6
    a, b, c, d = read_jsonl(output)
    assert [line["custom_id"] for line in (a, b, c, d)] == ["a", "b", "c", "d"]
    assert all(list(line) == ["id", "custom_id", "response", "error"] for line in (a, b, c, d))
    assert len({line["id"] for line in (a, b, c, d)}) == 4
    assert (a["error"], a["response"]["status_code"]) == (None, 200)
    body = a["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "pocket")
    (choice,) = body["choices"]
    assert choice["message"]["content"] == B_A_N_A_N_A
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "stop")
    assert body["usage"]["total_tokens"] == sum(
        body["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    )
    assert b["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert b["response"]["body"]["usage"]["completion_tokens"] == 3
    assert (c["response"], d["response"]) == (None, None)
    assert [line["error"]["code"] for line in (c, d)] == ["invalid_request"] * 2
    assert c["error"]["message"].startswith("The body has tools, but tools cannot be called")
    assert d["error"]["message"].startswith("The prompt has 5013 tokens")


def test_formats_and_order_can_be_changed_without_decoding_again(
    tmp_path: Path, batch: BatchCommand
) -> None:
    first, second = tmp_path / "out", tmp_path / "out.CSV"
    rows = [{"id": "long", "prompt": TABLE}, {"id": 'a "b",\n', "prompt": BANANA}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)

    def run(output: Path, *options: str) -> int:
        done = batch(source, "-o", output, "--json", *options, *GREEDY)
        assert done.code == 0
        forwards: int = json.loads(done.out)["run"]["target_forwards"]
        return forwards

    assert run(first) > 0
    assert [row["index"] for row in read_jsonl(first)] == [1, 0]  # as they were finished
    assert run(first, "--ordered") == 0
    assert [row["index"] for row in read_jsonl(first)] == [0, 1]
    assert run(first, "--format", "openai") == 0
    contents = [line["response"]["body"]["choices"][0] for line in read_jsonl(first)]
    assert [choice["message"]["content"] for choice in contents] == [B_A_N_A_N_A, SEVENS]
    assert run(first, "--format", "csv", "--ordered") == 0
    journal = tmp_path / "out.journal"
    journal.rename(tmp_path / "out.CSV.journal")
    assert run(second, "--ordered") == 0
    assert first.read_bytes() == second.read_bytes()
    with second.open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [row["text"] for row in table] == [SEVENS, B_A_N_A_N_A]
    assert [row["id"] for row in table] == ["long", 'a "b",\n']
    assert [row["error"] for row in table] == ["", ""]


# Seeds


def test_a_seed_gives_the_same_text_in_any_order_and_batch_size(
    tmp_path: Path, output: Path, batch: BatchCommand
) -> None:
    rows: list[dict[str, Any]] = [{"id": f"{n}", "prompt": "hi"} for n in range(7)]
    rows.append({"id": "own", "prompt": "hi", "seed": 3})
    source = tmp_path / "in.jsonl"
    common = [source, "--temperature", "1", "--max-tokens", "10"]
    write_jsonl(source, rows)
    assert batch(*common, "-o", output, "--seed", "7", "--batch-size", "1").code == 0
    write_jsonl(source, reversed(rows))
    again, other = tmp_path / "again.jsonl", tmp_path / "other.jsonl"
    assert batch(*common, "-o", again, "--seed", "7", "--drafter", "none").code == 0
    assert answers(output) == answers(again)
    assert batch(*common, "-o", other, "--seed", "8").code == 0
    found = texts(output)
    assert len({text for text in found.values()}) > 3
    changed = [name for name, text in texts(other).items() if text != found[name]]
    assert "own" not in changed
    assert len(changed) > 3
    seeds = {row["id"]: row["seed"] for row in read_jsonl(output)}
    assert seeds.pop("own") == 3
    assert len(set(seeds.values())) == 7


def test_exact_rows_are_other_rows(tmp_path: Path, output: Path, batch: BatchCommand) -> None:
    """On a GPU their text may be another one, so they are done again."""
    source = tmp_path / "in.jsonl"
    write_jsonl(source, [{"id": "a", "prompt": "Spell cat."}])
    common = [source, "-o", output, "--temperature", "0", "--json"]
    plain, exact = batch(*common), batch(*common, "--exact")
    for done, reused, is_exact in ((plain, 0, False), (exact, 0, True), (batch(*common), 1, False)):
        found = json.loads(done.out)
        assert (found["reused"], found["exact"]) == (reused, is_exact)
    assert json.loads(exact.out)["mode"].endswith(", exact")


def test_drafts_that_are_never_right_are_said(
    tmp_path: Path, output: Path, batch: BatchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = Drafter.logits
    monkeypatch.setattr(
        Drafter, "logits", lambda self, h: logits(self, h)._replace(values=-logits(self, h).values)
    )
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "Count to 30."}] * 2)
    done = batch(source, "-o", output, *DRAFTED, "--max-tokens", "30")
    assert re.search(r"warning: only 0 of \d+ drafts were accepted: is this the model's", done.err)


# Progress


@pytest.mark.parametrize("width", [100, 40])
def test_a_line_on_a_terminal_says_how_far_it_is(
    tmp_path: Path, output: Path, batch: BatchCommand, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    for name, value in {"TTY_COMPATIBLE": "1", "TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": TABLE}] * 4)
    done = batch(source, "-o", output, *DRAFTED)
    assert done.code == 0
    shown = re.split(r"\x1b\[\??\d*[A-Za-z]|\r", done.err)
    lines = [text.strip() for text in shown if "in flight" in text]
    assert lines[-1].startswith("4/4 rows · 0 in flight")
    assert max(map(len, lines)) <= width - 3
    told = {re.sub(r"[\d.]+( h \d\d)?", "N", part) for line in lines for part in line.split(" · ")}
    assert {"N/N rows", "N in flight"} < told
    if width == 100:
        assert {"N tok/s", "N tok/forward", "drafts N %", "N s left"} < told
    # at the end it is gone and the cursor is back
    assert done.err.rindex("\x1b[2K") > done.err.rindex("in flight")
    assert done.err.rindex("\x1b[?25h") > done.err.rindex("\x1b[?25l")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in batch(source, "-o", output, "--temperature", "0.5").err


# What must not trip it


def test_odd_prompts_are_answered(tmp_path: Path, output: Path, batch: BatchCommand) -> None:
    prompts = [
        "\0", "\x1b[31mred\x1b[0m", "é" + "\u0301" * 50, "👩‍👩‍👧‍👦 漢字 عربى", "\u202eevil",
        "a\u2028\u2029\x85b", "\r\n\t x",
        "<start_of_turn>model\n<end_of_turn>", "<|turn>model\n<turn|>", "<eos><bos><pad><unk>",
        "{text} {{ }} {0} %s", "../../etc/passwd", "'; DROP TABLE rows; --", "=1+1", "\U0010ffff",
        "a" * 100, "[" * 50, '"\\"', "\ufeffx",
    ]  # fmt: skip
    rows = [{"id": prompt, "prompt": prompt} for prompt in prompts]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    for name in ("out.jsonl", "out.csv"):
        output = tmp_path / name
        assert batch(source, "-o", output, "--ordered", "--max-tokens", "3").code == 0
        if name == "out.jsonl":
            found = [row["id"] for row in read_jsonl(output)]
        else:
            with output.open(newline="", encoding="utf-8") as stream:
                found = [row["id"] for row in csv.DictReader(stream)]
        assert found == prompts
