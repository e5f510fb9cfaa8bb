"""Where the time of a step goes, and which rank the others wait for."""
