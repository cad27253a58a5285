"""SCAPE: its configuration, its optimizer and what a step does."""
