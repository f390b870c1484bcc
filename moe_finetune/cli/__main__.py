"""``python -m moe_finetune.cli``."""

import sys

from moe_finetune.cli import main

sys.exit(main())
