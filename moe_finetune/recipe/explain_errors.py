"""What is wrong with a recipe's values: a line each with file, line, key and pydantic's words."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from moe_finetune.errors import MoeFinetuneError, RecipeError, did_you_mean
from moe_finetune.recipe.fields_of_trl import trainer_keys
from moe_finetune.recipe.stages import CHECKPOINTING, OWNED, STAGES, Stage, trainer_section
from moe_finetune.recipe.yaml_tree import Key, Tree, dotted

Model = TypeVar("Model", bound=BaseModel)


def from_tree(
    model: type[Model], tree: Tree, refused: type[MoeFinetuneError] = RecipeError, **defaults: Any
) -> Model:
    """Validate merged values, with ``defaults`` for missing keys."""
    # So that the required keys of a missing section are named.
    empty: dict[str, Any] = {
        name: {}
        for name, field in model.model_fields.items()
        for section in _sections(field.annotation)
        if field.is_required() and any(f.is_required() for f in section.model_fields.values())
    }
    try:
        return model.model_validate({**empty, **defaults, **tree.values})
    except ValidationError as error:
        lines = describe(model, error)
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON escapes allow
        lines = [f"{error.object!a} contains characters that cannot be encoded in UTF-8"]
    raise refused("\n".join(placed(tree, line) for line in lines))


def placed(tree: Tree, line: str) -> str:
    """``line``, which starts with a dotted key, with the file and line that set the key."""
    key = tuple(int(p) if p.isdigit() else p for p in line.partition(": ")[0].split("."))
    origin = tree.origin(key)
    return f"{origin}: {line}" if origin else line


def describe(model: type[BaseModel], error: ValidationError, prefix: Key = ()) -> list[str]:
    """Pydantic's errors as one line per key: ``key.path``, the value, and what is expected."""
    expected: dict[tuple[str, str], list[str]] = {}  # by key and value
    lines: list[str] = []
    for item in error.errors():
        kind = item["type"]
        message = item["msg"]
        cause = item.get("ctx", {}).get("error")
        key = dotted((*prefix, *(part for part in item["loc"] if not _is_union_tag(part))))
        if isinstance(cause, MoeFinetuneError):
            lines += str(cause).split("\n")
        elif kind == "extra_forbidden":
            lines.append(f"{key}: unknown key{_nearest(model, item['loc'])}")
        elif kind == "missing":
            lines.append(f"{key}: required, but missing")
        elif message.startswith("Input should be "):
            text = re.sub(r" or instance of \w+$", "", message.removeprefix("Input should be "))
            expected.setdefault((key, f"{item['input']!r:.200}"), []).append(text)
        else:
            lines.append(f"{key}: {cause or message}")
    described = {line.partition(": ")[0] for line in lines}
    keys = described | {key for key, _ in expected}
    for (key, value), texts in expected.items():
        # The branch of a union whose error is deepest is the one that was meant.
        if key not in described and not any(other.startswith(f"{key}.") for other in keys):
            text = " or ".join(dict.fromkeys(texts))
            yaml = '; YAML reads an unquoted no as false, so write "no"'
            no = yaml if value == "False" and "'no'" in text else ""
            lines.append(f"{key}: must be {text}, not {value}{no}")
    return lines


def check_trainer(
    trainer: Mapping[str, Any],
    stage: Stage,
    section_of: Callable[[Stage], type[BaseModel] | None] = trainer_section,
) -> Iterator[str]:
    """Yield a line for each key of ``trainer:`` that TRL's class for the stage cannot take."""
    sections = {other: section_of(other) or BaseModel for other in STAGES.values()}
    model = sections[stage]
    for name in trainer:
        if name in OWNED:
            yield f"trainer.{name}: cannot be set here: {OWNED[name]}"
        elif name not in model.model_fields:
            others = [o.name for o in STAGES.values() if name in sections[o].model_fields]
            near = difflib.get_close_matches(str(name), model.model_fields, n=1, cutoff=0.75)
            hint = f"did you mean '{near[0]}'?" if near else "docs/reference/trainer.md lists them"
            if f"trainer.{name}" in OTHER_NAMES:
                hint = f"did you mean '{OTHER_NAMES[f'trainer.{name}']}'?"
            elif others and not near:
                hint = f"it belongs to stage {' or '.join(others)}: set stage: {others[0]}"
            yield f"trainer.{name}: unknown key of TRL's {stage.config}; {hint}"
    values = {name: value for name, value in trainer.items() if name in model.model_fields}
    if values.get("max_steps") == -1:  # the number of epochs counts
        del values["max_steps"]
    try:
        model.model_validate(values)
    except ValidationError as error:
        yield from describe(model, error, ("trainer",))
    yield from _refused_here(trainer)


