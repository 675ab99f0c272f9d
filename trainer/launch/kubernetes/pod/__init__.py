"""First processes in the pods of an MPIJob."""
