"""Reading config.json. Owns: typed look-ups that fail with a sentence, and the text model's keys in
their published flat form. Knows nothing of pairs or weights.

Three writings of the same model are read: the published flat keys, transformers' newer
``per_layer_config`` (which drops ``global_head_dim`` and ``num_global_key_value_heads``), and
configs whose text keys stand at the top level. Defaults are those of transformers'
``Gemma4TextConfig``, not of mlx-lm, which assumes E2B.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

from mlx_mtp.errors import IncompatibleError
from mlx_mtp.plain import quoted

SLIDING = "sliding_attention"
FULL = "full_attention"
LAYER_TYPES = (SLIDING, FULL)

MAX_SIZE = 2**31 - 1
"""Largest size that an array can have in one dimension."""
MAX_LAYERS = 1024
"""Most layers of a model, with room: modules are made for each before any file is read."""

# transformers, models/gemma4/configuration_gemma4.py, default_rope_params
_ROPE_DEFAULTS: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_REQUIRED: Any = object()
_T = TypeVar("_T")


class Fields:
    """Typed look-ups in one JSON object; a null counts as absent.

    Args:
        values: the object.
        where: what it is called in messages, e.g. ``config.json``.

    Every method raises IncompatibleError with a sentence that names the key.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise IncompatibleError(f"{where} is not a JSON object.", _fetch_again(where))
        self.values: dict[str, Any] = values
        self.where = where

    def fail(self, key: str, what: str) -> IncompatibleError:
        """The error that says what is wrong with a key."""
        return IncompatibleError(f"{self.where}: {key} {what}.", _fetch_again(self.where))

    def integer(
        self, key: str, default: _T = _REQUIRED, low: int = 0, high: int = MAX_SIZE
    ) -> int | _T:
        value = self._get(key, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.fail(key, f"is {quoted(value)}, not a whole number of at least {low}")
        if value > high:
            raise self.fail(key, f"is {quoted(value)}, more than {high}")
        return value

    def number(self, key: str, default: _T = _REQUIRED) -> float | _T:
        value = self._get(key, default)
        if value is default:
            return default
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) < 1e300:  # false for NaN as well
            raise self.fail(key, f"is {quoted(value)}, not a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {quoted(value)}, not true or false")
        return value

    def text(self, key: str, default: _T = _REQUIRED) -> str | _T:
        value = self._get(key, default)
        if value is default:
            return default
        if not isinstance(value, str):
            raise self.fail(key, f"is {quoted(value)}, not text")
        return value

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        """An id or a list of ids; None where the key is absent."""
        value = self._get(key, None)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.fail(key, f"is {quoted(value)}, not a token id or a list of them")
        return tuple(ids)

    def nested(self, key: str) -> Fields | None:
        value = self._get(key, None)
        return None if value is None else Fields(value, f"{self.where}: {key}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.fail(key, "is missing")
        return default


def _fetch_again(where: str) -> str:
    file = where.partition(":")[0].split()[-1]
    return f"Take the {file} of the original checkpoint."


def declared_dtype(config: Fields) -> str | None:
    """The dtype the checkpoint says it has, e.g. ``bfloat16``; None where it says nothing."""
    scopes = [config, config.nested("text_config")]
    for scope in scopes:
        for key in ("dtype", "torch_dtype"):
            value = None if scope is None else scope.text(key, None)
            if value is not None:
                return value.removeprefix("torch.")
    return None


def flat_text_config(config: Fields) -> dict[str, Any]:
    """The text model's keys, complete and flat, as mlx-lm's ``gemma4_text.ModelArgs`` names them.

    Raises IncompatibleError for a missing or ill-typed key and for what mlx-lm's modules cannot
    express (another activation, bidirectional text, a head count of its own for one layer).
    """
    text = config.nested("text_config") or config
    unified = "unified" in f"{config.text('model_type')} {text.text('model_type', '')}"
    layers = text.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    types = _layer_types(text, layers)
    moe = text.flag("enable_moe_block", False)
    need: Any = _REQUIRED if moe else None
    vocab = text.integer("vocab_size", None, low=1) or config.integer("vocab_size", low=1)
    flat: dict[str, Any] = {
        "model_type": "gemma4_unified_text" if unified else "gemma4_text",
        "hidden_size": text.integer("hidden_size", low=1),
        "hidden_activation": text.text("hidden_activation", "gelu_pytorch_tanh"),
        "intermediate_size": text.integer("intermediate_size", low=1),
        "num_hidden_layers": layers,
        "layer_types": types,
        "num_attention_heads": text.integer("num_attention_heads", low=1),
        "num_key_value_heads": text.integer("num_key_value_heads", low=1),
        "head_dim": text.integer("head_dim", low=1),
        "attention_k_eq_v": text.flag("attention_k_eq_v", False),
        "sliding_window": text.integer("sliding_window", low=1),
        "num_kv_shared_layers": text.integer("num_kv_shared_layers", 0),
        "use_double_wide_mlp": text.flag("use_double_wide_mlp", False),
        "vocab_size": vocab,
        # transformers' unified text class has no per-layer embeddings; the other defaults to 256
        "hidden_size_per_layer_input": text.integer(
            "hidden_size_per_layer_input",
            0 if unified or "hidden_size_per_layer_input" in text.values else 256,
        ),
        "vocab_size_per_layer_input": text.integer("vocab_size_per_layer_input", vocab),
        "enable_moe_block": moe,
        "num_experts": text.integer("num_experts", need, low=1),
        "top_k_experts": text.integer("top_k_experts", need, low=1),
        "moe_intermediate_size": text.integer("moe_intermediate_size", need, low=1),
        "rope_parameters": _rope_parameters(text),
        "rms_norm_eps": text.number("rms_norm_eps", 1e-6),
        "final_logit_softcapping": text.number("final_logit_softcapping", None),
        "max_position_embeddings": text.integer("max_position_embeddings", 131_072, low=1),
        "tie_word_embeddings": text.flag(
            "tie_word_embeddings", config.flag("tie_word_embeddings", True)
        ),
        "pad_token_id": text.integer("pad_token_id", 0),
    }
    flat.update(_full_attention_heads(text, flat))
    _check_sizes(text, flat)
    for key in ("rms_norm_eps", "final_logit_softcapping"):
        if flat[key] is not None and flat[key] <= 0:
            raise text.fail(key, f"is {flat[key]}, not above 0")
    if flat["hidden_activation"] != "gelu_pytorch_tanh":
        given = quoted(flat["hidden_activation"])
        raise text.fail("hidden_activation", f"is {given}, not Gemma 4's own")
    if text.text("use_bidirectional_attention", None) == "all":
        raise text.fail("use_bidirectional_attention", "is 'all', so this model writes no text")
    return flat


def kept_keys(config: Fields) -> dict[str, Any]:
    """Keys that a rewritten config keeps at its top: names and special token ids."""
    text = config.nested("text_config")
    own = {"eos_token_id", "bos_token_id"}
    kept = {key: value for key, value in (text.values if text else {}).items() if key in own}
    for key, value in config.values.items():
        if key == "architectures" or key.endswith(("_token_id", "_token_index")):
            kept[key] = value
    return deepcopy(kept)


def _layer_types(text: Fields, layers: int) -> list[str]:
    types = text.values.get("layer_types")
    if types is None:  # transformers' default: five sliding layers, one full, the last one full
        types = [FULL if (i + 1) % 6 == 0 or i + 1 == layers else SLIDING for i in range(layers)]
    if not isinstance(types, list) or any(name not in LAYER_TYPES for name in types):
        raise text.fail("layer_types", f"is not a list of {' and '.join(LAYER_TYPES)}")
    if len(types) != layers:
        raise text.fail("layer_types", f"names {len(types)} layers, num_hidden_layers {layers}")
    return list(types)


def _rope_parameters(text: Fields) -> dict[str, dict[str, Any]]:
    given = text.nested("rope_parameters")
    rope = {}
    for layer_type, default in _ROPE_DEFAULTS.items():
        own = None if given is None else given.nested(layer_type)
        rope[layer_type] = dict(default if own is None else own.values)
        _check_rope(Fields(rope[layer_type], f"{text.where}: rope_parameters: {layer_type}"))
    return rope


def _check_rope(rope: Fields) -> None:
    kind = rope.text("rope_type", "default")
    if kind not in ("default", "linear", "proportional"):
        raise rope.fail("rope_type", f"is {quoted(kind)}, which Gemma 4 does not use")
    if rope.number("rope_theta", 10_000.0) <= 0:
        raise rope.fail("rope_theta", "is not above 0")
    if not 0 < rope.number("partial_rotary_factor", 1.0) <= 1:
        raise rope.fail("partial_rotary_factor", "is not in (0, 1]")
    if rope.number("factor", 1.0 if kind != "linear" else _REQUIRED) <= 0:
        raise rope.fail("factor", "is not above 0")


def _check_sizes(text: Fields, flat: dict[str, Any]) -> None:
    """Refuse what MLX could make no array of, and more experts for a token than there are."""
    products = [
        (name, heads)
        for name in ("head_dim", "global_head_dim")
        for heads in (
            "num_attention_heads",
            "num_key_value_heads",
            "num_global_key_value_heads",
        )
    ]
    products.append(("hidden_size_per_layer_input", "num_hidden_layers"))
    for key, other in products:
        size = flat[key] * (flat[other] or 0)
        if size > MAX_SIZE:
            raise text.fail(
                f"{key} x {other}", f"needs a matrix of {size:,} rows, more than MLX can hold"
            )
    for key in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
        size = 2 * (flat[key] or 0)
        if size > MAX_SIZE:
            raise text.fail(key, f"needs a matrix of {size:,} rows, more than MLX can hold")
    if flat["enable_moe_block"] and flat["top_k_experts"] > flat["num_experts"]:
        raise text.fail("top_k_experts", f"is {flat['top_k_experts']} of {flat['num_experts']}")


def _full_attention_heads(text: Fields, flat: dict[str, Any]) -> dict[str, int | None]:
    """global_head_dim and num_global_key_value_heads, from either writing of the config."""
    overrides = text.nested("per_layer_config")
    if overrides is None:
        # transformers gives full layers KV heads of their own only where K equals V
        own = flat["attention_k_eq_v"]
        return {
            "global_head_dim": text.integer("global_head_dim", 512, low=1),
            "num_global_key_value_heads": (
                text.integer("num_global_key_value_heads", None, low=1) if own else None
            ),
        }
    shapes: dict[str, set[tuple[int, int]]] = {SLIDING: set(), FULL: set()}
    base = (flat["head_dim"], flat["num_key_value_heads"])
    for index, layer_type in enumerate(flat["layer_types"]):
        layer = overrides.nested(str(index)) or Fields({}, overrides.where)
        for key, value in layer.values.items():
            if key not in ("head_dim", "num_key_value_heads") and value != flat.get(key):
                raise layer.fail(
                    key, f"is {quoted(value)} for one layer only, which MLX cannot express"
                )
        head_dim = layer.integer("head_dim", base[0], low=1)
        shapes[layer_type].add((head_dim, layer.integer("num_key_value_heads", base[1], low=1)))
    if len(shapes[FULL]) > 1 or shapes[SLIDING] - {base}:
        raise text.fail("per_layer_config", "gives layers of one type heads of different shapes")
    head_dim, kv_heads = next(iter(shapes[FULL]), base)
    if kv_heads != base[1] and not flat["attention_k_eq_v"]:
        raise text.fail("per_layer_config", "changes KV heads although attention_k_eq_v is false")
    return {
        "global_head_dim": head_dim,
        "num_global_key_value_heads": kv_heads if flat["attention_k_eq_v"] else None,
    }