def _refused_here(trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key that would not train the losses inside the layers."""
    if True in (trainer.get("fp16"), trainer.get("fp16_full_eval")):
        yield "trainer.fp16: does not scale the losses inside the layers; use model.dtype: bfloat16"
    if trainer.get("ignore_data_skip"):
        yield "trainer.ignore_data_skip: --resume would train on other rows; leave it out"
    multiple = trainer.get("pad_to_multiple_of")  # or "auto"
    if isinstance(multiple, int) and multiple < 1:
        yield f"trainer.pad_to_multiple_of: must be 1 or more, not {multiple}; leave it out"
    for key in CHECKPOINTING:
        checkpointing = trainer.get(f"{key}_kwargs")
        if isinstance(checkpointing, dict) and checkpointing.get("use_reentrant"):
            yield (
                f"trainer.{key}_kwargs: reentrant checkpointing gives wrong gradients "
                "of losses that join two layers; set use_reentrant: false"
            )
    liger, key = trainer.get("liger_kernel_config") or {}, "trainer.liger_kernel_config"
    if liger and not trainer.get("use_liger_kernel"):
        yield f"{key}: has no effect; set use_liger_kernel: true"
    elif trainer.get("use_liger_kernel") and isinstance(liger, dict):
        if liger.get("swiglu", True):
            yield (
                f"{key}: Liger's swiglu, on unless it is named, replaces the experts' forward that "
                "the losses read; set liger_kernel_config: {swiglu: false}"
            )
        if liger.get("fused_linear_cross_entropy"):
            yield f"{key}: fused_linear_cross_entropy replaces the model's forward; leave it out"


OTHER_NAMES = {
    **dict.fromkeys(("lora.r", "lora.lora_r", "lora.lora_rank"), "lora.rank"),
    "lora.lora_alpha": "lora.alpha",
    "lora.lora_dropout": "lora.dropout",
    "lora.target_modules": "lora.targets",
    **dict.fromkeys(("trainer.load_in_4bit", "trainer.load_in_8bit"), "model.quantization: nf4"),
    **dict.fromkeys(("trainer.max_seq_length", "trainer.max_seq_len"), "data.max_length"),
    "trainer.warmup_ratio": "warmup_steps, which below 1 is a share of the steps",
    "trainer.group_by_length": "train_sampling_strategy: group_by_length",
    "trainer.lora_rank": "lora.rank",
}
"""Keys of other programs and versions, and ours."""


def _is_union_tag(part: str | int) -> bool:
    """Return whether ``part`` is a branch of a union, as in ``list[str]`` or ``DataSource``."""
    if not isinstance(part, str):
        return False
    # recipe keys are lower case, so a capital begins the name of a section's class
    is_type = part in ("str", "int", "float", "bool") or part.startswith("constrained-")
    return is_type or "[" in part or part[:1].isupper()


def _nearest(model: type[BaseModel], loc: tuple[str | int, ...]) -> str:
    """``; did you mean ...``: a key of the same section, else one of this name in another.

    An item of a list has no such relatives: a reward's `file` is not that of chosen experts.
    """
    if (key := dotted(loc)) in OTHER_NAMES:
        return f"; did you mean '{OTHER_NAMES[key]}'?"
    section, name = model, str(loc[-1])
    for part in loc[:-1]:
        field = section.model_fields.get(str(part))
        section = next(_sections(field.annotation), section) if field else section
    names = list(section.model_fields)
    of_item = any(isinstance(part, int) for part in loc)
    if not of_item and not difflib.get_close_matches(name, names, n=1, cutoff=0.75):
        keys = {key for key in _keys(model) if key.rpartition(".")[2] == name}
        highest = [key for key in keys if key.count(".") == min(k.count(".") for k in keys)]
        highest = [key for key in highest if key.startswith("trainer.")] or highest
        if len(highest) == 1:
            return f"; did you mean '{highest[0]}'?"
    return did_you_mean(name, names)


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All keys of sections, with TRL's in ``trainer``."""
    for name, field in model.model_fields.items():
        sections: Iterable[type[BaseModel]] = _sections(field.annotation)
        for section in [trainer_keys(STAGES["sft"])] if name == "trainer" else sections:
            for inner in section.model_fields:
                yield f"{prefix}{name}.{inner}"
            yield from _keys(section, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)
