"""The coordinator: who is a member of the run, and whether and how it goes on."""
