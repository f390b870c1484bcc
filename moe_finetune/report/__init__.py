"""The report: reads the results of runs, never a model, and writes one offline HTML page."""

from moe_finetune.report.page import write_report

__all__ = ["write_report"]
