"""Text is never lost, doubled or cut in the wrong place, whatever the tokens' borders are."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers

from mlx_mtp.errors import ModelNotFoundError, UsageError
from mlx_mtp.tokenizer import TextDelta, TextStream, Tokenizer

POCKET = Path(__file__).parents[2] / "mlx_mtp" / "data" / "pocket" / "target"
MARKERS = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
FEW = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module")
def pocket() -> Tokenizer:
    return Tokenizer.load(POCKET, [1, 5])


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The pocket tokenizer (byte-level, 1,024 ids) with Gemma 4's markers as ids 1,024 to 1,029."""
    folder = tmp_path_factory.mktemp("channels") / "target"
    shutil.copytree(POCKET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] += [
        {"id": 1024 + n, "content": text, "special": True} | flags for n, text in enumerate(MARKERS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of Gemma 4's kind: spaces as U+2581, bytes where there is no token."""
    folder = tmp_path_factory.mktemp("gemma")
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *MARKERS, *(f"<0x{n:02X}>" for n in range(256))]
    words += ["▁", "\n", *"abcdefghijklmnopqrstuvwxyz", "▁a", "▁▁", "th", "▁th"]
    merges = [("▁", "a"), ("▁", "▁"), ("t", "h"), ("▁", "th")]
    vocab = {word: n for n, word in enumerate(words)}
    tokenizer = HfTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(words[: 4 + len(MARKERS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}'
    )
    return Tokenizer.load(folder)


def run(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> TextDelta:
    """All deltas of a stream joined."""
    stream = TextStream(tokenizer, stop)
    deltas = [stream.add(token_id) for token_id in ids] + [stream.finish()]
    stops = [delta.stopped for delta in deltas]
    assert all(later or not earlier for earlier, later in pairwise(stops))
    return TextDelta(
        "".join(delta.text for delta in deltas),
        "".join(delta.thinking for delta in deltas),
        stops[-1],
    )


def reference_stop(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The text grown by one character at a time until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        done = [len(one) for one in stop if text[:end].endswith(one)]
        if done:
            return text[: end - max(done)], True
    return text, False


@FEW
@given(text=TEXTS)
@pytest.mark.parametrize("kind", ["pocket", "gemma"])
def test_text_survives_the_way_through_ids(
    request: pytest.FixtureRequest, kind: str, text: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    # The space of Gemma's tokenizers is this very character, so it cannot come back as itself.
    text = text.replace("▁", " ") if kind == "gemma" else text
    assert run(tokenizer, tokenizer.encode(text)).text == text
    assert tokenizer.decode(tokenizer.encode(text)) == text


@FEW
@given(ids=st.lists(st.integers(-3, 1100), max_size=40))
def test_any_ids_stream_to_the_text_they_decode_to(channels: Tokenizer, ids: list[int]) -> None:
    # mlx-lm shows NUL bytes as U+0100; the channel markers cut the text in two.
    skipped = {channels.channel_start, channels.channel_end}
    table = channels._wrapper.convert_ids_to_tokens(range(channels.vocab_size))
    skipped.update(n for n, token in enumerate(table) if "Ā" in token)
    ids = [token_id for token_id in ids if token_id not in skipped]
    assert run(channels, ids).text == channels.decode(ids)


@FEW
@given(ids=st.lists(st.sampled_from([-1, 2, 6, 7, 8, 9, *range(266, 400)]), max_size=40))
def test_any_ids_stream_to_the_text_they_decode_to_for_gemma(
    gemma: Tokenizer, ids: list[int]
) -> None:
    assert run(gemma, ids).text == gemma.decode(ids)


@FEW
@given(
    pieces=st.lists(st.text("ab ", max_size=4), max_size=8),
    stop=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_a_stop_does_not_depend_on_where_the_text_is_split(
    pocket: Tokenizer, pieces: list[str], stop: tuple[str, ...]
) -> None:
    ids = [token_id for piece in pieces for token_id in pocket.encode(piece)]
    delta = run(pocket, ids, stop)
    assert (delta.text, delta.stopped) == reference_stop("".join(pieces), stop)


@FEW
@given(
    text=st.text("ab\n ", max_size=12),
    stop=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_the_id_that_completes_a_stop_is_the_one_that_stops(
    pocket: Tokenizer, text: str, stop: tuple[str, ...]
) -> None:
    stream, seen = TextStream(pocket, stop), ""
    for token_id in pocket.encode(text):
        seen += pocket.decode([token_id])
        assert stream.add(token_id).stopped == reference_stop(seen, stop)[1]


def test_in_one_token_the_stop_that_is_complete_first_wins(pocket: Tokenizer) -> None:
    words = (pocket.decode([token_id]) for token_id in range(pocket.vocab_size))
    word = next(word for word in words if len(word) > 3 and word.isalpha())
    assert run(pocket, pocket.encode(word), (word, word[1:-1])) == TextDelta(word[0], "", True)
    assert run(pocket, pocket.encode(word), (word, word[1:])) == TextDelta("", "", True)


def test_a_stop_string_may_span_three_tokens(pocket: Tokenizer) -> None:
    ids = [pocket.encode(letter)[0] for letter in "xSTOPy"]
    stream = TextStream(pocket, ["STOP"])
    deltas = [stream.add(token_id) for token_id in ids]
    assert [delta.text for delta in deltas] == ["x", "", "", "", "", ""]
    assert [delta.stopped for delta in deltas] == [False] * 4 + [True, True]
    assert stream.finish() == TextDelta("", "", True)


def test_text_that_is_almost_a_stop_string_comes_out(pocket: Tokenizer) -> None:
    stream = TextStream(pocket, ["STOP"])
    texts = [stream.add(pocket.encode(letter)[0]).text for letter in "STSTO!"]
    assert texts == ["", "", "ST", "", "", "STO!"]
    assert run(pocket, pocket.encode("a STO"), ("STOP",)).text == "a STO"


def test_of_overlapping_stop_strings_the_first_complete_one_wins(pocket: Tokenizer) -> None:
    assert run(pocket, pocket.encode("xabcd"), ("abcd", "bc")).text == "xa"
    assert run(pocket, pocket.encode("xabcd"), ("bc", "abc")).text == "x"


def test_a_character_of_several_tokens_comes_out_whole(pocket: Tokenizer) -> None:
    ids = pocket.encode("a🙂b")
    assert len(ids) == 6
    stream = TextStream(pocket)
    assert [stream.add(token_id).text for token_id in ids] == ["a", "", "", "", "🙂", "b"]


def test_an_incomplete_character_is_not_swallowed(pocket: Tokenizer) -> None:
    assert run(pocket, pocket.encode("a🙂")[:-1]).text == "a\ufffd"


def test_leading_and_single_spaces_are_kept_and_not_delayed(pocket: Tokenizer) -> None:
    space = pocket._wrapper.convert_tokens_to_ids("Ġ")
    stream = TextStream(pocket)
    assert [stream.add(n).text for n in (space, space, pocket.encode(" the")[0])] == [
        " ",
        " ",
        pocket.decode(pocket.encode(" the")[:1]),
    ]


def test_special_tokens_have_no_text_and_hide_none(pocket: Tokenizer) -> None:
    ids = [2, 4, *pocket.encode("one"), 5, 1, *pocket.encode(" two"), 10**6, -1]
    assert run(pocket, ids).text == "one two"


@pytest.mark.parametrize("kind", ["channels", "gemma"])
def test_thinking_is_apart_from_the_answer(request: pytest.FixtureRequest, kind: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(
        "Hi <|channel>thought\nlet me\nsee<channel|> there<|channel>thought<channel|>!"
    )
    assert run(tokenizer, ids) == TextDelta("Hi  there!", "let me\nsee", False)


def test_an_open_channel_ends_with_the_stream(channels: Tokenizer) -> None:
    ids = channels.encode("<|channel>thought\nhm 🙂")
    assert run(channels, ids[:-1]) == TextDelta("", "hm \ufffd", False)
    assert run(channels, ids[:2]) == TextDelta("", "", False)


def test_stop_strings_are_looked_for_in_the_answer_only(channels: Tokenizer) -> None:
    ids = channels.encode("S<|channel>thought\nSTOP<channel|>TOP after")
    assert run(channels, ids, ("STOP",)) == TextDelta("", "STOP", True)


def test_a_character_is_not_joined_across_a_channel_border(channels: Tokenizer) -> None:
    half = channels.encode("🙂")
    ids = [*half[:2], channels.channel_start, *channels.encode("thought\nx"), *half[2:]]
    delta = run(channels, [n for n in ids if n is not None])
    assert delta.text == "\ufffd"
    assert delta.thinking.startswith("x\ufffd")


@pytest.mark.parametrize("kind", ["channels", "gemma"])
def test_tool_calls_keep_their_markers(request: pytest.FixtureRequest, kind: str) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    call = '<|tool_call>call{a<|"|>b<|"|>}<tool_call|>'
    ids = tokenizer.encode(call + "<|tool_response>")
    assert run(tokenizer, ids).text == call


def test_the_work_for_a_token_does_not_grow_with_the_text(pocket: Tokenizer) -> None:
    stream = TextStream(pocket, ["never"])
    ids = pocket.encode("for x in range(10):\n    print(x)\n")
    for token_id in ids * 50:
        stream.add(token_id)
    inner = stream._detokenizer._inner
    assert len(inner.text) + len(inner.tokens) + len(inner._unflushed) + len(stream._held) < 8


def test_the_template_writes_the_only_bos(pocket: Tokenizer) -> None:
    ids = pocket.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids == pocket.encode("<bos><|turn>user\nHi<turn|>\n<|turn>model\n")
    assert ids.count(2) == 1
    assert pocket.eos_token_ids == {1, 5}
    assert pocket.vocab_size == 1024


def test_content_parts_are_joined(pocket: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    assert pocket.encode_chat([{"role": "user", "content": parts}]) == pocket.encode_chat(
        [{"role": "user", "content": "a b"}]
    )


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "The conversation is empty."),
        (["Hi"], "Message 1 is not a mapping."),
        ([{"content": "Hi"}], "Message 1 has no role."),
        ([{"role": "usr", "content": "Hi"}], "Message 1 has the unknown role 'usr'."),
        ([{"role": "user", "content": "Hi"}, {"role": "model"}], "Message 2 has no content."),
        ([{"role": "user", "content": 5}], "The content of message 1 is not text."),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            "Message 1 has a part of type 'image', and only text can be read.",
        ),
        (
            [{"role": "user", "content": "a\ud800"}],
            "The text has characters that are not valid Unicode.",
        ),
    ],
)
def test_a_bad_conversation_is_refused_in_a_sentence(
    pocket: Tokenizer, messages: list[Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        pocket.encode_chat(messages)
    assert caught.value.message == sentence
    assert caught.value.hint


def test_what_a_template_says_reaches_the_user(tmp_path: Path) -> None:
    shutil.copytree(POCKET, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    template = tmp_path / "m" / "chat_template.jinja"
    template.write_text("{{ raise_exception('Roles must alternate.') }}")
    with pytest.raises(UsageError) as caught:
        Tokenizer.load(tmp_path / "m").encode_chat([{"role": "user", "content": "Hi"}])
    expected = "The model's chat template refuses this conversation: Roles must alternate."
    assert caught.value.message == expected
    template.unlink()
    with pytest.raises(UsageError, match="This model has no chat template"):
        Tokenizer.load(tmp_path / "m").encode_chat([{"role": "user", "content": "Hi"}])


def test_thinking_reaches_the_template(tmp_path: Path) -> None:
    shutil.copytree(POCKET, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ enable_thinking }}")
    tokenizer = Tokenizer.load(tmp_path / "m")
    for thinking in (True, False):
        ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}], thinking=thinking)
        assert tokenizer.decode(ids) == str(thinking)


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no tokenizer in"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match="cannot be read"):
        Tokenizer.load(tmp_path)
