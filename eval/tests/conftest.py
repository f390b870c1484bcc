"""Fixtures that tests of eval/ share with those of the package."""

from tests.conftest import data_file, tiny_checkpoint

__all__ = ["data_file", "tiny_checkpoint"]
