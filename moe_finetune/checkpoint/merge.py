"""Merge an adapter into a base checkpoint, tensor by tensor, without building the model."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moe_finetune.checkpoint.adapters.factor_layout import OF_EXPERTS, names_experts
from moe_finetune.checkpoint.adapters.files import Adapter
from moe_finetune.checkpoint.adapters.open_adapter import open_adapter
from moe_finetune.checkpoint.adapters.updates import Factors, OpenAdapter, Replace, parts_in_files
from moe_finetune.checkpoint.add_updates import Merged
from moe_finetune.checkpoint.exported_bias import plan_bias
from moe_finetune.checkpoint.open import Checkpoint, open_checkpoint, stale_head
from moe_finetune.checkpoint.small_files import (
    CARD_FILE,
    carried_files,
    is_hub_id,
    model_card,
    public_name,
)
from moe_finetune.checkpoint.tokenizer_files import GENERATION, for_merge, is_tokenizer_file
from moe_finetune.checkpoint.weight_files import (
    Content,
    Progress,
    check_values,
    constant,
    copy_of,
    write_checkpoint,
)
from moe_finetune.errors import CheckpointError
from moe_finetune.io import check_output, one_writer
from moe_finetune.io.check_config import QUANTIZATION
from moe_finetune.io.checkpoint_files import COPY_AGAIN, INDEX, SINGLE, index_text
from moe_finetune.io.counted import counted
from moe_finetune.io.json_file import read_object
from moe_finetune.io.safetensors_header import FLOATS, Header, TensorInfo, build_header
from moe_finetune.models.family import CORRECTION_BIASES

# Names of the --dtype option as stored in safetensors.
STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Selection is decided by differences smaller than half precision resolves; it stays in float32.
_KEPT_FLOAT32 = (*CORRECTION_BIASES, ".gate.bias")


@dataclass
class Merge:
    """Everything that a merge does.

    ``contents`` fill the tensors of ``files``; ``changed`` says how an adapter or bias changes
    them, and ``copied`` are those that keep their bytes.
    """

    base: Checkpoint
    output: Path
    files: dict[str, Header]
    contents: dict[str, Content] = field(repr=False)
    changed: dict[str, str]
    copied: set[str]
    small_files: dict[str, bytes] = field(repr=False)
    notes: list[str]
    seconds: float = 0.0

    @property
    def size(self) -> int:
        weights = sum(header.file_bytes for header in self.files.values())
        return weights + sum(len(content) for content in self.small_files.values())

    def kinds(self) -> list[str]:
        """A line for each kind of changed tensor: name without numbers, update and count."""
        kinds = (
            (".".join("*" if part.isdigit() else part for part in name.split(".")), how)
            for name, how in self.changed.items()
        )
        return [
            f"  {name}: {how}, {count}" for (name, how), count in sorted(Counter(kinds).items())
        ]

    def counts(self) -> str:
        """How many tensors the adapter changes, have the base's bytes, or are only converted."""
        converted = len(self.contents) - len(self.changed) - len(self.copied)
        counts = f"{counted(len(self.changed), 'tensor')} changed, "
        counts += f"{len(self.copied)} copied byte for byte"
        return f"{counts}, {converted} converted to another dtype" if converted else counts

    def text(self) -> str:
        """What ``--dry-run`` prints: kinds of changes, counts and notes."""
        files = counted(len(self.files), "file")
        return "\n".join(
            [
                *self.kinds(),
                f"{self.counts()}; {counted(len(self.contents), 'tensor')} in {files}, "
                f"{self.size / 1e9:.3f} GB",
                *self.notes,
            ]
        )


