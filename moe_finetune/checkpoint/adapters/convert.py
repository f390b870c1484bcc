"""Write an adapter of any program in one of :mod:`moe_finetune.checkpoint.adapters.forms`.

The changes stay the same; ranks and scalings may differ.
"""

import json
from pathlib import Path

from moe_finetune.checkpoint.adapters.files import (
    BIAS_FILE,
    CONFIG,
    METADATA,
    PREFIX,
    SHARED_OUTER,
    WEIGHTS,
)
from moe_finetune.checkpoint.adapters.forms import Form
from moe_finetune.checkpoint.adapters.open_adapter import check_adapter
from moe_finetune.checkpoint.open import open_checkpoint
from moe_finetune.checkpoint.weight_files import Content, read_tensor, write_checkpoint
from moe_finetune.errors import AdapterError
from moe_finetune.io import check_output, one_writer
from moe_finetune.io.safetensors_header import TensorInfo, build_header


@one_writer
def convert_adapter(path: str | Path, base: str | Path, output: str | Path, form: Form) -> Path:
    """Write the adapter ``path`` of ``base`` in another form to ``output``, tensor by tensor."""
    output = Path(output)
    check_output(output)
    adapter = check_adapter(path, open_checkpoint(base, stored=True))
    if form.write is None:
        raise AdapterError(
            f"{path}: this form of {form.programs} is only read; --to list shows those written"
        )
    config, tensors = form.write(adapter)
    small = {CONFIG: json.dumps(config, indent=2).encode()}
    if (adapter.folder / BIAS_FILE).is_file():
        small[BIAS_FILE] = (adapter.folder / BIAS_FILE).read_bytes()
    if (adapter.folder / METADATA).is_file():
        metadata = {"experts_dropout": adapter.metadata.experts_dropout, **adapter.metadata.extra}
        metadata.pop(SHARED_OUTER, None)  # all factors are written
        small[METADATA] = json.dumps(metadata, indent=2).encode()
    layout = [(PREFIX + key, info.dtype, info.shape) for key, info in tensors.items()]
    header = build_header(Path(WEIGHTS), layout, {"format": "pt"})
    contents = {PREFIX + key: _content(info) for key, info in tensors.items()}
    write_checkpoint(output, {WEIGHTS: header}, contents, small)
    return output


def _content(info: TensorInfo) -> Content:
    return lambda _target: iter([read_tensor(info).contiguous()])
