"""Says what a job would do: its checks, the lines of `clipship check`. Starts nothing; imports no torch."""
