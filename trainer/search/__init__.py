"""Search: finds the pictures of a folder that are nearest to a text, in the terminal or on a page."""
