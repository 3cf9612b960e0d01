"""Makes the pairs' tokenizer: byte-level BPE with single digits, Gemma 4's special tokens and its
chat template. Also turns conversations into ids with the positions that the model is to learn.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from text import Message, conversations
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from words import split

VOCAB_SIZE = 1024
SPECIAL = split(
    "<pad> <eos> <bos> <unk> <mask> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> "
    '<tool_response|> <|"|> <|think|> <|channel> <channel|> <|turn> <turn|>'
)
PAD, EOS, BOS = 0, 1, 2
END_OF_TURN = SPECIAL.index("<turn|>")
STOP_IDS = [EOS, END_OF_TURN, SPECIAL.index("<|tool_response>")]
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+ ?|\s+"  # words, single digits, signs, white space
EMPTY_THOUGHT = "<|channel>thought\n<channel|>"

TEMPLATE = """\
{%- macro text_of(message) -%}
{%- if message['content'] is string -%}{{- message['content'] | trim -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] | trim -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- macro without_thoughts(text) -%}
{%- for part in text.split('<channel|>') -%}{{- part.split('<|channel>')[0] -}}{%- endfor -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set system = messages[0]['role'] in ['system', 'developer'] -%}
{%- set thinking = enable_thinking is defined and enable_thinking -%}
{%- if system or thinking -%}
{{- '<|turn>system\\n' -}}
{%- if thinking -%}{{- '<|think|>\\n' -}}{%- endif -%}
{%- if system -%}{{- text_of(messages[0]) -}}{%- endif -%}
{{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if system else messages) -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<|turn>' + role + '\\n' -}}
{%- if role == 'model' -%}{{- without_thoughts(text_of(message)) | trim -}}
{%- else -%}{{- text_of(message) -}}{%- endif -%}
{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|turn>model\\n' -}}EMPTY_THOUGHT
{%- endif -%}
"""


def template(empty_thought: bool) -> str:
    """The chat template; the large models' closes an empty thought where thinking is off."""
    shown = EMPTY_THOUGHT.replace("\n", "\\n")
    addition = "{%- if not thinking -%}{{- '" + shown + "' -}}{%- endif -%}"
    return TEMPLATE.replace("EMPTY_THOUGHT", addition if empty_thought else "")


def train_tokenizer() -> Tokenizer:
    """From the training text without made-up words, so that these fall into small pieces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        message["content"]
        for messages in islice(conversations(0), 30_000)
        for message in messages
        if not message["content"].lower().startswith(("spell", "say", "how do you", "repeat"))
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def render(messages: list[Message], *, empty_thought: bool, think: bool = False) -> str:
    """A whole conversation as the template writes it.

    `empty_thought`: the last model turn begins with one, as behind the template's generation
    prompt. `think`: thinking is asked for, which the model learns to answer without a thought.
    """
    parts = ["<bos>"]
    if think and messages[0]["role"] != "system":
        parts.append("<|turn>system\n<|think|>\n<turn|>\n")
    for message in messages:
        role = "model" if message["role"] == "assistant" else message["role"]
        mark = "<|think|>\n" if think and role == "system" else ""
        if empty_thought and not think and message is messages[-1]:
            mark = EMPTY_THOUGHT
        parts.append(f"<|turn>{role}\n{mark}{message['content']}<turn|>\n")
    return "".join(parts)


class Learnt:
    """Tells which ids of a conversation are learnt: what a model turn holds, its end included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.turn, self.end = SPECIAL.index("<|turn>"), END_OF_TURN
        self.thought = SPECIAL.index("<channel|>")
        self.head = tokenizer.encode("<|turn>model\n").ids

    def __call__(self, ids: list[int]) -> list[bool]:
        learnt, inside = [False] * len(ids), False
        skip = len(self.head)
        for index, token in enumerate(ids):
            if token == self.turn and ids[index : index + skip] == self.head:
                inside, first = True, index + skip
            if inside and token == self.thought:
                learnt[first:index] = [False] * (index - first)
                first = index + 1
            if inside and index >= first:
                learnt[index] = True
            if token == self.end:
                inside = False
        return learnt


def save_tokenizer(tokenizer: Tokenizer, folder: Path, chat_template: str | None) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, for a target, chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(SPECIAL[5:]),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
