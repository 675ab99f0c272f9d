"""The model of a job: how it is built and compiled, its loss and its optimizer."""
