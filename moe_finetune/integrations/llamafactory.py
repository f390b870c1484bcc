"""LLaMA-Factory's callbacks: ``python -m moe_finetune.integrations.llamafactory config.yaml``.

LLaMA-Factory takes callbacks as an argument of ``run_exp``, not in its config. This command reads
the same config file as ``llamafactory-cli train``, removes its ``specialization:`` section, and
passes the rest and the callback to ``run_exp``. For several GPUs: ``torchrun --nproc-per-node 8 -m
moe_finetune.integrations.llamafactory config.yaml``.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_finetune.errors import MoeFinetuneError, RecipeError
from moe_finetune.io.yaml_file import read_yaml
from moe_finetune.training.callback.callback import SpecializationCallback

SECTION = "specialization"


def train(config: str | Path, overrides: Sequence[str] = ()) -> None:
    """Train as LLaMA-Factory does, with the method of the config's ``specialization:`` section.

    Args:
        config: a LLaMA-Factory config in YAML or JSON.
        overrides: ``key=value`` as on its command line.
    """
    arguments = read_yaml(Path(config), RecipeError)
    if not isinstance(arguments, dict):
        raise RecipeError(f"{config}: must be a mapping of LLaMA-Factory's options")
    callback = SpecializationCallback.from_section(arguments.pop(SECTION, None))
    from llamafactory.train.tuner import run_exp

    run_exp({**arguments, **_parsed(overrides)}, callbacks=[callback])


def _parsed(overrides: Sequence[str]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return dict(OmegaConf.to_container(OmegaConf.from_cli(list(overrides))))  # type: ignore[arg-type]


def main() -> int:
    """The command line; prints one message and returns 2 for a wrong config."""
    if len(sys.argv) < 2:
        print("usage: python -m moe_finetune.integrations.llamafactory CONFIG [key=value ...]")
        return 2
    try:
        train(sys.argv[1], sys.argv[2:])
    except MoeFinetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
