"""What `/set` can set. Owns: the names, values as text, and what is valid. Knows no terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from mlx_mtp.errors import UsageError, nearest_hint
from mlx_mtp.types import MAX_DEPTH, MAX_TEMPERATURE, SamplingParams

Thinking = Literal["show", "hide", "off"]
THINKING = ("show", "hide", "off")
DEFAULT = "default"


@dataclass(frozen=True)
class Settings:
    """How replies are made.

    Attributes:
        params: sampling parameters; None means the model's own.
        draft_depth: "auto" or a number of drafts per round.
        thinking: let the model think first and show it, hide it, or do not let it.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    draft_depth: int | Literal["auto"] = "auto"
    thinking: Thinking = "off"

    @property
    def thinks(self) -> bool:
        return self.thinking != "off"

    def with_value(self, name: str, text: str) -> Settings:
        """The same with one setting from text; "default" takes it back.

        Raises UsageError: no such setting, or a value out of its range, which is named.
        """
        one = setting(name)
        if text == DEFAULT:
            value: Any = one.default
        else:
            try:
                value = one.parse(text)
            except ValueError as error:
                raise UsageError(f"{name} is {text!r}.", f"Give {one.valid}.") from error
        if name in ("draft_depth", "thinking"):
            return replace(self, **{name: value})
        return replace(self, params=replace(self.params, **{name: value}))

    def value(self, name: str) -> Any:
        """A setting's value."""
        owner = self if name in ("draft_depth", "thinking") else self.params
        return getattr(owner, name)

    def changed(self) -> dict[str, Any]:
        """Settings that are not as they come, by name, as JSON can hold them."""
        values = {one.name: (self.value(one.name), one.default) for one in SETTINGS}
        return {name: value for name, (value, default) in values.items() if value != default}

    @classmethod
    def from_changed(cls, values: dict[str, Any]) -> Settings:
        """What `changed` gave. Raises UsageError for anything else."""
        own = dict(values)
        depth, thinking = own.pop("draft_depth", "auto"), own.pop("thinking", "off")
        settings = cls().with_value("draft_depth", str(depth)).with_value("thinking", str(thinking))
        return replace(settings, params=SamplingParams.from_dict(own))


class Setting(NamedTuple):
    """One setting.

    Attributes:
        parse: text to value; ValueError where it is none.
        valid: what may be given, in words.
        default: the value where nothing is set.
    """

    name: str
    parse: Callable[[str], Any]
    valid: str
    default: Any = None


def setting(name: str) -> Setting:
    """A setting by its name. Raises UsageError that names the nearest."""
    for one in SETTINGS:
        if one.name == name:
            return one
    names = [one.name for one in SETTINGS]
    raise UsageError(f"There is no setting {name!r}.", nearest_hint(name, names))


def _number(kind: type[int] | type[float], low: float, high: float | None) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not low <= value <= (float("inf") if high is None else high):
            raise ValueError
        return value

    return parse


def _probability(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError
    return value


def _depth(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isascii() or not text.isdigit() or int(text) > MAX_DEPTH:
        raise ValueError
    return int(text)


def _word(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return parse


def _flag(text: str) -> bool:
    return {"on": True, "off": False}[_word("on", "off")(text)]


def _strings(text: str) -> tuple[str, ...]:
    """Texts between blanks; quotes hold blanks, and \\n is a line break."""
    import shlex

    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.escape, words.commenters = True, "", ""
    found = tuple(part.replace("\\n", "\n") for part in words)
    if not found or not all(found):
        raise ValueError
    return found


def _ids(text: str) -> tuple[int, ...]:
    return tuple(_number(int, 0, None)(part) for part in text.replace(",", " ").split())


SETTINGS = (
    Setting(
        "temperature", _number(float, 0, MAX_TEMPERATURE), f"a number from 0 to {MAX_TEMPERATURE}"
    ),
    Setting("top_k", _number(int, 0, None), "a whole number from 0; 0 keeps all tokens"),
    Setting("top_p", _probability, "a number above 0, up to 1"),
    Setting("min_p", _number(float, 0, 1), "a number from 0 to 1"),
    Setting("seed", _number(int, 0, 2**32 - 1), f"a whole number from 0 to {2**32 - 1}"),
    Setting("max_tokens", _number(int, 1, None), "a whole number from 1"),
    Setting("stop", _strings, "one or more texts; quote those with blanks", ()),
    Setting("stop_token_ids", _ids, "token ids, whole numbers from 0", ()),
    Setting("ignore_eos", _flag, "on or off", False),
    Setting("draft_depth", _depth, f"auto or a whole number from 0 to {MAX_DEPTH}", "auto"),
    Setting("thinking", _word(*THINKING), "show, hide or off", "off"),
)
