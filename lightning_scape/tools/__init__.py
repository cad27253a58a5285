"""The command lines: plan, doctor, report, litgpt-scape."""
