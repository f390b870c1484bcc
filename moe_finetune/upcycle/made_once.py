"""A product that is made once from its inputs; a killed command continues where it was."""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moe_finetune.errors import OutputBusyError, OutputExistsError
from moe_finetune.io.atomic import write_atomic
from moe_finetune.io.hashes import sha256_json, to_json
from moe_finetune.io.json_file import read_object
from moe_finetune.io.lock import output_lock

log = logging.getLogger(__name__)
DEVICES = "CUDA_VISIBLE_DEVICES"


def once(
    folder: Path,
    name: str,
    inputs: Mapping[str, Any],
    make: Callable[[Path, Path], object],
    wait: bool = True,
) -> str:
    """Make ``folder/name`` unless it was made from equal ``inputs``; return their hash.

    ``made/NAME.json``, with the inputs, is written before the product, and the product appears
    whole: if it exists, it is complete. Processes that share ``folder`` wait for each other.

    Args:
        inputs: plain values, with the hashes of the products that it is made from.
        make: called with the product's path and a folder for what must survive a kill.
        wait: for another process that is making it, instead of raising OutputBusyError.
    """
    product, note = folder / name, folder / "made" / f"{name}.json"
    present = json.loads(to_json(dict(inputs)))
    key = sha256_json(present)
    work = folder / "work" / f"{name}-{key[:8]}"
    with ExitStack() as stack:
        try:
            stack.enter_context(output_lock(product))
        except OutputBusyError:
            if not wait:
                raise
            log.warning("%s: another process is making it; waiting for it to end", name)
            stack.enter_context(output_lock(product, wait=True))
        if product.exists():
            _check_equal(product, note, present)
            log.info("%s: done already", name)
        else:
            devices = f" on {DEVICES}={os.environ[DEVICES]}" if DEVICES in os.environ else ""
            log.info("%s: begins%s", name, devices)
            started = time.perf_counter()
            write_atomic(note, to_json(present, 1) + "\n")
            for path in (work, product.parent):
                path.mkdir(parents=True, exist_ok=True)
            make(product, work)
            log.info("%s: %.1f s", name, time.perf_counter() - started)
        shutil.rmtree(work, ignore_errors=True)  # also of a process that was killed just before
    return key


def _check_equal(product: Path, note: Path, inputs: Mapping[str, Any]) -> None:
    noted = read_object(note, OutputExistsError, "delete it") if note.is_file() else {}
    changed = sorted(key for key in {*noted, *inputs} if noted.get(key) != inputs.get(key))
    if changed:
        raise OutputExistsError(
            f"{product}: made with other values of {', '.join(changed)}. Nothing was deleted: "
            "continue with its original settings, choose another --output, or delete it, and what "
            "was made from it, to make it again"
        )
