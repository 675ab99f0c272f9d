"""Room of what a rank knows of the world around it, and of what outlives it: both towers stand on this.

No torch and no pydantic.
"""
