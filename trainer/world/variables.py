"""Names of the variables by which a launcher, the supervisors and the ranks tell each other who they are."""

EXPECTED_SIZE = "CLIPSHIP_WORLD_SIZE"
"""Variable with the size that our launchers export.

A rank that finds another size stops, so that N ranks never become N worlds of one.
"""
STARTED_HERE = "CLIPSHIP_STARTED_HERE"
"""Variable that `clipship run` sets if it starts the ranks itself."""
GENERATION = "CLIPSHIP_GENERATION"
"""Variable with the generation of a rank: how many times the ranks of this start have been started."""
SUBMISSION = "CLIPSHIP_LAUNCHER_JOB"
"""Variable with an id that all starts of one submission to a scheduler have, and no others."""
MEETS = "CLIPSHIP_MEETS"
"""Variable that a launcher sets to 1 for Horovod's ranks that meet at MASTER_ADDR, without MPI."""
CROSS = ("CLIPSHIP_CROSS_RANK", "CLIPSHIP_CROSS_SIZE")
"""Variables with a node's number among those that have this rank's local rank, and with their number."""
HOST = "CLIPSHIP_HOST"
"""Variable with the name by which the launcher knows this node, one for each node."""
USES_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's variable that says that torchrun's agent, and not rank 0, serves MASTER_PORT."""
SPARE_NODES = "CLIPSHIP_SPARE_NODES"
"""Variable in which a launcher says how many of the last nodes of its supervisors are spares.

The launcher numbers and counts all supervisors, and CLIPSHIP_WORLD_SIZE is their number, spares included;
each node has as many. A supervisor gives its rank the size of the world without spares.
"""
KEEPS_GOING = "CLIPSHIP_KEEPS_GOING"
"""Variable that a launcher sets to 1 if it lets the others go on when a supervisor ends or is killed.

Without it a lost supervisor ends the run, since its launcher would end it anyway.
"""
RESPAWNS = "CLIPSHIP_RESPAWNS"
"""Variable that a launcher sets to 1 if it starts a supervisor that was killed again, after a while.

The run then waits for such a supervisor if it cannot go on without it.
"""
STARTS_AGAIN = "CLIPSHIP_STARTS_AGAIN"
"""Variable of a launcher that starts all supervisors again, as the next generation, if the run folder asks.

MPI ends all processes when one is gone. "lost": only the loss of a supervisor needs that. "always": the ranks
cannot be started again in any other way.
"""
RESPAWNED = "CLIPSHIP_RESPAWNED"
"""Variable that a launcher sets for a supervisor that takes the place of one that is gone.

It has no rank until the coordinator gives it one. The value is 1, or one more than the number of times in a
row that such a supervisor has left with an error.
"""
NODE = "CLIPSHIP_NODE"
"""Variable with the node's name, in place of the host's name. Tests make several nodes of one machine."""
OF_A_START = (*(GENERATION, SPARE_NODES, KEEPS_GOING, RESPAWNS, STARTS_AGAIN, RESPAWNED, SUBMISSION),)
"""Variables that a launcher sets for one start of its ranks; those that it was given are of another one."""
