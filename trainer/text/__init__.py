"""Text for people: plurals, values that must not be shown, characters that must not reach a terminal."""
