"""`[health]`: what is looked at before a run trains, and while it does."""

from trainer.job.fields import Seconds, Section


class Health(Section):
    preflight: bool = True
    """Look at nodes, collectives and the wire before the first step. `clipship doctor` does it alone."""
    preflight_s: Seconds = 20.0
    """Seconds that measuring may take; what does not fit is left out, and the table says so."""
