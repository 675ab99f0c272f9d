"""First processes in the pods of a run, whatever the kind of its job."""
