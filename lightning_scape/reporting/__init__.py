"""The report of a run: its figures in a file that only grows, and a page with plots that is made of them."""

from lightning_scape.reporting.history import FIGURES, History, Run
from lightning_scape.reporting.page import PAGE, write_page

__all__ = ["FIGURES", "PAGE", "History", "Run", "write_page"]
