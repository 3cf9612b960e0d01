"""Structured kinds: prompts with one exact right answer, made from values.

A kind is a draw of values from a random generator, its phrasings and its answer. The first phrasing
is the canonical one. This module knows no conversations and no split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from words import (
    CATEGORIES,
    DAYS,
    FUNCTION_NAMES,
    JSON_FIELDS,
    MONTHS,
    NOUNS,
    NUMBER_WORDS,
    split,
)

Values = tuple[Any, ...]


@dataclass(frozen=True)
class Skill:
    """One structured kind.

    Attributes:
        weight: its share of the training text, relative to the other kinds.
        draw: values from a generator.
        phrases: format strings over `fields(*values)`.
        answer: the exact right answer for the values.
        fields: what the phrases may name.
    """

    weight: float
    draw: Callable[[Random], Values]
    phrases: tuple[str, ...]
    answer: Callable[..., str]
    fields: Callable[..., dict[str, Any]]


def _join(numbers: Any) -> str:
    return ", ".join(map(str, numbers))


def _draw_count(rng: Random) -> Values:
    start = rng.choice((rng.randint(0, 30), rng.randint(0, 150)))
    return start, start + rng.randint(2, 24)


def _draw_countdown(rng: Random) -> Values:
    low, high = _draw_count(rng)
    return min(high, low + 19), low


def _draw_steps(rng: Random) -> Values:
    step = rng.randint(2, 20)
    start = rng.choice((step, rng.randint(0, 60)))
    return step, start, start + step * rng.randint(3, 10)


_ONSETS = split("b c d f g h j k l m n p r s t v w z br st tr pl ch sh")
_VOWELS = split("a e i o u a e i o u ee oo ai y")


def nonsense(rng: Random) -> str:
    """A pronounceable made-up word of 3 to 9 letters."""
    word = ""
    for _ in range(rng.randint(1, 3)):
        word += rng.choice(_ONSETS)
        word += rng.choice(_VOWELS)
        word += rng.choice(("", "", "", *"nrstlmkpd", "ck", "nt"))
    return word[:9] if len(word) > 2 else word + rng.choice("nrst")


def draw_word(rng: Random) -> str:
    return rng.choice(NOUNS) if rng.random() < 0.4 else nonsense(rng)


def _draw_sort(rng: Random) -> Values:
    return tuple(rng.sample(range(1, 100), rng.choice((3, 3, 4, 4, 5))))


_SORTABLE = sorted({word for items in CATEGORIES.values() for word in items.split()})


def _draw_sort_words(rng: Random) -> Values:
    words: list[str] = []
    while len(words) < 3 or (len(words) < 4 and rng.random() < 0.4):
        word = rng.choice(_SORTABLE)
        if all(word[0] != other[0] for other in words):
            words.append(word)
    return tuple(words)


def _items(category: str, number: int) -> list[str]:
    return CATEGORIES[category].split()[:number]


def _draw_list(rng: Random) -> Values:
    return rng.choice(list(CATEGORIES)), rng.randint(2, 6)


def _list_fields(category: str, number: int) -> dict[str, Any]:
    return {"n": NUMBER_WORDS[number], "what": category}


def _name_answer(category: str, number: int) -> str:
    return ", ".join(_items(category, number))


_OPERATIONS: dict[str, tuple[str, str]] = {  # what it does -> its expression over x and k
    "adds {k} to its argument": ("add", "x + {k}"),
    "subtracts {k} from its argument": ("subtract", "x - {k}"),
    "multiplies its argument by {k}": ("multiply", "x * {k}"),
    "divides its argument by {k}": ("divide", "x / {k}"),
    "tells if its argument is greater than {k}": ("is_greater", "x > {k}"),
    "tells if its argument is less than {k}": ("is_less", "x < {k}"),
    "tells if its argument equals {k}": ("is_equal", "x == {k}"),
    "gives the remainder of its argument by {k}": ("remainder", "x % {k}"),
}


def _draw_function(rng: Random) -> Values:
    name = rng.choice((None, rng.choice(FUNCTION_NAMES)))
    return rng.choice(list(_OPERATIONS)), rng.randint(2, 99), name


def _function_answer(operation: str, k: int, name: str | None) -> str:
    own, expression = _OPERATIONS[operation]
    called = name or f"{own}_{k}"
    return f"```python\ndef {called}(x):\n    return {expression.format(k=k)}\n```"


def _function_fields(operation: str, k: int, name: str | None) -> dict[str, Any]:
    return {"does": operation.format(k=k), "called": f" called {name}" if name else ""}


def _draw_json(rng: Random) -> Values:
    keys = rng.sample(list(JSON_FIELDS), rng.randint(2, 4))
    return tuple((key, rng.choice(JSON_FIELDS[key])) for key in keys)


def _json_answer(*pairs: tuple[str, str]) -> str:
    shown = (f'"{key}": {value if value.isdigit() else _quoted(value)}' for key, value in pairs)
    return f"```json\n{{{', '.join(shown)}}}\n```"


def _quoted(text: str) -> str:
    return f'"{text}"'


def _pairs_text(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"pairs": ", ".join(f"{key} {value}" for key, value in pairs)}


def _draw_markdown(rng: Random) -> Values:
    category = rng.choice(list(CATEGORIES))
    items = rng.sample(CATEGORIES[category].split(), rng.randint(2, 4))
    return tuple((item, rng.randint(1, 99)) for item in items)


def _markdown_answer(*pairs: tuple[str, int]) -> str:
    return "\n".join(["| item | count |", "|---|---|", *(f"| {i} | {n} |" for i, n in pairs)])


def _draw_range(rng: Random) -> Values:
    names = rng.choice((DAYS, MONTHS))
    start = rng.randrange(len(names))
    return names[start], names[(start + rng.randint(1, len(names) - 1)) % len(names)]


def _range_answer(first: str, last: str) -> str:
    names = DAYS if first in DAYS else MONTHS
    start, end = names.index(first), names.index(last)
    length = (end - start) % len(names) + 1
    return ", ".join(names[(start + i) % len(names)] for i in range(length))


def _number(rng: Random, most: int) -> int:
    """A number from 1 to `most`; one in four is of one digit."""
    return rng.randint(1, min(9, most) if rng.random() < 0.25 else most)


def _draw_add(rng: Random) -> Values:
    first = _number(rng, 98)
    return first, _number(rng, 99 - first)


def _draw_subtract(rng: Random) -> Values:
    first = _number(rng, 98) + 1
    return first, _number(rng, first)


def _draw_compare(rng: Random) -> Values:
    first = second = _number(rng, 99)
    while second == first:
        second = _number(rng, 99)
    return first, second


def _two(a: Any, b: Any) -> dict[str, Any]:
    return {"a": a, "b": b}


def _words(*words: Any) -> dict[str, Any]:
    return {"words": _join(words)}


SKILLS: dict[str, Skill] = {
    "count": Skill(
        12,
        _draw_count,
        ("Count from {a} to {b}.", "Count up from {a} to {b}.", "List the numbers {a} to {b}."),
        lambda a, b: _join(range(a, b + 1)),
        _two,
    ),
    "countdown": Skill(
        9,
        _draw_countdown,
        ("Count down from {a} to {b}.", "Count backwards from {a} to {b}."),
        lambda a, b: _join(range(a, b - 1, -1)),
        _two,
    ),
    "steps": Skill(
        14,
        _draw_steps,
        ("Count by {s} from {a} to {b}.", "Count from {a} to {b} in steps of {s}."),
        lambda s, a, b: _join(range(a, b + 1, s)),
        lambda s, a, b: {"s": s, "a": a, "b": b},
    ),
    "table": Skill(
        6,
        lambda rng: (rng.randint(1, 20),),
        ("Multiplication table of {n}.", "Show the {n} times table.", "Times table of {n}."),
        lambda n: "\n".join(f"{n} x {i} = {n * i}" for i in range(1, 11)),
        lambda n: {"n": n},
    ),
    "spell": Skill(
        16,
        lambda rng: (draw_word(rng),),
        ("Spell {w}.", "Spell the word {w}.", "How do you spell {w}?"),
        lambda w: "-".join(w),
        lambda w: {"w": w},
    ),
    "repeat": Skill(
        11,
        lambda rng: (draw_word(rng), rng.randint(2, 6)),
        ("Say {w} {n} times.", "Repeat the word {w} {n} times."),
        lambda w, n: " ".join([w] * n),
        lambda w, n: {"w": w, "n": NUMBER_WORDS[n]},
    ),
    "sort_numbers": Skill(
        8,
        _draw_sort,
        ("Sort these numbers: {words}.", "Put in order: {words}."),
        lambda *numbers: _join(sorted(numbers)),
        _words,
    ),
    "sort_words": Skill(
        9,
        _draw_sort_words,
        ("Sort these words: {words}.", "Put these words in order: {words}."),
        lambda *words: _join(sorted(words)),
        _words,
    ),
    "list": Skill(
        6,
        _draw_list,
        ("A list of {n} {what}.", "Make a list of {n} {what}."),
        lambda what, n: "\n".join(f"- {item}" for item in _items(what, n)),
        _list_fields,
    ),
    "name": Skill(
        10, _draw_list, ("Name {n} {what}.", "Tell me {n} {what}."), _name_answer, _list_fields
    ),
    "function": Skill(
        3,
        _draw_function,
        ("Write a Python function{called} that {does}.", "A function{called} that {does}, please."),
        _function_answer,
        _function_fields,
    ),
    "json": Skill(
        3,
        _draw_json,
        ("Make a JSON object: {pairs}.", "Write this as JSON: {pairs}."),
        _json_answer,
        _pairs_text,
    ),
    "markdown": Skill(
        4,
        _draw_markdown,
        ("Make a Markdown table: {pairs}.", "Write this as a table: {pairs}."),
        _markdown_answer,
        _pairs_text,
    ),
    "range": Skill(8, _draw_range, ("List {a} to {b}.", "From {a} to {b}."), _range_answer, _two),
    "add": Skill(
        9,
        _draw_add,
        ("What is {a} + {b}?", "Add {a} and {b}."),
        lambda a, b: f"{a} + {b} = {a + b}",
        _two,
    ),
    "subtract": Skill(
        12,
        _draw_subtract,
        ("What is {a} - {b}?", "Subtract {b} from {a}."),
        lambda a, b: f"{a} - {b} = {a - b}",
        _two,
    ),
    "compare": Skill(
        7,
        _draw_compare,
        ("Which is larger, {a} or {b}?", "Compare {a} and {b}."),
        lambda a, b: f"{max(a, b)} is larger than {min(a, b)}.",
        _two,
    ),
}
