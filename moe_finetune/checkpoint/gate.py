"""Check an adapter: its content, and that it belongs to its base.

:func:`moe_finetune.checkpoint.opened.open_checkpoint` checks the base. Every command that takes an
adapter runs both before it builds or writes anything.
"""

import logging
from pathlib import Path

from moe_finetune.checkpoint.adapter import Adapter, check_finite, open_adapter, read_bias
from moe_finetune.checkpoint.adapter_metadata import METADATA
from moe_finetune.checkpoint.bias import check_bias
from moe_finetune.checkpoint.contents import Checkpoint
from moe_finetune.checkpoint.files import check_values, fingerprint, read_tensor
from moe_finetune.checkpoint.updates import read_updates
from moe_finetune.errors import AdapterError, CheckpointError
from moe_finetune.io.checkpoint_files import tensors_of
from moe_finetune.io.safetensors_header import TensorInfo

log = logging.getLogger(__name__)
_warned: set[Path] = set()
BASE_KEY = "base_sha256"
"""Key of ``moe_finetune.json``: the fingerprint of the base's tensors."""
STORED_KEY = "stored_base_sha256"
"""The same for a quantized base; the adapter may also be merged into the unquantized one."""


def check_adapter(path: str | Path, base: Checkpoint) -> Adapter:
    """Open an adapter to use unmerged with ``base``, with all checks of a merge.

    Raises:
        AdapterError: see :func:`moe_finetune.checkpoint.updates.read_updates` and
            :func:`check_belongs`.
        CheckpointError: a bias is for a layer without experts, or has the wrong length.
    """
    adapter = open_adapter(path)
    read_updates(adapter, base)
    check_bias(base, read_bias(adapter.folder) or {})
    check_belongs(adapter, base)
    return adapter


def check_belongs(adapter: Adapter, base: Checkpoint) -> None:
    """Check that ``adapter``, whose tensors fit ``base``, is finite and made for it.

    Raises:
        AdapterError: names the tensor that is not finite, or both bases' fingerprints.
    """
    _check_tables(adapter, base)
    _check_base(adapter, base)
    check_finite(adapter)


def _check_base(adapter: Adapter, base: Checkpoint) -> None:
    key, tensors = named_tensors(base)
    recorded = adapter.metadata.extra.get(key)
    if recorded is None:
        folder = (
            adapter.folder.absolute()
        )  # another machine may have a different folder by this name
        if folder in _warned:
            return
        _warned.add(folder)
        log.warning(
            "%s: does not record its base (%s of %s), so only its shapes can be checked against %s",
            adapter.folder,
            key,
            METADATA,
            base.folder,
        )
        return
    actual = fingerprint(tensors)
    if recorded != actual:
        # A base damaged since training also differs; its damaged tensor is then the better message.
        check_values(tensors, CheckpointError, "copy the checkpoint again")
        raise AdapterError(
            f"{adapter.folder}: was trained on another base: the tensors of {base.folder} have "
            f"the fingerprint {actual[:12]}, {METADATA} names {str(recorded)[:12]}; give the base "
            "that it was trained on (merge: --base)"
        )


def named_tensors(base: Checkpoint) -> tuple[str, list[TensorInfo]]:
    """The key of the base's fingerprint in ``moe_finetune.json``, and the tensors it covers."""
    if base.quantized is None:
        return BASE_KEY, list(base.tensors.values())
    return STORED_KEY, list(tensors_of(base.files).values())


def _check_tables(adapter: Adapter, base: Checkpoint) -> None:
    """Check that integer tensors of a saved module equal the base's, which a merge keeps."""
    for key, info in adapter.tables.items():
        name = base.names.files.get(key, [key])[0]
        table = base.tensors.get(name)
        if (
            table is None
            or table.shape != info.shape
            or (read_tensor(table) != read_tensor(info)).any()
        ):
            raise AdapterError(
                f"{adapter.folder}: adapter tensor '{key}' differs from the base's '{name}'; the "
                "adapter was trained on another base"
            )
