"""A plan as one HTML page that needs nothing else: `ds-autoplan report`."""

from ds_autoplan.report.page import render

__all__ = ["render"]
