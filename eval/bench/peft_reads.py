"""Which families' adapters of transformers 4 does stock PEFT read on transformers 5?

Such an adapter has a pair of factors for each expert's own matrix. For each family's tiny model in
float32, logits of base + adapter in stock PEFT are compared with those of weights to which the
products were added by hand.

    PYTHONPATH=. python eval/bench/peft_reads.py [--save]
"""

import argparse
import json
import logging
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from saved import add_save, finish
from torch import Tensor

from moe_finetune.models import FAMILIES
from moe_finetune.models.class_structure import class_of
from tests.support import tiny, tiny_families

RANK, ALPHA = 4, 12
KEYS = "base_model.model.{}.lora_{}.weight"


def verdict(name: str, folder: Path) -> str | None:
    """ "right", "nothing", "wrong" or "raises"; None if no matrix of an expert is a tensor."""
    model = (tiny if name in tiny.FAMILY_NAMES else tiny_families).model(name)
    base, adapter, by_hand = (folder / part for part in ("base", "adapter", "by_hand"))
    model.save_pretrained(base)
    stored = load_file(base / "model.safetensors")
    matrices = {n for n, tensor in stored.items() if tensor.ndim == 2 and n.endswith(".weight")}
    experts = sorted(n for n in matrices if ".experts." in n)
    if not experts:
        return None
    torch.manual_seed(1)
    factors, changed = {}, dict(stored)
    for path in (n.removesuffix(".weight") for n in experts):
        rows, columns = stored[f"{path}.weight"].shape
        a, b = torch.randn(RANK, columns), torch.randn(rows, RANK) * 0.05
        factors |= {KEYS.format(path, "A"): a, KEYS.format(path, "B"): b}
        changed[f"{path}.weight"] = stored[f"{path}.weight"] + ALPHA / RANK * b @ a
    adapter.mkdir()
    ends = sorted({n.split(".")[-2] for n in experts})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ends}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors, adapter / "adapter_model.safetensors")
    by_hand.mkdir()
    (by_hand / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(changed, by_hand / "model.safetensors", {"format": "pt"})
    read = class_of(model.config).from_pretrained
    plain, wanted = logits(read(base)), logits(read(by_hand))
    try:
        found = logits(PeftModel.from_pretrained(read(base), adapter))
    except (KeyError, RuntimeError, TypeError, ValueError):
        return "raises"
    if torch.equal(found, plain):
        return "nothing"
    return "right" if float((found - wanted).norm() / (wanted - plain).norm()) < 1e-3 else "wrong"


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    """Of 3 x 17 tokens, in evaluation mode."""
    ids = torch.randint(4, 260, (3, 17), generator=torch.Generator().manual_seed(5))
    return model.eval()(input_ids=ids).logits


def main() -> None:
    """Print a line for each family, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_save(parser, "peft_reads")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found: dict[str, str] = {}
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            answer = verdict(name, Path(folder))
        if answer is not None:
            found[name] = answer
            print(f"{name:22} {answer}", flush=True)
    finish(arguments, {"families": found, "counts": Counter(found.values())})


if __name__ == "__main__":
    main()
