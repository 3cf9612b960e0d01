"""Whatever bytes a file holds: each reader gives a value or one of this package's errors.

Files are those that come with a model or that a user hands over: half of each example is noise,
half is a good file that was cut, mixed up or given another value somewhere.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import SIZES

from mlx_mtp.batch.index import Index
from mlx_mtp.batch.journal import Journal
from mlx_mtp.batch.rows import RowOptions
from mlx_mtp.batch.sources import open_source
from mlx_mtp.batch.template import parse_template
from mlx_mtp.chat.settings import Settings
from mlx_mtp.chat.store import as_markdown, read, save_copy
from mlx_mtp.decode.depth import DepthController
from mlx_mtp.errors import MlxMtpError
from mlx_mtp.files import indexed_files, read_json, read_places, weight_files
from mlx_mtp.generation_config import GenerationDefaults
from mlx_mtp.hub import BUNDLED
from mlx_mtp.loading import load
from mlx_mtp.measure.prompts import read_prompts
from mlx_mtp.model.experts import ExpertStrategy
from mlx_mtp.pair import DrafterConfig, TargetConfig, check_pair
from mlx_mtp.tokenizer import Tokenizer
from mlx_mtp.types import SamplingParams

FEW, MANY = 25, 10_000
SECONDS = 10
"""An example that takes longer hangs."""
PAIRS = Path(__file__).parents[1] / "data" / "pairs"
POCKET = BUNDLED["pocket"]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2**31 - 1, 2**31, 2**63, 10**12, 10**400])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["..", "/etc/passwd", "\x1b[31m", "\ud800", "\0"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


class Reader(NamedTuple):
    """One kind of file.

    Attributes:
        name: the file's name in its folder.
        good: files that can be read.
        read: reads it, given its path.
        share: of the examples; what is slow gets fewer.
    """

    name: str
    good: tuple[bytes, ...]
    read: Callable[[Path], object]
    share: float = 1


def a_config(path: Path) -> None:
    values = read_json(path)
    target = TargetConfig.from_dict(values)
    assert TargetConfig.from_dict(json.loads(json.dumps(target.mlx_lm_config))) is not None
    GenerationDefaults.from_dict(values, values).check_vocabulary(target.vocab_size)


def a_drafter_config(path: Path) -> None:
    check_pair(
        TargetConfig.from_dict(SIZES["E2B"][0]), DrafterConfig.from_dict(read_json(path), "a/b")
    )


def a_generation_config(path: Path) -> None:
    GenerationDefaults.from_dict(read_json(path), {}).check_vocabulary(1024)


def a_tokenizer_config(path: Path) -> None:
    (path.parent / "tokenizer.json").write_bytes((POCKET / "tokenizer.json").read_bytes())
    a_tokenizer(path)


def a_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.load(path.parent)
    stream = tokenizer.detokenizer()
    for token_id in tokenizer.encode("a b"):
        if tokenizer.is_visible(token_id):
            stream.add(token_id)


def a_batch(kind: str, **options: Any) -> Callable[[Path], None]:
    def rows(path: Path) -> None:
        with open_source(str(path), kind, RowOptions(**options)) as source:
            for row in source.rows():
                json.dumps(vars(row), default=vars)

    return rows


def a_journal(path: Path) -> None:
    output = path.with_name("out")
    with Journal.open(output) as journal, Index(journal) as index:
        for entry in journal.finished():
            index.add_row(entry.place.offset, entry.key, entry.key, "a place")
        index.use_model("m")
        index.counts()
        list(index.records(ordered=True))


def a_conversation(path: Path) -> None:
    saved = read(path)
    Settings.from_changed(saved.settings)
    assert saved.title is not None
    as_markdown(saved)
    save_copy(saved, path.with_name("copy"))


def costs(path: Path) -> None:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    DepthController.from_json("dense", document)
    if isinstance(document, dict):
        ExpertStrategy.from_json(document.get("experts"))


def safetensors(*tensors: tuple[str, str, list[int]]) -> bytes:
    header, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + 4 * shape[0]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def as_json(*values: object) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


def as_lines(*values: object) -> bytes:
    return b"".join(line + b"\n" for line in as_json(*values))


RECORD = {"id": "a", "text": "x", "error": None, "seed": 1}
COSTS = DepthController("dense").to_json() | {"experts": [64, True]}
ROWS = as_lines(
    {"id": 1, "prompt": "a", "temperature": 0.5, "stop": ["x"]},
    {"custom_id": "b", "body": {"messages": [{"role": "user", "content": "b"}], "seed": 7}},
)
READERS: dict[str, Reader] = {
    "weights": Reader(
        "model.safetensors", (safetensors(("a", "F32", [2]), ("b", "I32", [1])),), read_places
    ),
    "index": Reader(
        "model.safetensors.index.json",
        as_json({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}),
        indexed_files,
    ),
    "config": Reader("config.json", as_json(*(size[0] for size in SIZES.values())), a_config),
    "drafter's config": Reader(
        "config.json",
        tuple((PAIRS / pair / "assistant" / "config.json").read_bytes() for pair in ("e2b", "moe")),
        a_drafter_config,
    ),
    "generation_config": Reader(
        "generation_config.json",
        ((POCKET / "generation_config.json").read_bytes(),),
        a_generation_config,
    ),
    "tokenizer_config": Reader(
        "tokenizer_config.json",
        ((POCKET / "tokenizer_config.json").read_bytes(),),
        a_tokenizer_config,
        share=0.25,
    ),
    "tokenizer": Reader(
        "tokenizer.json", ((POCKET / "tokenizer.json").read_bytes(),), a_tokenizer, share=0.25
    ),
    "jsonl": Reader("in.jsonl", (ROWS,), a_batch("auto")),
    "jsonl for a template": Reader("in.jsonl", (ROWS,), a_batch("jsonl", template="{prompt}")),
    "csv": Reader("in.csv", (b'id,prompt\n1,"a\nb"\n2,c\n',), a_batch("csv")),
    "lines": Reader("in", (b"a\nb\n",), a_batch("lines")),
    "journal": Reader(
        "out.journal",
        (
            b'{"mlx_mtp_journal": 1}\n'
            + as_lines(
                {"begin": {"rows": 8}},
                {"row": "m:1", "record": RECORD},
                {"row": "m:2", "record": RECORD},
                {"end": "done"},
            ),
        ),
        a_journal,
    ),
    "conversation": Reader(
        "chat.json",
        as_json(
            {
                "mlx_mtp_chat": 1,
                "id": "a",
                "model": "m",
                "settings": {"temperature": 0.5, "stop": ["x"]},
                "messages": [{"role": "user", "content": "a"}],
            }
        ),
        a_conversation,
    ),
    "prompts": Reader("p.jsonl", (as_lines({"prompt": "a", "kind": "b"}), b"a\nb\n"), read_prompts),
    "costs": Reader("costs.json", as_json(COSTS), costs),
}


@st.composite
def damaged(draw: st.DrawFn, good: tuple[bytes, ...]) -> bytes:
    """A good file with pieces cut out, doubled or replaced by noise."""
    data = draw(st.sampled_from(good))
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(data)))
        end = begin + draw(st.integers(0, 12))
        pieces = [b"", data[begin:end] * 2, *(b"\0", b"\xff", b'"', b"{", b"[", b"\r", b"-9e999")]
        data = data[:begin] + draw(st.sampled_from(pieces) | st.binary(max_size=8)) + data[end:]
    return data


@st.composite
def revalued(draw: st.DrawFn, good: tuple[bytes, ...]) -> bytes:
    """A good JSON file, or a line of it, with one value changed, added or left out."""
    lines = draw(st.sampled_from(good)).splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    try:
        value = json.loads(b"".join(lines)) if at == 0 else json.loads(lines[at])
    except ValueError:
        return b"\n".join(lines)
    whole = at == 0
    changed = deepcopy(value)
    place: Any = changed
    while True:
        if not isinstance(place, dict | list) or not place:
            break
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and draw(st.booleans()):
            place = place[key]
            continue
        if draw(st.integers(0, 5)):
            place[key] = draw(JSON)
        else:
            del place[key]
        break
    text = json.dumps(changed).encode()
    return text if whole else b"\n".join([*lines[:at], text, *lines[at + 1 :]])


def check(reader: Reader, data: st.DataObject) -> None:
    content = data.draw(st.binary(max_size=64) | damaged(reader.good) | revalued(reader.good))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / reader.name
        path.write_bytes(content)
        error = refusal(lambda: reader.read(path))
    if error is not None:
        assert error.message.endswith((".", "?"))
        assert len(str(error)) < 1000 + len(folder)


def refusal(read: Callable[[], object]) -> MlxMtpError | None:
    """The package's own error that a call ends with; any other one is raised."""
    try:
        read()
    except MlxMtpError as error:
        return error
    return None


