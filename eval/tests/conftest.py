"""Fixtures that tests of eval/ share with those of the package."""

from tests.conftest import data_file, p0_released, tiny_checkpoint

__all__ = ["data_file", "p0_released", "tiny_checkpoint"]
