"""A simulated world for real supervisors: one seed is one schedule of faults, on a clock of its own."""
