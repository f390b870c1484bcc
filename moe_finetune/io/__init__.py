"""Read and write files: outputs appear whole or not at all, each with a single writer."""

from moe_finetune.io.atomic import sync, write_atomic, write_new
from moe_finetune.io.folder import check_output, output_folder, write_small
from moe_finetune.io.leftovers import clear_beside, clear_leftovers, contents
from moe_finetune.io.lock import one_writer, output_lock

__all__ = [
    "check_output",
    "clear_beside",
    "clear_leftovers",
    "contents",
    "one_writer",
    "output_folder",
    "output_lock",
    "sync",
    "write_atomic",
    "write_new",
    "write_small",
]
