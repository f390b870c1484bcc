"""The command line: one function per verb that parses, calls, prints. See ``main`` for errors."""

import errno
import importlib.metadata
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

# Importing these modules registers their verbs.
from moe_finetune.cli import (  # noqa: F401
    ask,
    checkpoints,
    evaluation,
    experts,
    interactive,
    runs,
    verify,
)
from moe_finetune.cli.app import app, check_alone, split_common
from moe_finetune.cli.pipes import outlive_readers
from moe_finetune.errors import (
    MoeFinetuneError,
    VerificationError,
    disk_is_full,
    is_machine_failure,
    reason_of,
)
from moe_finetune.io.signals import sigterm_interrupts
from moe_finetune.io.terminal import OWN, Records, Terminal, use_terminal
from moe_finetune.io.versions import warn_of_untested
from moe_finetune.plugins import use, use_inherited

# A path from the user cannot be used as requested.
_PATH_ERRORS = (
    *(errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EEXIST),
    *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb and return the exit code.

    0: success; 1: a failure of the machine (disk, memory) or of a check; 2: wrong input, with one
    message on stderr; 130: interrupted. ``--debug`` and ``--quiet`` may appear anywhere;
    ``--debug`` shows the traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"moe-finetune {importlib.metadata.version('moe-finetune')}")
        return 0
    try:
        arguments, common = split_common(arguments)
        check_alone(arguments)
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    debug = common.debug
    for argument in arguments:
        escaped = argument.encode("utf-8", "backslashreplace").decode()
        if escaped != argument:  # a file name that is not UTF-8 reaches Python as surrogates
            print(f"error: {escaped}: is not a UTF-8 name; rename the file", file=sys.stderr)
            return 2
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    outlive_readers()
    ours = Terminal(quiet=common.quiet, capture=True)
    previous = use_terminal(ours)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[Records()])
    # PEFT imports this if installed, and it logs which hub kernel it cannot use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    logging.getLogger(OWN).setLevel(logging.DEBUG if debug else logging.INFO)
    if not {"-h", "--help"} & set(arguments) and os.environ.get("RANK", "0") == "0":
        warn_of_untested()
    try:
        verb = next((word for word in arguments if not word.startswith("-")), "moe-finetune")
        with sigterm_interrupts(), ours.starting(verb):
            use_inherited()
            if common.plugins:
                from moe_finetune.recipe.yaml_tree import find_recipe
            for plugin in common.plugins:
                use(str(find_recipe(Path(plugin))))
            return app(arguments, prog_name="moe-finetune", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except MoeFinetuneError as error:
        if debug:
            raise
        from moe_finetune.recipe.section_base import hide_secrets

        print(f"error: {hide_secrets(str(error))}", file=sys.stderr)  # overrides may contain some
        failed = isinstance(error, VerificationError) or is_machine_failure(error)
        return 1 if failed else 2
    except MemoryError:
        if debug:
            raise
        print("error: out of memory; free some memory, or use a larger machine", file=sys.stderr)
        return 1
    except OSError as error:
        if debug:
            raise
        named = error.filename is not None and error.strerror is not None
        escaped = f"{error.filename}: {error.strerror}" if named else str(error)
        print(f"error: {escaped}{_remedy(error)}", file=sys.stderr)
        return 2 if error.errno in _PATH_ERRORS else 1
    except Exception as error:
        if is_machine_failure(error) and not debug:
            print(f"error: {reason_of(error)}{_remedy(error)}", file=sys.stderr)
            return 1
        if not hasattr(error, "exit_code") or not hasattr(error, "show"):
            raise
        error.show()  # a usage error, which typer prints
        return int(error.exit_code)
    finally:
        use_terminal(previous)


def _remedy(error: BaseException) -> str:
    """What to do about a full disk that another library met: its message has only a number."""
    return "; free some space and repeat the command" if disk_is_full(error) else ""
