"""Find the names that tests require of a program, from trusted sources."""

from __future__ import annotations

import ast
import builtins
import symtable
import sys

from moe_finetune.errors import DataError


def free_names(source: str) -> set[str]:
    """Return the names that ``source`` uses and does not bind at its top level.

    Raises:
        DataError: the source is not Python, or imports ``*``, which hides what it binds.
    """
    try:
        stars = [n for n in ast.walk(ast.parse(source))
                 if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]  # fmt: skip
        top = symtable.symtable(source, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        raise DataError(f"tests that are not Python ({error}): {source[:80]!r}") from None
    if stars:
        raise DataError(
            f"tests that import * from {stars[0].module}; import the names that they use"
        )
    bound = _bound(top)
    used: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables.extend(table.get_children())
        used |= {s.get_name() for s in table.get_symbols()
                 if s.is_referenced() and (table is top or s.is_global())}  # fmt: skip
    return used - bound


def required_names(tests: str, setup: str = "", reference: str = "") -> tuple[str, ...]:
    """Return the names that ``tests`` require of the program.

    They are those that tests use and that neither the tests nor ``setup`` bind. A name that Python
    defines (``sum``, ``math``) is required only if a reference solution defines it.
    """
    defined = set()
    if reference:
        try:
            symbols = symtable.symtable(reference, "<reference>", "exec").get_symbols()
        except (SyntaxError, ValueError) as error:
            raise DataError(f"a reference solution that is not Python ({error})") from None
        defined = {s.get_name() for s in symbols if s.is_assigned() and not s.is_imported()}
    reserved = set(dir(builtins)) | sys.stdlib_module_names
    return tuple(sorted(free_names(f"{setup}\n{tests}") - (reserved - defined)))


def _bound(table: symtable.SymbolTable) -> set[str]:
    return {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
