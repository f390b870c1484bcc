"""``python -m moe_finetune``: the command line."""

import sys

from moe_finetune.cli import main

if __name__ == "__main__":
    sys.exit(main())
