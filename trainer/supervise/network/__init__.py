"""The connections between supervisors, and the requests that come from outside."""
