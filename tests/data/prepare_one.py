"""``python -m tests.data.prepare_one FILE``: prepares it, prints the rows, logs what was done."""

import logging
import sys

from moe_finetune.recipe.sections import DataSection
from tests.data.loading import prepare
from tests.support import tiny

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, force=True)
    section = DataSection(train=sys.argv[1])
    print(len(prepare(section.train, section, tiny.tokenizer(), "train")))