@one_writer
def merge_adapter(
    base: str | Path | Checkpoint,
    adapter: str | Path,
    output: str | Path,
    dtype: str | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    bias: Mapping[int, Sequence[float]] | None = None,
    progress: Progress | None = None,
    tokenizer: str | None = None,
) -> Merge:
    """Write ``base + adapter`` as an ordinary checkpoint with the base's names, files and config.

    A quantized base is decoded, to bfloat16 unless ``dtype`` says otherwise. Memory does not grow
    with the checkpoint: a few tens of megabytes per thread plus one layer's factors; for a
    quantized base a few copies of one matrix per thread. The output appears complete or not at all.

    Args:
        adapter: adapter folder.
        dtype: "float32", "float16", "bfloat16", or None to keep each tensor's stored dtype.
        dry_run: only plan and check; the result's ``text()`` shows what would be done.
        bias: loss-free routing bias by decoder layer, a number per expert, written where the family
            stores it. Without it the output keeps the base's.
        progress: called with (bytes done, total bytes).
        tokenizer: "base" or "adapter": whose tokenizer, chat template and end tokens; None takes
            the adapter folder's where it has one that says something else.

    Raises:
        CheckpointError, AdapterError, UnsupportedModelError: see :func:`plan_merge`.
        OutputExistsError, OutputBusyError, DiskSpaceError: before anything is written.
        NumericsError: a value does not fit into ``dtype``, or is not finite after the merge.
    """
    started = time.perf_counter()
    output = Path(output)
    check_output(output, overwrite)
    opened = open_checkpoint(base, stored=True)
    trained = open_adapter(adapter, opened)
    merge = plan_merge(trained, output, dtype, bias)
    own_tokenizer, note = for_merge(opened, trained.folder, tokenizer)
    if own_tokenizer:
        replaced = {n for n in merge.small_files if n != GENERATION and is_tokenizer_file(n)}
        kept = {n: content for n, content in merge.small_files.items() if n not in replaced}
        merge.small_files = kept | own_tokenizer
        merge.notes.append(note)
    merge.small_files[CARD_FILE] = _card(opened, trained).encode()
    if not dry_run:
        files, contents = merge.files, merge.contents
        write_checkpoint(output, files, contents, merge.small_files, overwrite, progress)
    merge.seconds = time.perf_counter() - started
    return merge


def _card(base: Checkpoint, adapter: Adapter) -> str:
    """The export's model card, from the adapter's own notes on its training."""
    training = adapter.metadata.extra
    named = adapter.config.get("base_model_name_or_path")
    hub = named if named and is_hub_id(named) else None
    method = str(training["method"]) if training.get("method") else None
    return model_card(
        hub or base.folder,
        f"{public_name(hub or base.folder)}, fine-tuned" + (f" with {method}" if method else ""),
        method=method,
        data=list(dict.fromkeys(map(str, training.get("data") or ()))),
        folder=base.folder,
    )