def examples(share: float, number: int) -> settings:
    return settings(
        max_examples=max(10, int(number * share)),
        deadline=SECONDS * 1000,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def run(reader: Reader, number: int) -> None:
    @examples(reader.share, number)
    @given(data=st.data())
    def each(data: st.DataObject) -> None:
        check(reader, data)

    each()


@pytest.mark.parametrize("reader", READERS)
def test_any_file_is_read_or_refused_in_a_sentence(reader: str) -> None:
    run(READERS[reader], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_any_file_is_read_or_refused_in_a_sentence_at_length(reader: str) -> None:
    run(READERS[reader], MANY)


@pytest.mark.parametrize("reader", READERS)
def test_good_files_are_read(reader: str, tmp_path: Path) -> None:
    one = READERS[reader]
    for n, content in enumerate(one.good):
        path = tmp_path / str(n) / one.name
        path.parent.mkdir()
        path.write_bytes(content)
        if reader == "drafter's config":
            DrafterConfig.from_dict(read_json(path))
        else:
            one.read(path)


def load_changed(data: st.DataObject) -> None:
    """Load a pair of which one config has another value somewhere."""
    pair = PAIRS / data.draw(st.sampled_from(["e2b", "moe", "dense", "unified"]))
    part = data.draw(st.sampled_from(["target", "assistant"]))
    with tempfile.TemporaryDirectory() as folder:
        for half in ("target", "assistant"):
            (Path(folder) / half).mkdir()
            for file in (pair / half).iterdir():
                (Path(folder) / half / file.name).write_bytes(file.read_bytes())
        config = Path(folder) / part / "config.json"
        config.write_bytes(data.draw(revalued((config.read_bytes(),))))

        def run() -> None:
            llm = load(Path(folder) / "target", memory_limit=10**8)
            llm.generate_ids([[2, 5, 9]], SamplingParams(max_tokens=3))

        error = refusal(run)
    assert error is None or error.message.endswith((".", "?"))


@examples(1, FEW)
@given(data=st.data())
def test_a_config_with_any_value_loads_or_is_refused(data: st.DataObject) -> None:
    load_changed(data)


@pytest.mark.slow
@examples(0.1, MANY)
@given(data=st.data())
def test_a_config_with_any_value_loads_or_is_refused_at_length(data: st.DataObject) -> None:
    load_changed(data)


@given(st.text(max_size=30) | st.text(alphabet="{}ab", max_size=12))
def test_any_template_is_parsed_or_refused(text: str) -> None:
    error = refusal(lambda: parse_template(text).fill({"a": "x"}))
    assert error is None or error.hint


@given(name=st.text(max_size=40) | st.sampled_from(["../x.safetensors", "/x.safetensors"]))
def test_no_name_in_an_index_leads_out_of_its_folder(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "index"
    folder.mkdir(exist_ok=True)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    try:
        names = indexed_files(index)
    except MlxMtpError:
        return
    assert all((folder / one).resolve().parent == folder.resolve() for one in names)
    with pytest.raises(MlxMtpError):
        weight_files(folder)
