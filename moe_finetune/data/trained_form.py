"""The form of the rows that a run was trained on, to ask its model in the same way."""

from contextlib import suppress

from pydantic import ValidationError

from moe_finetune.data.row_forms import Form
from moe_finetune.data.sources import SourceReader, listed
from moe_finetune.errors import DataError, MoeFinetuneError
from moe_finetune.io.run_folder import RunFolder
from moe_finetune.io.split_files import local_files
from moe_finetune.io.yaml_file import read_yaml
from moe_finetune.recipe.data import DataSection

CHAT: Form = "messages"


def trained_form(run: RunFolder) -> Form | None:
    """The form of the first row that ``run`` was trained on; None if its file cannot be read."""
    with suppress(MoeFinetuneError, OSError, ValidationError, KeyError, TypeError, StopIteration):
        data = DataSection.model_validate(read_yaml(run.recipe, DataError)["data"])
        source = listed(data.train, "train")[0]
        if local_files(source.path, source.split or data.split) is not None:
            reader = SourceReader(source, data)
            next(iter(reader))
            form: Form = reader.former.form
            return form
    return None