def plan_merge(
    adapter: OpenAdapter,
    output: Path,
    dtype: str | None = None,
    bias: Mapping[int, Sequence[float]] | None = None,
) -> Merge:
    """Plan base + ``adapter``: nothing is computed or written; an impossible merge raises."""
    if dtype is not None and dtype not in STORED:
        raise CheckpointError(f"dtype '{dtype}' must be one of {', '.join(STORED)}")
    base = adapter.base
    values, config_changes, notes = plan_bias(base, bias)
    check_values([base.tensors[name] for name in values if name in base.tensors], CheckpointError)
    parts, factors = parts_in_files(adapter), Factors(adapter)
    if adapter.attention_only and names_experts(adapter, base):
        ends = {key.partition(".lora_")[0].rpartition(".")[2] for key in adapter.tensors}
        what = "no routed experts" if ends & {*OF_EXPERTS} else "attention only"
        notes.append(
            f"{adapter.folder.name}: {what}. Its target_modules name matrices of the "
            "experts, but PEFT before 0.19 found none of them in the stacks of transformers 5"
        )
    files: dict[str, Header] = {}
    contents: dict[str, Content] = {}
    changed: dict[str, str] = {}
    copied: set[str] = set()
    headers = base.files if base.quantized is None else base.quantized.decoded(base.files)
    for name, header in headers.items():
        if not header.tensors:
            continue  # only scales of another file's tensors
        file = name if len(base.files) > 1 or (base.folder / INDEX).is_file() else SINGLE
        in_file = {k: tuple(value.shape) for k, (at, value) in values.items() if at == name}
        files[file] = _target_header(header, Path(file), dtype, in_file)
        for target in files[file].tensors.values():
            source, updating = base.tensors.get(target.name), tuple(parts.get(target.name, ()))
            if target.name in values:
                contents[target.name] = constant(values[target.name][1])
                changed[target.name] = "routing bias"
                continue
            assert source is not None
            if updating:
                replaced = any(isinstance(part.update, Replace) for part in updating)
                how = "replaced by the adapter's tensor" if replaced else "low-rank update"
                changed[target.name] = how
            if base.quantized is not None and base.quantized.is_packed(target.name):
                contents[target.name] = Merged(source, updating, factors, base.quantized)
            elif updating and source.dtype not in FLOATS:
                raise CheckpointError(
                    f"{source.file}: '{target.name}' is stored as {source.dtype}; an adapter "
                    "cannot be merged into a quantized checkpoint; use the unquantized one"
                )
            elif updating or source.dtype != target.dtype:
                contents[target.name] = Merged(source, updating, factors)
            else:
                contents[target.name] = copy_of(source)
                copied.add(target.name)
    if dtype is not None:
        keys = [key for key in ("dtype", "torch_dtype") if key in base.config] or ["dtype"]
        config_changes |= {key: dtype for key in keys if base.config.get(key) != dtype}
    if base.quantized is not None:
        config_changes[QUANTIZATION] = None
        stored_as = STORED[dtype or "bfloat16"]
        notes.append(f"the base is stored as {base.quantized.format}; merged as {stored_as} floats")
    notes += [
        f"config.json: {key} " + ("is removed" if value is None else f"becomes {json.dumps(value)}")
        for key, value in config_changes.items()
    ]
    if changed:
        notes += stale_head(base)
    small = carried_files(base.folder, config_changes) | index_file(base, files)
    return Merge(
        base=base,
        output=output,
        files=files,
        contents=contents,
        changed=changed,
        copied=copied,
        small_files=small,
        notes=notes,
    )


def index_file(base: Checkpoint, files: Mapping[str, Header]) -> dict[str, bytes]:
    """The index for ``files``: the base's own bytes if they still fit; empty for a single file."""
    infos = [info for header in files.values() for info in header.tensors.values()]
    weight_map, total = {info.name: info.file.name for info in infos}, sum(i.size for i in infos)
    old = base.folder / INDEX
    if old.is_file():
        index = read_object(old, CheckpointError, COPY_AGAIN)
        total_size = (index.get("metadata") or {}).get("total_size", total)
        if index["weight_map"] == weight_map and (total_size == total or total == base.size):
            return {INDEX: old.read_bytes()}
    return {} if list(files) == [SINGLE] else {INDEX: index_text(infos).encode()}


def _target_header(
    header: Header, file: Path, dtype: str | None, added: Mapping[str, tuple[int, ...]]
) -> Header:
    def stored(info: TensorInfo) -> str:
        if info.name in added:
            return "F32"
        if dtype is None or info.dtype not in FLOATS or info.name.endswith(_KEPT_FLOAT32):
            return info.dtype
        return STORED[dtype]

    layout = [(info.name, stored(info), info.shape) for info in header.tensors.values()]
    layout += [(n, "F32", shape) for n, shape in added.items() if n not in header.tensors]
    if layout == [(info.name, info.dtype, info.shape) for info in header.tensors.values()]:
        moved = {  # as replace(), which takes a second for a hundred thousand
            n: TensorInfo(n, file, info.dtype, info.shape, info.offset, info.size)
            for n, info in header.tensors.items()
        }
        return Header(file, moved, header.metadata, header.raw)
    return build_header(file, layout, header.metadata or None)
