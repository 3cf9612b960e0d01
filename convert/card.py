"""What OUT says about itself. Owns: mlx_mtp.json and the model card, both made from the plan and
the check, so that they say what was done and nothing else.
"""

from __future__ import annotations

from typing import Any

from mlx_mtp.convert.check import CheckReport
from mlx_mtp.convert.parts import PartPlan
from mlx_mtp.convert.plan import Plan
from mlx_mtp.convert.recipes import Params
from mlx_mtp.versions import versions


def record(part: PartPlan) -> dict[str, Any]:
    """What mlx_mtp.json and ``--json`` say of a part."""
    return {
        "source": part.label,
        "revision": part.revision,
        "dtype": part.dtype,
        "quantization": part.quantization,
        "unquantized": part.unquantized,
    }


def origin(plan: Plan, check: CheckReport | None) -> dict[str, Any]:
    """The contents of mlx_mtp.json."""
    options = plan.options
    return {
        "format": 1,
        "plan": plan.digest,
        "recipe": {
            "name": options.name,
            "keep": list(options.keep),
            "towers": options.towers,
            "qat": plan.is_qat,
        },
        "target": record(plan.target),
        "drafter": None if plan.drafter is None else record(plan.drafter),
        "versions": versions(),
        "check": None if check is None else document(check),
    }


def document(check: CheckReport) -> dict[str, Any]:
    """A check's results as JSON."""
    return {
        "tensors": check.tensors,
        "errors": {part: round(error, 6) for part, error in sorted(check.errors.items())},
        "decoding": check.decoding._asdict(),
    }


def model_card(plan: Plan, check: CheckReport | None, name: str) -> str:
    """README.md of OUT."""
    target, drafter = plan.target, plan.drafter
    lines = ["---", "library_name: mlx", "pipeline_tag: text-generation", "tags:", "- mlx"]
    lines += ["- gemma4"]
    if target.revision is not None:
        lines += ["base_model:", f"- {target.label}"]
    lines += ["---", "", f"# {name}", ""]
    lines.append(f"{_made_of(target)}, converted for MLX by mlx-mtp: {how(target)}.")
    if drafter is not None:
        lines += ["", f"`drafter/` is {_made_of(drafter)}: {how(drafter)}."]
    lines += ["", "```", f'mlx-mtp chat {name} -p "Hello"']
    lines += [f'mlx_lm.generate --model {name} --prompt "Hello"   # the target alone', "```", ""]
    lines += _differing(target)
    lines.append(_towers(plan))
    lines += ["", _checked(plan, check), ""]
    lines.append("The licence and the terms of the original apply.")
    made = ", ".join(f"{package} {found}" for package, found in versions().items() if found)
    return "\n".join([*lines, "", f"Made with {made}.", ""])


def how(part: PartPlan) -> str:
    """For example ``4 bit affine, groups of 64, the rest bfloat16``."""
    if part.quantization is None:
        return part.dtype
    bits, group, mode = (part.quantization[key] for key in ("bits", "group_size", "mode"))
    return f"{bits} bit {mode}, groups of {group}, the rest {part.dtype}"


def _made_of(part: PartPlan) -> str:
    revision = "" if part.revision is None else f" at revision {part.revision}"
    return f"{part.label}{revision}"


def _differing(part: PartPlan) -> list[str]:
    """The matrices that are stored otherwise than most, by their kind."""
    kinds: dict[str, set[str]] = {}
    for tensor in part.tensors:
        if tensor.params is not None and tensor.action == "quantize":
            kinds.setdefault(tensor.part, set()).add(format_of(tensor.params))
    if len(set().union(*kinds.values())) < 2:
        return []
    rows = [f"| {kind} | {', '.join(sorted(formats))} |" for kind, formats in kinds.items()]
    return ["| matrices | stored as |", "|---|---|", *rows, ""]


def format_of(params: Params) -> str:
    """For example ``4 bit affine, groups of 64``."""
    return f"{params['bits']} bit {params['mode']}, groups of {params['group_size']}"


def _towers(plan: Plan) -> str:
    if plan.options.towers == "keep":
        return "Vision and audio towers are as in the original; mlx-mtp and mlx-lm ignore them."
    return "Text only: vision and audio towers of the original are left out."


def _checked(plan: Plan, check: CheckReport | None) -> str:
    if check is None:
        return "What was written has not been checked."
    said = [
        f"a sample of each of {check.tensors} tensors was compared with its source after writing"
    ]
    if check.errors:
        worst = max(check.errors.values())
        said.append(f"the largest relative error of a quantized one is {worst:.3f}")
    decoding = check.decoding
    if decoding.note:
        said.append(decoding.note)
    elif decoding.identical is not None:
        same = "the same" if decoding.identical else "not quite the same"
        said.append(
            f"{decoding.tokens} tokens of built-in prompts were {same} with drafts and without, "
            f"and {decoding.accepted} of {decoding.drafted} drafts were accepted"
        )
    return "; ".join(said) + "."
