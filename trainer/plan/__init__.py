"""What a job would do: its checks, and what `clipship check` says of it. Starts nothing; imports no torch."""
