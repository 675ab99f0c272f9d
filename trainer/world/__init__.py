"""What a rank knows of the world around it, and what outlives it: both towers stand on this.

No torch and no pydantic.
"""
