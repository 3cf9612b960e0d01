"""What a model asks for itself. Owns: generation_config.json translated, and the stop ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_mtp.config_json import Fields
from mlx_mtp.errors import IncompatibleError


@dataclass(frozen=True)
class GenerationDefaults:
    """What a checkpoint wants where the user says nothing.

    Attributes:
        eos_token_ids: every id that ends a turn; Gemma 4 has three.
        suppress_tokens: ids that are never produced.
        temperature: 0 is greedy.
        top_k, top_p, min_p: 0, 1 and 0 where the checkpoint says nothing (off).
        num_assistant_tokens: drafting depth an assistant's own file proposes, or None.
    """

    eos_token_ids: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_assistant_tokens: int | None = None

    @classmethod
    def from_dict(
        cls, generation: dict[str, Any] | None, config: dict[str, Any] | None = None
    ) -> GenerationDefaults:
        """Translate generation_config.json (None: there is no such file) and config.json.

        Stop ids come from the first of these that names any: generation_config.json, the top
        level of config.json, its text_config. ``do_sample: false`` means temperature 0, and so
        does a file that mentions neither sampling nor a temperature, as in transformers.

        Raises IncompatibleError for an ill-typed key.
        """
        own = Fields({} if generation is None else generation, "generation_config.json")
        top = Fields({} if config is None else config, "config.json")
        text = top.nested("text_config")
        eos: tuple[int, ...] = ()
        for scope in (own, top, text):
            eos = eos or (scope and scope.token_ids("eos_token_id")) or ()
        temperature = own.number("temperature", None)
        if temperature is None:
            temperature = 1.0 if own.flag("do_sample", False) else 0.0
        elif not own.flag("do_sample", True):
            temperature = 0.0
        defaults = cls(
            eos_token_ids=eos,
            suppress_tokens=own.token_ids("suppress_tokens") or (),
            temperature=temperature,
            top_k=own.integer("top_k", 0),
            top_p=own.number("top_p", 1.0),
            min_p=own.number("min_p", 0.0),
            num_assistant_tokens=own.integer("num_assistant_tokens", None, low=1),
        )
        if defaults.temperature < 0:
            raise own.fail("temperature", f"is {defaults.temperature}, below 0")
        if not 0 < defaults.top_p <= 1:
            raise own.fail("top_p", f"is {defaults.top_p}, not in (0, 1]")
        if not 0 <= defaults.min_p <= 1:
            raise own.fail("min_p", f"is {defaults.min_p}, not in [0, 1]")
        return defaults

    def check_vocabulary(self, size: int) -> None:
        """Raises IncompatibleError where suppress_tokens does not fit a vocabulary of this size."""
        outside = [token for token in self.suppress_tokens if token >= size]
        if outside or len(set(self.suppress_tokens)) == size:
            what = f"id {outside[0]}, outside the vocabulary" if outside else "every token"
            raise IncompatibleError(
                f"generation_config.json: suppress_tokens names {what}.",
                "Take the generation_config.json of the original checkpoint.",
            )
